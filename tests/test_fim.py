"""Training for completion: windows with a middle cut out, streams of files with their paths, files for a test."""

import itertools
import json
import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from conftest import display, metaspace_tokenizer, refuses, toy
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import split_documents
from dunes.data import (
    FillInMiddle,
    PackedText,
    Windows,
    code_size,
    collect_corpus,
    file_header,
    hold_out_test,
    missing_sentinels,
    open_shard,
    token_shard,
)
from dunes.data.fim import sentinels
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import evaluate
from dunes.ops.cross_entropy import IGNORE
from dunes.runs.corpus import choose_completion, gather, tokenize, with_test_files
from dunes.runs.train import TrainTask
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer
from dunes.text.tokenizer import SPECIAL
from dunes.train.loss import next_token_loss
from small_models import random_model

WINDOWS = 1_500
WORDS = [
    "value", "return ", "self.", "limit=", "(", "):", "\u00e9", "gr\u00f6\u00dfe", "\u65e5\u672c\u8a9e",
    "\U0001f642", "\U0001f469\u200d\U0001f467", "e\u0301", "\u2028", "\x0c", "\t", "    ", "0x1f",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|file_sep|>", "\ufeff",
]  # fmt: skip


def made_up_text(lines, seed=0):
    """Lines of some twenty characters of all kinds, with all three line ends."""
    chance = random.Random(seed)
    return "".join(
        "".join(chance.choices(WORDS, k=chance.randrange(8))) + chance.choice(["\n", "\n", "\r\n", "\r"])
        for _ in range(lines)
    )


TEXT = made_up_text(3000)
BPE = Tokenizer.train("bpe", [made_up_text(300, 1)], 700)
BYTES = Tokenizer.train("bytes", [])
CHARS = Tokenizer.train("chars", [TEXT, "a/01234.py"])
TOKENIZERS = {"bpe": BPE, "bytes": BYTES, "chars": CHARS}


def window(tokenizer, number):
    """A window of made-up text in the middle of one document."""
    ids, chance = stream(tokenizer), np.random.default_rng(number)
    length = chance.integers(60, 140)
    start = chance.integers(len(ids) - length)
    return ids[start : start + length]


@cache
def stream(tokenizer):
    return np.array(tokenizer.encode(TEXT))


def text_of(tokenizer, ids):
    return b"".join(tokenizer.token_bytes[i] for i in ids).decode(errors="ignore")


def is_arranged(tokenizer, ids):
    return bool(np.isin(sentinels(tokenizer).prefix, ids))


@pytest.fixture(scope="module")
def arranged():
    """Pairs of a window and what became of it, of all tokenizers."""
    pairs = []
    for number in range(WINDOWS):
        tokenizer = list(TOKENIZERS.values())[number % 3]
        ids = window(tokenizer, number)
        pairs.append((tokenizer, ids, FILLS[id(tokenizer)](ids, np.random.default_rng(number))))
    return pairs


def rejoin(ids, tokenizer):
    """Prefix, middle and suffix of a rearranged window; with the suffix first, prefix and middle are one text."""
    marks, window = sentinels(tokenizer), ids.tolist()
    places = [window.index(mark) for mark in marks[:3]]
    bounds = [*places, window.index(marks.end, places[2])]
    prefix, suffix, middle = (text_of(tokenizer, window[a + 1 : b]) for a, b in itertools.pairwise(bounds))
    return prefix, middle, suffix


FILLS = {id(tokenizer): FillInMiddle(tokenizer, 1.0) for tokenizer in TOKENIZERS.values()}


def test_thousands_of_windows_rejoin_to_their_text(arranged):
    """All of the text but the end of the suffix is there, in order, in exactly as many ids."""
    left_alone = dropped = 0
    for tokenizer, ids, result in arranged:
        assert len(result) == len(ids)
        if not is_arranged(tokenizer, result):
            assert (result == ids).all()
            left_alone += 1
            continue
        whole, parts = text_of(tokenizer, ids), "".join(rejoin(result, tokenizer))
        assert whole.startswith(parts), "nothing is lost at the beginning"
        dropped += len(whole) - len(parts)
        marks = sentinels(tokenizer)
        assert [np.sum(result == mark) for mark in marks] == [1, 1, 1, 1, 0], "spelled ones are text"
    assert left_alone < 0.01 * WINDOWS
    assert dropped < 25 * WINDOWS, "characters: the suffix is shortened for sentinels and split tokens only"


def test_a_trained_tokenizer_never_reads_a_sentinel_in_text():
    """Although the pairs of a text with many of them would merge into one."""
    text = "<|fim_prefix|>\n<|endoftext|>\n" * 100
    for kind in ("bpe", "chars", "bytes"):
        tokenizer = Tokenizer.train(kind, [text], 400)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {tokenizer.token_id(name) for name in SPECIAL}


@pytest.mark.slow
def test_half_of_the_windows_have_their_suffix_first(arranged):
    forms = [rejoin(r, t)[0] == "" for t, _, r in arranged if is_arranged(t, r)]
    assert abs(np.mean(forms) - 0.5) < 5 * 0.5 / math.sqrt(len(forms)) + 0.005  # a prefix may be empty


def test_half_of_the_middles_end_at_line_ends(arranged):
    at_line_end = in_pair = empty = 0
    parts = [(rejoin(r, t), text_of(t, ids)) for t, ids, r in arranged if is_arranged(t, r)]
    for (prefix, middle, _), whole in parts:
        end = len(prefix + middle)
        at_line_end += whole[end] in "\r\n"
        in_pair += any(whole[i - 1 : i + 1] == "\r\n" for i in {len(prefix), end} if i)
        empty += middle == ""
    assert in_pair == 0
    assert 0.5 < at_line_end / len(parts) < 0.58, "some spans end at a line end too"
    assert 0.01 < empty / len(parts) < 0.1, "at the end of a line nothing is to be inserted"


def test_the_rate_is_that_asked_for(arranged):
    for rate in (-0.1, 50, math.nan):
        refuses("0 to 1", FillInMiddle, BYTES, rate)
    for rate in (0.0, 0.25, 0.9):
        fill = FillInMiddle(BYTES, rate)
        results = [fill(window(BYTES, n), np.random.default_rng(n)) for n in range(600)]
        share = np.mean([is_arranged(BYTES, r) for r in results])
        assert abs(share - rate) <= 5 * math.sqrt(rate * (1 - rate) / 600) + 0.01 * rate


def documents(tokenizer, headers=True):
    """Ids of five documents of different lengths as a shard has them, and where each begins."""
    ids, starts = [], []
    for number, lines in enumerate((12, 3, 40, 1, 25)):
        starts.append(max(0, len(ids) - 1))
        header = [tokenizer.token_id("<|file_sep|>"), *tokenizer.encode(f"a/{number}.py\n")] if headers else []
        ids += [*header, *tokenizer.encode(made_up_text(lines, number)), tokenizer.eos]
    return np.array(ids), np.array(starts)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_only_the_longest_text_of_a_window_is_rearranged(tokenizer):
    ids, starts = documents(tokenizer)
    marks = sentinels(tokenizer)
    result = FillInMiddle(tokenizer, 1.0)(ids, np.random.default_rng(0))
    changed = np.flatnonzero(result != ids)
    first = starts[2] + 1 + 1 + len(tokenizer.encode("a/2.py\n"))
    assert result[first] == marks.prefix == result[changed[0]], "after the header"
    assert changed[-1] < starts[3], "its end stays where it is"
    assert result[starts[3]] == marks.end == ids[starts[3]]
    assert result[starts[3] - 1] != marks.end, "which also ends the middle"
    assert "".join(rejoin(result, tokenizer)) == made_up_text(40, 2)[: len("".join(rejoin(result, tokenizer)))]


def test_a_window_without_enough_text_is_left_alone():
    fill, eos = FillInMiddle(BYTES, 1.0), BYTES.eos
    for ids in ([eos] * 40, [*BYTES.encode("short"), eos] * 9, BYTES.encode("é" * 30)[1:2] * 40):
        assert fill(np.array(ids), np.random.default_rng(0)).tolist() == ids


class Draws:
    """Leaves windows as they are, and remembers a number of each one's generator."""

    def __init__(self):
        self.seen = []

    def __call__(self, ids, chance):
        self.seen.append(chance.random())
        return ids

    def is_target(self, ids):
        return ids >= 0


def test_a_batch_depends_on_seed_epoch_and_position_only():
    ids, starts = documents(BPE)
    fill = FillInMiddle(BPE, 0.7)

    def rows(count, numbers, seed=0, tokens=ids):
        windows = Windows(tokens, 48, count, seed, fill)
        return torch.cat([torch.stack(windows.batch(n)[:2], 1) for n in numbers])

    per_epoch = Windows(ids, 48, 1).windows_per_epoch
    straight = rows(2, range(3 * per_epoch))
    assert torch.equal(straight, rows(1, range(6 * per_epoch))), "of any batch size"
    assert torch.equal(straight[10:], rows(2, range(5, 3 * per_epoch))), "resumed anywhere"
    assert not torch.equal(straight, rows(2, range(3 * per_epoch), seed=1))
    drawn = Draws()
    for number in range(2 * per_epoch):
        Windows(ids, 48, 1, 0, drawn).batch(number)
    assert len(set(drawn.seen)) == 2 * per_epoch, "each window is cut anew, and in each epoch"
    packed = rows(2, range(3 * per_epoch), tokens=PackedText(ids, starts, BPE.eos))
    assert torch.equal(packed[:, 0], straight[:, 0])


@pytest.mark.parametrize("headers", [False, True])
def test_separate_documents_keep_their_positions_and_what_an_editor_writes_is_no_target(headers):
    ids, starts = documents(BPE, headers)
    text, fill = PackedText(ids, starts, BPE.eos), FillInMiddle(BPE, 1.0)
    plain, cut = Windows(text, 96, 4), Windows(text, 96, 4, arrange=fill)
    model = random_model(vocab=BPE.vocab, context=96)
    seen = 0
    for number in range(12):
        (_, before, positions), (inputs, targets, moved) = plain.batch(number), cut.batch(number)
        assert torch.equal(positions, moved)
        assert torch.equal(positions[:, 1:] == 0, (moved[:, 1:] == 0))
        marks = torch.isin(inputs[:, 1:], torch.tensor(sentinels(BPE)[:3]))
        assert (targets[:, :-1][marks] == IGNORE).all()
        others = (targets[:, :-1] != IGNORE) & (before[:, :-1] != IGNORE)
        assert torch.equal(inputs[:, 1:][others], targets[:, :-1][others])
        assert torch.equal(before[:, :-1][~marks] == IGNORE, targets[:, :-1][~marks] == IGNORE)
        seen += int(marks.sum())
        with torch.no_grad():
            total, count, _ = next_token_loss(model, (inputs, targets, moved))
        assert math.isfinite(total.item())
        assert int(count) == int((targets != IGNORE).sum())
    assert seen > 100
    ids_and_targets = Windows(ids, 96, 4, arrange=fill).batch(0)
    assert [t.shape for t in ids_and_targets] == [(4, 96)] * 2
    assert math.isfinite(next_token_loss(model, ids_and_targets)[0].item())


def test_what_does_not_go_together_is_refused():
    refuses(r"needs the special tokens <\|fim_prefix\|>.*--no-complete", FillInMiddle, metaspace_tokenizer(), 0.5)
    refuses(r"--fim-rate is 1\.1; it must be from 0 to 1", TrainConfig, fim_rate=1.1)
    refuses(r"--fim-rate is 0\.5, but --no-complete does not use it", TrainConfig, fim_rate=0.5, complete=False)


# Files with their paths


def test_each_file_begins_with_its_path(tmp_path):
    names = ["a.py", "b/c.py", "b/<|fim_prefix|>.py", "b/line\nend.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n" * 3)
    (tmp_path / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    files = collect_corpus([tmp_path]).documents
    shards = [token_shard(files, BYTES, tmp_path / "cache", headers=headers) for headers in (False, True)]
    assert shards[0].key != shards[1].key
    assert token_shard(files, BYTES, tmp_path / "cache") == shards[0]
    assert open_shard(shards[1].folder) == shards[1]
    plain, headed = (np.split(s.tokens, s.starts[1:]) for s in shards)
    assert len(plain) == len(headed) == 4 + 3
    texts = [header for d in files for header in [file_header(d, BYTES)] * len([*map(list, d.texts())])]
    for ids, other, header in zip(plain, headed, texts, strict=True):
        assert other.tolist() == [*header, *ids.tolist()]
    headers = [text_of(BYTES, header) for header in (file_header(d, BYTES) for d in files)]
    assert sorted(filter(None, headers)) == sorted(f"{n.replace(chr(10), ' ')}\n" for n in names)
    assert all(header[0] == BYTES.token_id("<|file_sep|>") for header in texts if header)
    assert not any(i in sentinels(BYTES)[:3] for header in texts for i in header)
    moved = [replace(files[0], name="moved.py"), *files[1:]]
    assert token_shard(moved, BYTES, tmp_path / "cache", headers=True).key != shards[1].key
    refuses("file_sep", token_shard, files, metaspace_tokenizer(), tmp_path / "cache", headers=True)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("context", [7, 64])
def test_headers_count_neither_as_loss_nor_as_size(context, separate):
    """Wherever windows begin; and losses of the text are those that the whole stream gives."""
    ids, starts = documents(BYTES)
    loaded = LoadedModel(random_model(vocab=BYTES.vocab, context=context), BYTES, context, {}, None)
    score = evaluate(loaded, PackedText(ids, starts, BYTES.eos) if separate else ids)
    size = sum(len(made_up_text(lines, n).encode()) for n, lines in enumerate((12, 3, 40, 1, 25)))
    assert score.size == size
    assert score.tokens == size + 5, "and the end of each file"
    plain = documents(BYTES, headers=False)[0]
    assert evaluate(loaded, plain).size == size - 1, "a first token is not predicted"


# Which files are for a test


def put_files(folder, count, suffix=".py"):
    folder.mkdir()
    for i in range(count):
        (folder / f"file_{i}{suffix}").write_text(f"text {i} of {suffix}\n")
    return folder


@pytest.mark.parametrize(("count", "tested"), [(1, 0), (2, 0), (3, 1), (4, 1), (200, None)])
def test_of_three_or_more_files_at_least_one_is_for_a_test_and_never_all(count, tested, tmp_path):
    before = collect_corpus([put_files(tmp_path / "code", count)])
    corpus = hold_out_test(before)
    assert corpus.valid == before.valid
    assert before.test == []
    lists = [{d.name for d in part} for part in (corpus.train, corpus.valid, corpus.test)]
    assert set.union(*lists) == {d.name for d in before.documents}
    assert sum(map(len, lists)) == count
    assert lists[0]
    assert len(lists[2]) == tested if tested is not None else 3 < len(lists[2]) < 20
    if tested is None:
        assert 25 < len(corpus.valid) < 50, "a fifth, of a short text"
        assert f"{len(corpus.train)} training files, {len(corpus.valid)} for validation" in corpus.report()
    assert (f", {len(corpus.test)} for the test, " in corpus.report()) == bool(corpus.test)
    assert len(hold_out_test(before, 1.0).train) >= 1


def test_files_of_several_sources_are_not_mixed(tmp_path):
    corpus = hold_out_test(collect_corpus([put_files(tmp_path / name, 30, f".{name}") for name in ("b", "a")]))
    for documents in (corpus.train, corpus.valid + corpus.test):
        assert {d.path.parent.name for d in documents} == {"a", "b"}
    folders = [d.path.parent.name for d in corpus.train]
    assert folders == sorted(folders)


# What is chosen


def chosen(config, folder, base=None):
    config, reason = choose_completion(config, collect_corpus([folder]), base)
    return config.complete, reason


PAGE = "A page of documentation, which explains at length how to write a route.\n" * 30
BESIDE = {  # text beside 60 kB of Python, and True if the run completes lines by default
    "documentation": ({f"docs/{i}.txt": f"{i} {PAGE}" for i in range(400)}, True),
    "pages": ({f"{i}/index.{('md', 'rst', 'html', 'mdx')[i % 4]}": f"{i} {PAGE}" for i in range(400)}, True),
    "a lock file": ({"package-lock.json": "{" + '"integrity": "sha512-aaaa=="\n' * 40_000 + "}"}, True),
    "a bundle": ({"static/app.js": "var a=1;" * 50_000}, True),
    "settings": ({f"{i}.yaml": f"{i} {PAGE}" for i in range(100)}, True),
    "novels": ({f"{i}.txt": f"{i} {PAGE}" * 20 for i in range(40)}, False),
    "records": ({"texts.jsonl": "".join(json.dumps({"text": f"{i} {PAGE}"}) + "\n" for i in range(800))}, False),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_project_completes_lines_whatever_is_beside_its_code(beside, tmp_path):
    files, wanted = BESIDE[beside]
    lines = (f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(1200))
    files = files | {f"package/{i}.py": "".join(itertools.islice(lines, 100)) for i in range(12)}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ask = lambda complete: chosen(toy(tmp_path, complete=complete), tmp_path)[0]
    assert [ask(None), ask(True), ask(False)] == [wanted, True, False]
    for name in list(files)[-11:]:
        (tmp_path / name).unlink()
    few = "documentation", "pages", "settings", "novels", "records"
    assert ask(None) == (beside not in few), "little code beside much text"


def test_completion_is_on_where_most_of_the_text_is_source_code(tmp_path):
    code, prose = put_files(tmp_path / "code", 4), put_files(tmp_path / "prose", 4, ".txt")
    assert code_size(collect_corpus([code]).documents)[1] == 0 < code_size(collect_corpus([code]).documents)[0]
    base, foreign = TrainConfig(sources=(str(code),), base="x"), metaspace_tokenizer()
    for folder, config, tokenizer, wanted in (
        (code, toy(code, complete=None), None, True),
        (code, toy(code, complete=False), None, False),
        (code, toy(code, tokenizer="bytes", complete=None), None, False),
        (code, toy(code, tokenizer="bytes", complete=True), None, True),
        (prose, toy(prose, complete=None), None, False),
        (prose, toy(prose, complete=True), None, True),
        (code, base, BPE, True),
        (code, base, foreign, True),
    ):
        assert chosen(config, folder, tokenizer)[0] == wanted
    (prose / "more.PY").write_text("x" * 100)
    assert chosen(toy(prose, complete=None), prose)[0]
    assert missing_sentinels(BPE) == []
    refuses("completion", chosen, replace(base, fim_rate=0.5), code, foreign)
    refuses("--fim-rate", chosen, toy(code, tokenizer="chars", fim_rate=0.9, complete=None), code)


# Whole runs


def test_a_run_that_does_not_complete_is_as_before(code, tmp_path):
    config = toy(code, complete=False)
    with display()[0] as show:
        off = tokenize(config, with_test_files(config, gather(config)), None, show)
        on = replace(config, complete=True)
        unheaded = replace(on, file_headers=False)
        on, unheaded = (tokenize(c, with_test_files(c, gather(c)), None, show) for c in (on, unheaded))
    card = {"trained": {"sources": [str(code)], "split": "files", "split_version": SPLIT_VERSION}}
    assert len(gather(config).train) == len(split_documents(card).train) == 32
    file = off.tokenizer.token_id("<|file_sep|>")

    def count(tokens):
        return int((tokens[np.arange(len(tokens))[None]] == file).sum())

    assert [count(t.train) for t in (off, unheaded, on)] == [0, 0, 31]
    assert isinstance(next(TrainTask(config, off, None, ()).batches(0)), torch.Tensor)
    assert isinstance(next(TrainTask(replace(config, complete=True), on, None, ()).batches(0)), tuple)
