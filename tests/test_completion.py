"""Completion of lines: the engine of a model and of copying, what a run keeps for it, and a whole run."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

import hard_strings
from conftest import change_json, display, metaspace_tokenizer, refuses, toy, training_output
from dunes import tree
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import remember_sources, split_documents
from dunes.cli import verbs
from dunes.completion import Cancelled, Suggestion, copy_gate
from dunes.completion import engine as completion_engine
from dunes.completion import fit as completion_fit
from dunes.completion import index as completion_index
from dunes.completion.completer import (
    CopyCompleter,
    FolderCompleter,
    find_completer,
    name_in_sources,
    training_sources,
)
from dunes.completion.copy_gate import (
    Places,
    even_share,
    fit_gate,
    places_of,
    read_gate,
    scored_places,
    write_gate,
)
from dunes.completion.copy_mixture import Mixture, RememberedLogits
from dunes.completion.engine import CompletionEngine, choose_budget
from dunes.completion.fit import (
    FileShares,
    FitSize,
    ask_cursors,
    choose_copies,
    fit_mixture,
    model_minus_copying,
    paired_shares,
)
from dunes.completion.index import index_texts, named_texts, read_index, write_index
from dunes.completion.search import Beam, CompleteOptions, LineSearch
from dunes.completion.text import FileTokenizer, near_text, window, without_overlap
from dunes.data import collect_corpus
from dunes.generate import decode
from dunes.generate.copying import Candidates, Copies, Gate
from dunes.generate.decode import text_logprobs
from dunes.runs.train import train
from dunes.text import Tokenizer
from dunes.text.lines import split_lines, valid_text
from dunes.text.split_rules import GPT2, LLAMA3
from small_models import random_model

CODE = "".join(
    f"def area_{n}(width, height):\n    result = width * height + {n}\n    return result\n\n" for n in range(8)
)
OTHER = "class Größe:\r\n\tdef weite(self):\r\n\t\treturn self.länge * 2  # 日本語 🙂\r\n"
BPE = Tokenizer.train("bpe", [CODE, OTHER], 300)
CONTEXT = 64


def model_for(tokenizer, context_length=CONTEXT, seed=0, **card):
    model = random_model(vocab=tokenizer.vocab, context=context_length, seed=seed)
    return LoadedModel(model, tokenizer, context_length, card)


TRAINED = {"trained": {"complete": True, "sources": []}}
LOADED = model_for(BPE, **TRAINED)


def copying_gate():
    """A gate that prefers what the sources have most often."""
    gate = zero_gate()
    gate.up.weight.data[0, [0, 5, 10, 14]] = torch.tensor([0.1, 0.1, 0.5, 1.0])
    gate.down.weight.data[0, 0] = 60.0
    gate.up.bias.data[0] = 1.0
    return gate


def zero_gate():
    gate = Gate().requires_grad_(False)
    for p in gate.parameters():
        p.zero_()
    return gate


def engine_of(texts=(), gate=None, loaded=LOADED, header=True):
    files = FileTokenizer(loaded.tokenizer, header)
    index = index_texts(texts, files) if texts else None
    return CompletionEngine(loaded, index, gate or copying_gate(), header)


def close(a, b):
    pairs = ((a.word, b.word), (a.line, b.line))
    return a.text == b.text and all(math.isclose(x, y, rel_tol=1e-3) for x, y in pairs)


CUTS = [
    ("", "", ""),
    ("", "\n\n", "a.py"),
    (CODE[:40], "", "a.py"),
    (CODE[:41], CODE[60:], "a.py"),
    (CODE[:200], CODE[230:], "b.py"),
    (CODE + "def area_9(wid", "\n" + CODE, "b.py"),
    (CODE + "def ", "", ""),
    (OTHER[:40], OTHER[60:], "other.py"),
    (OTHER + "class Gr", "", "other.py"),
    (OTHER + "# 日", "語\r\n", "other.py"),
    ("\t\t\t", "", ""),
    ("x = 1\r\n\r\n", "\r\n", "c.py"),
    ("one\rtwo\rth", "", "c.py"),
    (" \n" * 50, "\n" * 50, "c.py"),
]


@pytest.fixture
def forwards():
    """A list with an item for each forward of the model."""
    counted = []
    with LOADED.model.embed.register_forward_pre_hook(lambda *_: counted.append(1)):
        yield counted


# suggestions


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_a_line_typed_key_by_key_has_the_suggestions_of_a_new_engine(width, forwards):
    """Also inside words and behind mistakes, with a file that changes meanwhile; it needs fewer forwards."""
    options, texts = CompleteOptions(width=width), [("a.py", CODE), ("other.py", OTHER)]
    used, counts = engine_of(texts), [0, 0]
    line, changed = "    result = width * height + 5", None
    typed = [line[:n] for n in range(len(line) + 1)]
    for n, part in enumerate([*typed, *typed[-4:-9:-1], "    retu", "    resu", "    result = area_2(wi"]):
        if n in (9, 20):
            changed = OTHER.replace("länge", f"width{n}") + CODE.replace("area", "room")
            used.update("other.py", changed)
        fresh = engine_of(texts)
        if changed is not None:
            fresh.update("other.py", changed)
        answers = []
        for i, engine in enumerate((used, fresh)):
            del forwards[:]
            answers.append(engine.complete(CODE + part, "\n", "b.py", options))
            counts[i] += len(forwards)
        assert close(*answers), part
    assert counts[0] < 0.7 * counts[1], counts


@pytest.mark.parametrize("width", [1, 3])
def test_the_prompt_of_a_file_is_prefilled_once_while_others_are_edited(width, monkeypatch):
    monkeypatch.setattr("dunes.completion.engine.FILES", 2)
    place, options, largest = (CODE + "    result = wid", ""), CompleteOptions(width=width), []
    expected = {name: engine_of([("a.py", CODE)]).complete(*place, name, options) for name in ("b", "c", "d")}
    engine = engine_of([("a.py", CODE)])
    with LOADED.model.embed.register_forward_pre_hook(lambda _, ids: sizes.append(ids[0].numel())):
        for name in ("b", "c", "b", "d", "c"):
            sizes = []
            assert close(engine.complete(*place, name, options), expected[name])
            largest.append(max(sizes))
    assert [size > largest[0] / 2 for size in largest] == [True, True, False, True, True], "two files are kept"


def test_a_new_gate_mixes_anew():
    engine, cut = engine_of([("a.py", CODE)]), (CODE + "def area_9(wid", "", "b.py")
    before = engine.complete(*cut)
    engine.gate = zero_gate()
    after = engine.complete(*cut)
    assert close(after, engine_of([("a.py", CODE)], zero_gate()).complete(*cut))
    assert not close(before, after)


@pytest.mark.parametrize("width", [1, 3])
def test_a_cancelled_request_leaves_an_engine_that_answers(width):
    """Cancelled after any number of forwards; the next request has the suggestion of a new engine."""
    cut, asked = (CODE + "    result = wid", "", "b.py"), 0
    expected = engine_of([("a.py", CODE)]).complete(*cut, options=CompleteOptions(width=width))
    for most in (0, 1, 2, 4, 8, 16, 32, 64):
        engine, questions = engine_of([("a.py", CODE)]), chain(repeat(False, most), repeat(True))
        try:
            engine.complete(*cut, options=CompleteOptions(width=width, cancelled=partial(next, questions)))
        except Cancelled:
            asked += 1
        else:
            break
        assert close(engine.complete(*cut, options=CompleteOptions(width=width)), expected)
    assert asked > 1


@pytest.mark.parametrize("width", [1, 3])
def test_a_line_without_prospect_is_copied_unless_its_first_word_is_likely(width, monkeypatch):
    """What the untrained model writes is improbable; the copy stands behind the longest match."""
    options = CompleteOptions(width=width)
    engine = engine_of([("a.py", CODE)], zero_gate())
    before = CODE + "    other = 1\n    result = wid"
    found = {}
    for likely in (0.0, -math.inf):
        monkeypatch.setattr("dunes.completion.search.LIKELY", likely)
        found[likely] = engine.complete(before, "", "b.py", options)
    assert "th * height" in found[0.0].text != found[-math.inf].text
    assert found[0.0].line < 0.05
    assert [found[likely].source for likely in found] == ["copies", "model"]
    assert found[0.0].word >= found[0.0].line
    engine.gate = None
    assert engine.complete(before, "", "b.py", options).text != found[0.0].text, "the model is alone"
    engine.gate = zero_gate()
    monkeypatch.setattr("dunes.completion.search.HOPELESS", -math.inf)
    assert engine.complete(before, "", "b.py", options).text != found[0.0].text


@pytest.mark.parametrize("typed", [b"re", b"ret", b" wid", b"x"])
def test_lines_are_as_probable_as_they_are_given_what_is_typed(typed):
    engine = engine_of([("a.py", CODE)], zero_gate())
    pieces, prompt = engine.files.pieces, engine.files.tokenize(CODE, "b.py").ids[-20:]

    def prob(ids, rest):
        """The probability that the model spells these bytes, by all tokens that begin them or begin with them."""
        probs = LOADED.model(torch.tensor([ids]))[0, -1].detach().softmax(-1)
        known = [i for i, piece in enumerate(pieces) if piece]
        whole = sum(float(probs[i]) for i in known if pieces[i].startswith(rest))
        parts = [i for i in known if rest.startswith(pieces[i]) and pieces[i] != rest]
        return whole + sum(float(probs[i]) * prob([*ids, i], rest[len(pieces[i]) :]) for i in parts)

    def look(text):
        """Evaluate all texts that are a part of what is typed."""
        mixture.after([text])
        for id in engine.files.shorter(mixture.copies.uncovered(text)):
            look([*text, id])

    mixture = Mixture(RememberedLogits(LOADED.model, 1), engine.files)
    copies = Copies(engine.sources([]), typed, len(prompt))
    mixture.begin(copies, engine.gate, prompt, 9, lambda: False)
    assert mixture.typed_logprob(prompt) == 0, "nothing is known"
    look(prompt)
    logprobs = LOADED.model(torch.tensor([prompt]))[0, -1].detach().log_softmax(-1)
    first = logprobs[engine.files.allowed(typed)].logsumexp(0)
    assert mixture.typed_logprob(prompt) == pytest.approx(math.log(prob(prompt, typed)) - float(first), abs=1e-4)
    mixture.begin(copies, engine.gate, prompt, 9, lambda: False)
    assert mixture.typed_logprob(prompt) == 0, "another request, which says what a new engine would"


@pytest.mark.parametrize("width", [1, 3])
def test_suggestions_of_typed_lines_are_as_probable_as_given_what_is_typed(width, monkeypatch):
    engine, options = engine_of([("a.py", CODE)], zero_gate()), CompleteOptions(width=width)
    suggestions = []
    for logprob in (0.0, math.log(0.25)):
        monkeypatch.setattr(Mixture, "typed_logprob", lambda *_, logprob=logprob: logprob)
        monkeypatch.setattr("dunes.completion.search.HOPELESS", -math.inf)
        suggestions.append(engine.complete(CODE + "    re", "", "b.py", options))
    whole, given = suggestions
    assert given.text == whole.text != ""
    assert given.line / whole.line == pytest.approx(4)
    assert given.word == pytest.approx(min(1, 4 * whole.word), rel=1e-6, abs=0)


def test_a_suggestion_goes_on_at_the_cursor_also_inside_a_token():
    line = "    result = width * height + 5\n"
    for text in (CODE, CODE.replace("\n", "\r\n"), CODE.replace("    ", "\t")):
        body = line.replace("    ", "\t") if "\t" in text else line
        engine = engine_of([("a.py", text)])
        for column in range(len(body) - 12, len(body) - 4):
            before = text + "def area_9(width, height):\n" + body[:column]
            suggestion = engine.complete(before, "", "b.py", options=CompleteOptions(width=1)).text
            assert (body[:column] + suggestion).startswith(body[:-3]), (column, suggestion)
            assert not {"\r", "\n"} & {*suggestion}
    assert 0 < engine.complete(CODE + "def area", "", "b.py").line <= 1


def test_lone_surrogates_are_unknown_characters_and_a_cursor_may_stand_between_long_ones():
    engine = engine_of([("a.py", CODE)])
    for before, after, name in CUTS[2:5]:
        wrong = engine.complete(before + "\udc80\ud83d\ude00", "\ud83d" + after, "\udc80" + name)
        right = engine.complete(before + "\ufffd\U0001f600", "\ufffd" + after, "\ufffd" + name)
        assert close(wrong, right)
    engine.update("\udc80.py", "x = '\udc80'\n")
    engine.update("\udc80.py", None)
    options = CompleteOptions(files=(("\udc80.py", "def area_\udc80\n"),))
    assert engine.complete("def ar", options=options).text
    assert copier(("a.py", CODE)).complete("\udc80 def area", "", "\udc80") is not None
    engine = engine_of([("a.py", OTHER)])
    for cut in range(OTHER.index("#"), OTHER.index("🙂") + 1):
        before = "\t\treturn self.länge * 2  " + OTHER[OTHER.index("#") : cut]
        assert "\ufffd" not in engine.complete(before, options=CompleteOptions(width=1)).text


def test_texts_and_lines_may_be_longer_than_what_is_looked_at():
    engine = engine_of([("a.py", CODE)])
    for before, after in [
        ("x" * 300_000, ""),
        ("x = [" + "12, " * 75_000, ""),
        (CODE * 30 + "def area_2(wid", CODE * 30),
        ("", "y" * 300_000),
        ("a" * 250_000 + "\n", "\n" + "b" * 30_000),
    ]:
        for width in (1, 2):
            suggestion = engine.complete(before, after, "b.py", CompleteOptions(width=width))
            assert 0 <= suggestion.line <= 1.0001
    assert len(near_text("é\n" * 200_000)) <= 200_000
    assert near_text("é\n" * 200_000).startswith("é\n")
    assert near_text("x" * 300_000) == "x" * 200_000


def test_a_prompt_leaves_room_and_has_the_end_of_the_text_above():
    for context_length in (2, 3, 4, 8, 16, 64):
        engine = engine_of(loaded=model_for(BPE, context_length, **TRAINED))
        for above, below in [(0, 0), (1, 0), (5, 200), (200, 5), (1000, 1000)]:
            prompt = engine._prompt([70] * above + [71] if above else [], [72] * below, 1)
            assert len(prompt) < context_length
            assert not above or prompt[-1] == 71
        assert engine.complete(CODE, CODE, "a.py", options=CompleteOptions(width=2)).line <= 1.0001
        assert engine.complete("", CODE, "a.py", options=CompleteOptions(width=1)).line <= 1.0001
    assert len({n - len(window([0] * n, 40)) for n in range(41, 90)}) <= 7, "a window seldom moves"
    assert all(30 <= len(window([0] * n, 40)) <= 40 for n in range(40, 90))


def test_alternatives_are_different_and_the_best_is_the_suggestion():
    engine, counts = engine_of([("a.py", CODE)]), []
    for before, _, name in CUTS[2:9]:
        best = engine.complete(before, "", name)
        found = engine.alternatives(before, "", name, CompleteOptions(alternatives=3))
        assert close(found[0], best)
        assert len({each.text for each in found}) == len(found) <= 3
        assert all(each.text for each in found[1:])
        counts.append(len(found))
    assert max(counts) > 1


@pytest.mark.parametrize(
    "options", [{"stop": ("\n", "")}, {"lines": 0}, {"width": -1}, {"alternatives": 0}, {"max_tokens": 0}], ids=str
)
def test_options_that_no_line_can_meet_are_refused(options):
    refuses("no line would be found", CompleteOptions, **options)


@pytest.mark.parametrize("lines", [1, 3])
def test_white_space_alone_is_no_suggestion_and_no_line_end_ends_one(lines, monkeypatch):
    engine = engine_of([("a.py", "x = 1   \ny = 2\n\n\n" * 9)])
    space, end = (engine.files.line(text)[0] for text in (" ", "\n"))
    for ids in [(space,), (space, end), (end, end), (end, space, end)]:
        monkeypatch.setattr(LineSearch, "beams", lambda self, ids=ids: [Beam(ids, (-1.0,) * len(ids))])
        assert engine.complete("x = 1", options=CompleteOptions(lines=lines)).text == ""
    word = engine.files.line("y")
    ids = (*word, end, end, *word)
    monkeypatch.setattr(LineSearch, "beams", lambda self: [Beam(ids, (-1.0,) * len(ids))])
    assert engine.complete("x = 1", options=CompleteOptions(lines=lines)).text == "y"


def test_characters_without_a_token_stay_in_the_prompt():
    files = FileTokenizer(Tokenizer.train("chars", ["abc\n"], 0), False)
    ids = files.line("aé")
    assert files.pieces[ids[-1]] == b""
    assert files.split_typed(ids) == (ids, b"")
    assert files.split_typed(files.line("éa"))[0][:1] == ids[1:]


@pytest.mark.parametrize(
    ("typed", "suggested", "behind", "shown"),
    [
        ("def task(value, limit=50", "):", ")", ""),
        ("def task(", "value, limit=50):", "value, limit=50):", ""),
        ("def task(", "value, limit=50):", ")", "value, limit=50"),
        ("def task(", "value, limit=50):", "", "value, limit=50):"),
        ("f(a[", "i], b)", "])", "i"),
        ("f(", "a[i], {b: c})", ")", "a[i], {b: c}"),
        ("f(", "g(a), h()", ")", "g(a), h()"),
        ("if (a) {", " return b }", " }", " return b"),
        ("x = [", "1, 2) + [3]", ")", "1, 2"),
        ('say("', 'hello")', '")', "hello"),
        ("say(", '"hello")', ")", '"hello"'),
        ("say(", '"hello")', '"x")', '"hello"'),
        ("a = '", "b'", "'", "b"),
        ("f(a", ", b)  # c", ")  # d", ", b"),
    ],
)
def test_what_the_editor_has_closed_is_not_closed_again(typed, suggested, behind, shown):
    for after in (behind, behind + "\nnext line\n"):
        assert without_overlap(suggested, after, typed) == shown


def test_what_follows_the_cursor_is_not_repeated():
    assert without_overlap("height)", ")") == "height"
    assert without_overlap("height) + 1", ")") == "height", "the editor has closed it"
    assert without_overlap("a = 1", "\r\n  a = 1\r\nb\r\n") == ""
    assert without_overlap("a = 1", "") == "a = 1"
    assert without_overlap("a(b", "b c\nx") == "a("
    assert without_overlap("import os", "\rimport os\rx") == ""
    assert without_overlap("a = 1\n    b = 2", "\n\na = 1\n    b = 2\nc") == ""
    assert without_overlap("a = 1\nb = 3", "\na = 1\nb = 2\n") == "a = 1\nb = 3"
    assert without_overlap("x)\n    return y", ")\n") == "x"
    assert without_overlap("urn result", "\n    return result\n", "    ret") == "", "typed in part"
    assert without_overlap(")", "\n)\n", "    g(x") == ")", "another line"
    assert without_overlap("", "\na\n", "a") == ""


def test_a_file_is_copied_from_as_it_is_now():
    secret, changed = "token = 'eleven herbs'\n", "token = 'nothing more'\n"
    texts = [("secret.py", secret), ("a.py", CODE)]
    one = CompleteOptions(width=1)
    ask = lambda engine, name="b.py": engine.complete("x = 1\ntoken = ", "", name, one).text
    assert ask(engine_of(texts)) == "'eleven herbs'"
    assert ask(engine_of(texts), "secret.py") != "'eleven herbs'", "not from the file itself as it was"
    engine = engine_of(texts)
    engine.update("secret.py", changed)
    assert ask(engine) == "'nothing more'"
    engine.update("secret.py", None)
    assert "herbs" not in ask(engine) + ask(engine, "secret.py")
    assert "more" not in ask(engine)
    engine.update("secret.py", secret)
    assert ask(engine) == "'eleven herbs'"
    engine.update("secret.py", "")
    assert "herbs" not in ask(engine)
    opened = engine_of()
    opened.update("new.py", changed)
    assert ask(opened) == "'nothing more'"
    assert "nothing" not in ask(opened, "new.py")


BYTES = Tokenizer.train("bytes", [])
CHARS = Tokenizer.train("chars", [CODE + OTHER])


@pytest.mark.parametrize(("tokenizer", "header"), [(BYTES, True), (CHARS, True), (metaspace_tokenizer(), False)])
def test_tokenizers_of_all_kinds(tokenizer, header):
    """Metaspace has no sentinels, and no document start: a text of nothing begins after the end of another."""
    loaded = model_for(tokenizer)
    engine = engine_of([("a.py", "value d def\n    value = d\n")], loaded=loaded, header=header)
    for before, after in [("", ""), ("value", ""), ("value d d", "\nv"), ("v\n    v", "alue\n"), (" ", "x" * 500)]:
        for width in (1, 3):
            suggestion = engine.complete(before, after, "b.py", CompleteOptions(width=width))
            again = engine_of(engine.index.texts(), loaded=loaded, header=header)
            assert close(suggestion, again.complete(before, after, "b.py", CompleteOptions(width=width)))
            assert 0 < suggestion.line <= 1.0001
    assert math.isfinite(engine.bits("value d\n", "b.py"))
    assert engine.bits("", "b.py") == 0


# probabilities


def test_bits_of_a_text_are_those_of_its_ids_under_the_model():
    """With a gate of zeros: also in a text longer than the context, each id with at least half of it."""
    part = CODE[:250] + OTHER
    engine, total = engine_of([("a.py", CODE)], zero_gate()), 0.0
    text = engine.files.tokenize(part, "b.py")
    assert len(text.ids) > CONTEXT
    with torch.no_grad():
        for place in range(text.starts[0], len(text.ids)):
            done = 0 if place <= CONTEXT else CONTEXT + (place - 1 - CONTEXT) // (CONTEXT // 2) * (CONTEXT // 2)
            logits = LOADED.model(torch.tensor([text.ids[max(0, done - CONTEXT // 2) : place]]))[0, -1]
            total -= float(logits.log_softmax(-1)[text.ids[place]])
    assert engine.bits(part, "b.py") == pytest.approx(total / math.log(2), rel=2e-6)
    assert engine_of([("a.py", CODE)]).bits(CODE, "b.py") != engine_of(gate=zero_gate()).bits(CODE, "b.py")


@pytest.mark.parametrize(("first", "stop"), [(1, None), (5, 20), (CONTEXT - 2, CONTEXT + 9)])
def test_log_probabilities_in_blocks_are_those_at_once(first, stop, monkeypatch):
    ids = [id % BPE.vocab for id in range(3, 3 + 2 * CONTEXT)]
    at_once = list(text_logprobs(LOADED.model, ids, CONTEXT, first))[: None if stop is None else stop - first]
    monkeypatch.setattr(decode, "BLOCK", 3)
    rows = list(text_logprobs(LOADED.model, ids, CONTEXT, first, stop))
    assert len(rows) == len(at_once) == (len(ids) if stop is None else stop) - first
    assert torch.allclose(torch.stack(rows), torch.stack(at_once), atol=1e-5)


@pytest.mark.slow
def test_a_fitted_gate_lowers_the_loss_of_a_text_that_repeats_itself():
    engine = engine_of([("a.py", CODE)])
    _, facts = fit_mixture(engine, [("c.py", CODE), ("b.py", CODE)], 4000)
    text = engine.files.tokenize(CODE, "b.py")
    assert facts["places"] == 2 * (len(text.ids) - text.starts[0])
    assert facts["mixed_loss"] < 0.7 * facts["loss"]
    engine.gate = None
    text = engine.files.tokenize(CODE, "c.py")
    places = scored_places(LOADED, text, lambda ids: engine.sources(ids, [], ""))
    alone = [-float(row[id]) for id, row, _ in places]
    assert facts["loss"] == pytest.approx(np.mean(alone), rel=1e-3)
    assert fit_mixture(engine_of(header=False), [("", "")], 9) == (None, {})


def test_records_without_names_are_copied_from_and_open_files_without_one_are_not():
    """These could not be hidden once they have changed."""
    engine = engine_of([("", CODE), ("", OTHER)])
    assert len(engine.sources([1]).far[0].ids) == len(engine.sources([1], name="x.py").far[0].ids) > 0
    assert copier(("", "alpha = beta\n")).complete("x\nalpha = ").text == "beta"
    opened = engine_of()
    opened.update("", "zebra = unnamed(1)\n")
    assert opened.far("b.py") == engine_of().far("b.py")


def test_places_from_an_index_on_are_those_of_the_text():
    engine = engine_of([("a.py", CODE)])
    text = engine.files.tokenize(CODE[:200], "b.py")
    assert len(text.ids) <= CONTEXT + 1, "one window"
    whole = list(scored_places(LOADED, text, engine.sources))
    for first in (text.starts[0], 20, CONTEXT // 2):
        part = list(scored_places(LOADED, text, engine.sources, first))
        assert len(part) == len(text.ids) - max(first, 1)
        for (id, row, candidates), (other, same, known) in zip(part, whole[-len(part) :], strict=True):
            assert id == other
            assert torch.allclose(row, same, atol=1e-5)
            assert torch.equal(candidates.ids, known.ids)


@pytest.mark.slow
def test_the_gate_of_the_thresholds_has_not_seen_their_texts():
    engine = engine_of([("a.py", CODE)])
    texts = [(f"{n}.py", CODE[n * 40 : n * 40 + 200]) for n in range(4)]
    (first, final), facts = fit_mixture(engine, texts, 200)
    others = [(name, text.upper() if number % 3 == 0 else text) for number, (name, text) in enumerate(texts)]
    (same, changed), _ = fit_mixture(engine, others, 200)
    assert facts["places"] > 100
    assert torch.equal(first.up.weight, same.up.weight)
    assert not torch.equal(final.up.weight, changed.up.weight)


@pytest.mark.parametrize("minutes", [0.5, 15, 600])
@pytest.mark.parametrize("per_token", [1e-7, 1e-3, 1.0])
@pytest.mark.parametrize(("shares", "most"), [(completion_fit.SHARES, 0.15), (completion_fit.ALONE, 0.5)])
def test_the_fit_takes_at_most_its_share_of_the_run(minutes, per_token, shares, most):
    size = FitSize.of(60 * minutes, per_token, shares)
    per_place = completion_fit.SECONDS[0] + completion_fit.TOKENS[0] * per_token
    collected = min(size.places, size.limits[0] / per_place)
    assert size.limits[0] + size.limits[1] + completion_fit.FIT_SECONDS * collected <= most * 60 * minutes + 1e-6
    assert sum(size.seconds) <= most * 60 * minutes + 1e-6
    assert size.places >= 500
    assert size.cursors >= 64


def test_a_run_with_fixed_steps_fits_on_the_same_at_any_speed():
    assert FitSize.of(90.0).limits == (math.inf, math.inf)
    assert FitSize.of(0.0).places == 500


class Clock:
    """A clock on which each call takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_no_place_and_no_cursor_is_begun_after_its_time(monkeypatch):
    monkeypatch.setattr(copy_gate, "monotonic", Clock())
    assert [list(copy_gate.within(seconds, range(9))) for seconds in (0, 2.5, 99)] == [[0], [0, 1, 2], [*range(9)]]
    engine = engine_of([("a.py", CODE)])
    texts = [engine.files.tokenize(CODE * 3, f"{n}.py") for n in range(8)]
    places = places_of(LOADED, texts, engine.sources, 1600, 3.5)
    assert 3 <= len(places.target_logprob) / copy_gate.CHUNK <= 5


def test_places_are_of_all_texts():
    assert even_share([], 5) == 5
    assert [even_share([3, 100, 7], most) for most in (3, 9, 15, 50, 500)] == [1, 3, 6, 40, 490]
    engine = engine_of([("a.py", CODE)])
    named = (("a.py", CODE * 3), ("b.py", OTHER), ("c.py", "x\n"))
    texts = [engine.files.tokenize(text, name) for name, text in named]
    places = places_of(LOADED, texts, lambda ids: engine.sources(ids, [], ""), 60)
    short = len(texts[2].ids) - texts[2].starts[0]
    assert len(places.target_logprob) == short + 2 * ((60 - short) // 2)
    many = [(f"{n}.py", CODE[:120]) for n in range(60)]
    texts = [engine.files.tokenize(text, name) for name, text in many]
    assert 30 <= len(places_of(LOADED, texts, engine.sources, 40).target_logprob) <= 40


# the index and the gate on disk


@pytest.fixture
def stored(tmp_path):
    files = FileTokenizer(BPE, True)
    index = index_texts([("a.py", CODE), ("empty.py", ""), ("ö b.py", OTHER)], files)
    write_index(tmp_path, index)
    write_gate(tmp_path, copying_gate(), {"thresholds": {"word": [[0.35, 0.5]], "line": []}})
    return tmp_path, index


def test_an_index_and_a_gate_are_read_as_they_were_written(stored):
    run, index = stored
    again = read_index(run)
    assert again.texts() == index.texts() == [("a.py", CODE), ("empty.py", ""), ("ö b.py", OTHER)]
    assert [*again.files] == [*index.files]
    for a, b in [(again.ids, index.ids), (again.contexts, index.contexts)]:
        assert a.depth == b.depth
        assert a.items.dtype == b.items.dtype
        assert np.array_equal(a.items, b.items)
        assert np.array_equal(a.order, b.order)
    gate, facts = read_gate(run)
    assert facts["thresholds"] == {"word": [[0.35, 0.5]], "line": []}
    assert all(torch.equal(p, q) for p, q in zip(gate.parameters(), copying_gate().parameters(), strict=True))
    assert read_index(run / "none") is read_gate(run / "none") is None


def change_tensors(name, **changes):
    """Give these tensors of a file other values, which functions make of them."""

    def apply(folder):
        tensors = load_file(folder / name)
        save_file(tensors | {key: change(tensors[key]) for key, change in changes.items()}, folder / name)

    return apply


def change_record(name, **changes):
    return lambda folder: change_json(folder / name, **changes)


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name):
    return lambda folder: (folder / name).unlink()


DAMAGES = [(read_index, damage) for damage in (
    cut("index.safetensors", 900), cut("index.safetensors", 0), remove("index.safetensors"),
    cut("files.json", 30), write("files.json", b"\xff\xfe\0"), write("files.json", b"[1]"),
    change_record("files.json", format=99), change_record("files.json", files=...),
    change_record("files.json", files=5), change_record("files.json", files=[["a"]]),
    change_record("files.json", files=[["a", math.inf, 0]]),
    change_tensors("index.safetensors", text=lambda text: np.full_like(text, 255)),
)]  # fmt: skip
DAMAGES += [(read_gate, damage) for damage in (
    cut("gate.safetensors", 100), remove("gate.safetensors"), cut("gate.json", 3),
    change_record("gate.json", format="1"), change_record("gate.json", inputs=None),
    change_record("gate.json", inputs=[]),
    change_tensors("gate.safetensors", **{"up.weight": lambda weight: weight[:3]}),
)]  # fmt: skip


@pytest.mark.parametrize(("read", "damage"), DAMAGES)
def test_a_damaged_index_or_gate_is_refused_in_one_line(read, damage, stored):
    run, _ = stored
    damage(run / "completion")
    refuses("completion", read, run)


def test_texts_of_files_and_records_are_read_in_parts_up_to_a_limit(tmp_path, monkeypatch):
    (tmp_path / "long.py").write_bytes("\ufeff".encode() + "ä = 1\n".encode() * 5_000)
    (tmp_path / "b.py").write_text("x = 1\n")
    documents = sorted(collect_corpus([str(tmp_path)]).documents, key=lambda d: d.name)
    assert named_texts(documents) == [("b.py", "x = 1\n"), ("long.py", "ä = 1\n" * 5_000)]
    (_, head), (_, tail) = named_texts(documents, 0, 0.9)[1], named_texts(documents, 0.9)[1]
    assert head + tail == "ä = 1\n" * 5_000 or len(head + tail) == 5_000 * 6 - 1, "at most a character is cut"
    records = [f"{letter} = 1\n" * 2_000 for letter in "abc"] + ["short = 1\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    of_records = collect_corpus([str(tmp_path / "a.jsonl")], text_field=("text",)).documents
    for part, count in (((0, 0.9), 1_800), ((0.9, 1), 200)):  # parts of each record
        text = "".join(text for _, text in named_texts(of_records, *part))
        assert [text.count(f"{name} = 1\n") for name in "abc"] == [count] * 3
        assert "short" not in text
    monkeypatch.setattr(completion_index, "MOST", 1000)
    assert len(named_texts(documents)[1][1].encode()) <= 1000
    assert len(named_texts(documents, 0.5)[1][1].encode()) <= 1000


# a run


LINE = "    return value_3 * {} + limit\n"


@pytest.fixture
def programs(tmp_path):
    folder = tmp_path / "programs"
    (folder / "deep").mkdir(parents=True)
    for i in range(12):
        lines = [f"def task_{i}_{j}(value_3, limit={j}):\n{LINE.format(i)}\n" for j in range(8)]
        (folder / ("deep" if i % 2 else ".") / f"module {i}.py").write_text("".join(lines))
    return folder


def complete(capsys, *args):
    verbs.complete(*args)
    return capsys.readouterr()


def train_to(folder, source, **changes):
    options = {key: changes.pop(key) for key in ("resume", "asked") if key in changes}
    return training_output(toy(source, complete=True, **changes), folder, **options)


@pytest.mark.slow
def test_a_run_indexes_its_files_and_fits_a_gate(programs, tmp_path, capsys):
    run = tmp_path / "run"
    assert "nats/token by the model" in train_to(run, programs, vocab_size=330)
    index, (_, facts) = read_index(run), read_gate(run)
    assert {*facts["thresholds"]} == {"word"}
    assert facts["mixed_loss"] < facts["loss"]
    names = {name for name, _ in index.texts()}
    tested = len(split_documents(json.loads((run / "dunes.json").read_text())).test)
    assert len(names) == 12 - tested < 12, "those of the validation part, too, once the run has ended"
    assert all((programs / name).read_text() == text for name, text in index.texts())
    draft = programs / "draft.py"
    draft.write_text("x = 1\n    return val")
    cursor = f"{draft}:2:{len('    return val') + 1}"
    shown = complete(capsys, run, cursor)
    assert shown.err == ""
    assert shown.out.startswith("ue_3")
    # while it trains: what stands behind the longest match
    (run / "config.json").rename(tmp_path / "config.json")
    card = (run / "dunes.json").rename(tmp_path / "dunes.json")
    shown = complete(capsys, run, cursor)
    assert "still in training" in shown.err
    assert shown.out.startswith("ue_3 * ")
    assert shown.out.endswith(" + limit\n")
    draft.unlink()
    assert name_in_sources(programs / "deep" / "module 1.py", run) == "deep/module 1.py"
    (tmp_path / "config.json").rename(run / "config.json")
    card.rename(run / "dunes.json")
    # a resumed run keeps the index, and fits the gate again
    before = (run / "completion" / "index.safetensors").read_bytes()
    (run / "completion" / "gate.json").unlink()
    draft.write_text("x = 1\n    return val")
    assert complete(capsys, run, cursor).out.startswith("ue_3 * "), "nothing says how much the model knows"
    draft.unlink()
    shown, _ = display()
    resumed = toy(programs, complete=True, vocab_size=330, steps=14)
    assert train(resumed, run, shown, resume=True, override={"steps"}, asked={"steps"}) == 0
    assert (run / "completion" / "index.safetensors").read_bytes() == before
    assert read_gate(run) is not None


def shares(*sides, cursors=20):
    return [FileShares(model, copying, cursors) for model, copying in sides]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worse", "copies", "dropped"),
    [(True, "auto", True), (False, "auto", False), (True, "never", False), (False, "only", True)],
)
def test_a_model_that_is_worse_than_copying_does_not_complete(
    worse, copies, dropped, programs, tmp_path, capsys, monkeypatch
):
    sides = [(0.0, 1.0), (0.1, 1.0), (0.0, 0.9), (0.0, 1.0)]
    found = shares(*(side if worse else side[::-1] for side in sides))
    monkeypatch.setattr(completion_fit, "paired_shares", lambda *args: found)
    run = tmp_path / "run"
    output = train_to(run, programs, vocab_size=330, copies=copies)
    assert ("so lines are copied, without the model" in output) == (worse and copies == "auto")
    assert ("% of line ends right" in output) == (copies != "only")
    lines = []
    completer = find_completer(run, lines.append)
    assert completer.copies == dropped
    assert [line.startswith("the model does not complete lines") for line in lines] == [True] * dropped
    before = "x = 1\n    return val"
    copied = CopyCompleter(completer.index).complete(before)
    assert (completer.alternatives(before) == [copied]) == dropped
    assert (completer.complete(before) == copied) == dropped
    if copies == "auto" and worse:  # the command that was printed
        shown, out = display()
        again = replace(toy(programs, complete=True, vocab_size=330), copies="never")
        assert train(again, run, shown, resume=True, override={"copies"}, asked={"copies"}) == 0
        assert not FolderCompleter(run).copies
        assert "all the same" in out.getvalue()


def draw_shares(random, files, cursors, worlds):
    """Shares of files whose lines are alike: a quarter as many independent lines as there are cursors."""
    independent = max(2, cursors // 4)
    lines = random.random((len(worlds), 2, files, independent)) < np.stack(worlds)[..., None]
    picked = random.integers(independent, size=(len(worlds), 2, files, cursors))
    return np.take_along_axis(lines, picked, -1).mean(-1)


def skills(kind, random, files):
    """The true shares (2, files) of model and copying, in a world where none is better in the mean."""
    if kind == "alike":
        return np.broadcast_to(random.beta(1, 3, files), (2, files))
    if kind == "all or nothing":
        return (random.random((2, files)) < 0.3).astype(float)
    if kind == "few files are much better":
        better = random.random(files) < 0.1
        return np.stack([np.where(better, 0.7, 0.2), np.full(files, 0.25)])
    base = random.beta(1, 3, files)
    return random.beta(3 * base + 0.01, 3 * (1 - base) + 0.01, (2, files))


@pytest.mark.parametrize("files", [3, 20])
@pytest.mark.parametrize("kind", ["by file", "alike", "all or nothing", "few files are much better"])
def test_no_true_difference_seldom_drops_a_model(kind, files):
    random, tries, cursors = np.random.default_rng(0), 1500, max(4, 64 // files)
    drawn = draw_shares(random, files, cursors, [skills(kind, random, files) for _ in range(tries)])
    dropped = sum(
        choose_copies("auto", [FileShares(m, c, cursors) for m, c in zip(*sides, strict=True)])[0]
        for sides in drawn
    )
    assert dropped / tries <= 0.025 + 2 * (0.025 * 0.975 / tries) ** 0.5


@pytest.mark.parametrize("files", [8, 20])
def test_a_large_true_difference_drops_a_model(files):
    random, cursors = np.random.default_rng(1), 64 // files + 4
    worlds = [np.clip(random.beta(8, 8, files) + np.array([[-0.3], [0.3]]), 0, 1) for _ in range(200)]
    drawn = draw_shares(random, files, cursors, worlds)
    dropped = [choose_copies("auto", shares(*sides.T, cursors=cursors))[0] for sides in drawn]
    assert np.mean(dropped) > 0.9


def test_few_files_and_single_cursors_do_not_decide():
    lost = (0.0, 1.0)
    assert not choose_copies("auto", [])[0]
    assert model_minus_copying(shares(lost)).high == 1
    assert not choose_copies("auto", shares(lost, lost))[0]
    assert choose_copies("auto", shares(lost, lost, lost))[0]
    assert not choose_copies("auto", shares(lost, lost, lost, cursors=1))[0], "one line each is no spread"
    equal = shares((0.2, 0.3), (0.2, 0.3), (0.2, 0.3), (0.2, 0.3), cursors=12)
    assert not choose_copies("auto", equal)[0], "files that agree by chance"


def test_shares_of_right_ends_are_paired_by_cursor_and_file():
    text = "".join(f"value_{i} = {i}\n" for i in range(30))

    class Knows:
        def __init__(self, count):
            self.count, self.asked = count, []

        def complete(self, before, after="", name=""):
            self.asked.append((name, len(before)))
            rest = text[len(before) :].partition("\n")[0]
            return Suggestion(rest if before.count("\n") < self.count else "?", 0.5, 0.5)

    model, copying = Knows(30), Knows(15)
    texts = [("a.txt", text), ("empty.txt", "\n\n"), ("b.txt", "x\n"), ("c.txt", text)]
    first, second = paired_shares(ask_cursors((model, copying), texts, 80))
    assert model.asked == copying.asked
    assert (first.model, first.cursors) == (second.model, second.cursors) == (1.0, 20), "more lines of few files"
    assert 0.2 < first.copying < 0.8
    many = [(f"{i}.txt", text) for i in range(40)]
    few = paired_shares(ask_cursors((model, copying), many, 80))
    assert (len(few), {file.cursors for file in few}) == (20, {4})
    assert paired_shares(ask_cursors((model, copying), [], 80)) == []


@pytest.mark.slow
def test_a_refused_run_leaves_no_index_and_a_refused_resume_the_old_one(programs, tmp_path):
    run = tmp_path / "run"
    refuses("lr", train_to, run, programs, vocab_size=330, lr_factors=("nothing.like.it=2",))
    assert not (run / "completion").exists()
    train_to(run, programs, vocab_size=330)
    before = (run / "completion" / "index.safetensors").read_bytes()
    (programs / "more.py").write_text("y = 2\n" * 9)
    refuses("changed", train_to, run, programs, vocab_size=330, resume=True)
    assert (run / "completion" / "index.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_run_of_one_file_copies_from_its_beginning_and_fits_on_its_end(programs, tmp_path, monkeypatch):
    file, run = tmp_path / "one.py", tmp_path / "run"
    file.write_text("".join(p.read_text() for p in sorted(programs.rglob("*.py"))))
    seen = []
    fit = completion_fit.fit_mixture
    noting = lambda engine, *args: seen.append(engine) or fit(engine, *args)
    monkeypatch.setattr(completion_fit, "fit_mixture", noting)
    train_to(run, file)
    text = file.read_text()
    ((name, indexed),) = seen[0].index.texts()
    assert name == "one.py"
    assert text.startswith(indexed)
    assert 0.7 * len(text) < len(indexed) < 0.8 * len(text), "a fifth of a short text is for validation"
    assert read_gate(run) is not None
    assert read_index(run).texts() == [("one.py", text)], "all of it, once the run has ended"


# copying alone


def copier(*texts):
    return CopyCompleter(index_texts(texts, FileTokenizer(BPE, True)))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_without_a_model_the_rest_of_the_line_after_the_longest_match(end):
    text = end.join(["value = compute(3)", "other = compute(4)", "last = compute(5)"])
    completer = copier(("a.py", text), ("b.py", "first = 1" + end))
    assert completer.complete("x = 1\nother = comp", "", "c.py").text == "ute(4)"
    assert completer.complete("x = 1\nother = comp", ")\n", "c.py").text == "ute(4"
    assert completer.complete("last = ", "", "c.py").text == "compute(5)", "not on into the next file"
    assert completer.complete("other = comp", "", "a.py").text == "", "not from the file itself as it was"
    assert completer.complete("", "", "c.py").text == completer.complete("§", "", "c.py").text == ""
    again = end.join(["name = 3", "other = 4", "name"])
    assert completer.complete(again, "", "c.py").text == " = 3", "the file itself comes first"
    assert completer.complete(f"a = 1{end}b = 2{end}a = 1{end}", "", "c.py").text == "b = 2", "at a line's start"
    completer = copier(("a.py", "value = compute(first, second)\n"))
    few = completer.alternatives("value = ", "", "b.py", CompleteOptions(max_tokens=4))[0]
    assert (few.text, few.ends_line) == ("compute(first,", False), "a token has about four characters"
    assert completer.complete("value = ", "", "b.py").text == "compute(first, second)"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\r", "\r\r\n"])
def test_a_text_is_tokenized_line_by_line_whatever_was_tokenized_before(end):
    files = FileTokenizer(BPE, header=True)
    for text in ("", "ab", end, f"ab{end}", f"a{end}b{end}{end}c", f"a{end}b{end}{end}c = a"):
        lines = split_lines(text)
        for name in ("a.py", "", "a.py"):
            found = files.tokenize(text, name)
            parts = [found.ids[a:b] for a, b in pairwise([*found.starts, len(found.ids)])]
            assert parts == [list(files.line(line)) for line in lines]
            assert found.ids[: found.starts[0]] == files.start(name)
            found.ids.append(0)  # it belongs to the caller


def joining_tokenizer(pattern):
    """A tokenizer that splits words by this pattern, so that its tokens join line ends and indentation."""
    inner = tokenizers.Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    inner.train_from_iterator([DEEP * 3, OTHER, "});\n\n  f(x);\n" * 9], trainer)
    return Tokenizer(inner)


DEEP = (
    CODE + "class A:\n    def f(self):\n        if x:\n            return 1\n\n        return 'f'\n\n    y = 2\n"
)
JOINING = {"before line ends": GPT2, "after line ends": LLAMA3, "nowhere": r"[\s\S]{1,9}"}


@pytest.mark.parametrize("kind", JOINING)
def test_a_text_of_joined_lines_has_the_tokenizers_ids_and_only_its_last_part_is_encoded_anew(kind, monkeypatch):
    tokenizer = joining_tokenizer(JOINING[kind])
    files = FileTokenizer(tokenizer, header=False)
    assert not tokenizer.line_separable
    assert any(b"\n " in piece or b"\n\n" in piece for piece in files.pieces)
    chance = random.Random(0)
    odd = [text for text in hard_strings.strings(60) if len(text) < 400]
    texts = [*odd, DEEP, *("".join(chance.choices([*odd, "\n", "\r\n", " ", "\n    "], k=9)) for _ in range(60))]
    for text in map(valid_text, texts):
        for end in ("", "\n", "\n  ", "\r\n\tx"):
            found = files.tokenize(text + end)
            assert found.ids == tokenizer.encode(text + end)
            assert found.starts == [0, *(n + 1 for n, id in enumerate(found.ids) if b"\n" in files.pieces[id])]
            assert files.encode_continuation(text + end) == tokenizer.encode_continuation(text + end)
    files.tokenize(CODE * 20 + "    resul")
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    monkeypatch.setattr(Tokenizer, "encode_continuation", Tokenizer.encode)
    files.tokenize(CODE * 20 + "    result")
    assert (sum(map(len, encoded)) < 40) is (kind != "nowhere")


@pytest.mark.parametrize("kind", ["before line ends", "after line ends"])
def test_the_line_as_it_goes_on_can_be_reached_from_every_prompt(kind):
    """Also at the start of a line, where the ids of the text above end with a token of its end and indentation."""
    tokenizer = joining_tokenizer(JOINING[kind])
    check_prompts(model_for(tokenizer, 1024), DEEP)


def check_healing(files, text):
    """At each cursor, the ids that are kept are the first ids of the entire text."""
    ids = files.tokenizer.encode(text)
    for cut in range(1, len(text)):
        found = files.tokenize(text[:cut])
        line, typed = files.split_typed(found.ids[found.last :])
        kept = [*found.ids[: found.last], *line]
        assert kept == ids[: len(kept)], repr(text[:cut][-20:])
        assert b"".join(files.pieces[i] for i in kept) + typed == text[:cut].encode()


def check_prompts(loaded, text):
    engine = engine_of(loaded=loaded, header=False)
    check_healing(engine.files, text)
    for cut in (text.index("width, height):") - 1, text.index("    return 1")):
        search, _ = engine._find(text[:cut], "", "", CompleteOptions(width=1))
        assert search.prompt == engine.files.tokenizer.encode(text)[: len(search.prompt)]


def test_a_prompt_has_at_most_its_budget_and_moves_by_half_of_it(monkeypatch):
    loaded = model_for(BPE, 512, **TRAINED)
    monkeypatch.setattr(completion_engine, "SHORTEST", 8)
    monkeypatch.setattr(completion_engine, "PROMPT_WORK", 64.5 * tree.count(loaded.model))
    engine = engine_of(loaded=loaded)
    assert engine.prompt_tokens == choose_budget(loaded.model) == 64
    prompts = [engine._prompt([*range(5, n)], [], 1) for n in range(70, 200)]
    assert all(32 <= len(prompt) <= 64 for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) == 5
    assert all(len(engine._prompt([70] * 500, [71] * 500, 1)) <= 64 for _ in range(3))
    assert len(engine_of(loaded=model_for(BPE, 64, **TRAINED))._prompt([70] * 99, [], 1)) < 64, "a shorter context"


def test_a_budget_that_was_kept_beside_the_gate_is_used(stored):
    run, _ = stored
    assert FolderCompleter(run, loaded=LOADED).prompt_tokens == choose_budget(LOADED.model)
    write_gate(run, copying_gate(), {"prompt_tokens": 40})
    assert FolderCompleter(run, loaded=LOADED).prompt_tokens == 40


def test_without_text_above_the_file_has_used_no_id_before_the_cursor():
    engine = engine_of()
    uses = engine.sources([], engine.files.encode_continuation("x = 1\n" * 9), "").uses
    assert uses[:, 0].max() > 3, "what stands below is counted"
    assert not uses[:, 1:].any()


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda names: (*names, "new"), ()),
        (lambda names: ("new", *names[::-1]), ()),
        (lambda names: names[1:], (0,)),
        (lambda names: names[:3] + names[4:-1] + ("new",) + names[-1:], (3,)),
    ],
    ids=["added", "reordered", "removed", "exchanged"],
)
def test_a_gate_knows_its_inputs_by_name(stored, change, lost, monkeypatch):
    """Gates on disk outlive a change of their features; a new one has no weight."""
    run, _ = stored
    torch.manual_seed(0)
    before = Gate(hidden=5)
    save_file({name: p.numpy() for name, p in before.state_dict().items()}, run / "completion/gate.safetensors")
    names = change(Gate.INPUTS)
    monkeypatch.setattr(copy_gate, "Gate", type("Other", (Gate,), {"INPUTS": names}))
    gate, _ = read_gate(run)
    inputs = torch.randn(7, len(Gate.INPUTS))
    inputs[:, list(lost)] = 0
    values = dict(zip(Gate.INPUTS, inputs.T, strict=True))
    now = torch.stack([values.get(name, torch.randn(7)) for name in names], 1)
    outputs = [g.down(torch.tanh(g.up(x))) for g, x in ((before, inputs), (gate, now))]
    assert torch.allclose(*outputs, atol=1e-6)


def test_a_gate_that_misleads_is_drawn_to_its_model(monkeypatch):
    monkeypatch.setattr(copy_gate, "STEPS", (60, 60))
    places, misled = noise_places(300, 2), noise_places(300, 3)
    misled = misled._replace(target=misled.target.roll(1), target_logprob=misled.target_logprob.roll(1))
    gate = fit_gate(misled)
    gate.scale(30)
    alone = -places.target_logprob.mean()
    assert places.loss(gate).mean() > alone
    gate.scale(copy_gate.best_factor(gate, places))
    assert places.loss(gate).mean() <= alone + 1e-6
    good = fit_gate(places)
    assert copy_gate.best_factor(good, places) == 1
    good.scale(0)
    assert torch.allclose(places.loss(good), -places.target_logprob, atol=1e-5)


def test_a_place_has_the_rest_of_the_probability():
    logprobs, places = torch.randn(50).log_softmax(-1), Places.zeros(1)
    candidates = Candidates(torch.tensor([3, 7, 11]), torch.zeros(3, Copies.FEATURES))
    places.set(0, 7, logprobs, candidates)
    total = places.logprobs[0, :3].exp().sum() + places.rest_logprob[0].exp()
    assert float(total) == pytest.approx(1)
    assert (int(places.target[0]), float(places.target_logprob[0])) == (1, float(logprobs[7]))


def noise_places(count, seed):
    """Places whose features say nothing, but whose targets are always candidates."""
    draw = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(count, 12, generator=draw).mul(2).log_softmax(-1)
    target = logprobs[:, :8].exp().cumsum(-1).ge(0.9 * torch.rand(count, 1, generator=draw)).long().argmax(-1)
    other = logprobs.gather(1, target[:, None])[:, 0]
    features = torch.randn(count, 8, Copies.FEATURES, generator=draw)
    known, rest = torch.ones(count, 8, dtype=torch.bool), logprobs[:, 8:].logsumexp(-1)
    return Places(features, logprobs[:, :8], known, logprobs.amax(-1), target, other, rest)


def test_a_gate_does_not_learn_few_places_by_heart():
    few, others = noise_places(500, 0), noise_places(2000, 1)
    assert float(others.loss(fit_gate(few)).mean() + others.target_logprob.mean()) < 0


def test_sources_of_an_index_are_read_only_by_who_trained_on_them(tmp_path):
    """A folder without a card comes from anyone: what it names as its sources is no reason to read them."""
    index = index_texts([("a.py", "x = 1\n")], FileTokenizer(BYTES, True))
    for source in ("~nosuchuser/x", "x" * 5000, "a\0b", "\ud800"):  # what is no path costs nothing
        write_index(tmp_path, index, (source,))
        assert name_in_sources(Path("t.py"), tmp_path) == "t.py"
        assert training_sources(tmp_path) == ((), False)
    secret = str(tmp_path / "secret")
    write_index(tmp_path, index, (secret,), True)
    assert training_sources(tmp_path) == ((), False)
    assert training_sources(tmp_path, of_anyone=True) == ((secret,), True)
    remember_sources((secret,), True)
    assert training_sources(tmp_path) == ((secret,), True)
