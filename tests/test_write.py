"""Text from a model, and the places in files where it goes on."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from conftest import refuses
from dunes import checkpoint
from dunes.checkpoint import LoadedModel
from dunes.cli import verbs
from dunes.completion import Suggestion, completer
from dunes.completion.engine import CompletionEngine
from dunes.completion.search import Beam, CompleteOptions, LineSearch
from dunes.generate import SamplingOptions
from dunes.inference.text_generator import TextGenerator
from dunes.text import Tokenizer
from dunes.text.byte_pairs import BYTE_TO_CHAR
from dunes.text.lines import text_around_cursor
from small_models import random_model


@pytest.mark.parametrize(("pieces", "error"), [(0, ""), (1, "prompt: 3 tokens, "), (2, "generated: 2 tokens, ")])
def test_an_interrupted_text_has_rates_once_it_has_begun(pieces, error, monkeypatch, tmp_path, capsys):
    def stream(*arguments, **options):
        yield from [SimpleNamespace(text="a")] * pieces
        raise KeyboardInterrupt

    checkpoint.save(random_model(vocab=265), tmp_path / "model", Tokenizer.train("bytes", ()), 32)
    monkeypatch.setattr(TextGenerator, "stream", stream)
    assert verbs.generate(str(tmp_path / "model"), SamplingOptions(), "abc") == 130
    out, err = capsys.readouterr()
    assert out == "abc" + "a" * pieces + "\n" * (pieces > 0)
    assert error in err
    assert err.count("\n") == (pieces > 0)


def test_places_in_files(tmp_path):
    file = tmp_path / "a:b.py"
    file.write_text("one\ntwo\n")
    assert text_around_cursor(f"{file}:2:3")[1] == "one\ntw"
    assert text_around_cursor(f"{file}:1:1")[1] == ""
    assert text_around_cursor(f"{file}:2:4")[1] == "one\ntwo"
    assert text_around_cursor(f"{file}:3:1")[1] == "one\ntwo\n", "the empty line behind the last line end"
    nowhere = ("0:1", "x:1", "1:0", "²:1", "1:٣", "-1:1", "1:", "9" * 5000 + ":1")
    for place in (*nowhere, "2:5", "4:1", "9:1"):
        assert refuses(":", text_around_cursor, f"{file}:{place}").startswith(f"{file}:{place}: ")
    refuses("expected FILE:LINE:COLUMN", text_around_cursor, str(file))


@pytest.mark.parametrize(
    ("content", "place", "before"),
    [
        ("a\x0cb\x0bc\x1cd\x85e\u2028f\u2029g\nh", "2:2", "a\x0cb\x0bc\x1cd\x85e\u2028f\u2029g\nh"),
        ("a\x0cb\x0bc\x1cd\x85e\u2028f\u2029g\nh", "1:4", "a\x0cb"),
        ("one\r\ntwo\r\n", "2:4", "one\r\ntwo"),
        ("one\r\ntwo\r\n", "3:1", "one\r\ntwo\r\n"),
        ("one\rtwo\r", "2:3", "one\rtw"),
        ("one\r\r\ntwo\n\rx", "2:1", "one\r"),
        ("one\r\r\ntwo\n\rx", "5:2", "one\r\r\ntwo\n\rx"),
        ("\ufeffone\n", "1:3", "on"),
        ("\ufeff", "1:1", ""),
        ("one\n\ufefftwo", "2:2", "one\n\ufeff"),
        ("", "1:1", ""),
        ("\tä😀x", "1:5", "\tä😀x"),
        *(("one\r\n", "1:5", None), ("one\r", "3:1", None), ("", "2:1", None), ("\ufeffone", "1:5", None)),
    ],
)
def test_a_place_is_where_an_editor_shows_it(content, place, before, tmp_path):
    (tmp_path / "file").write_bytes(content.encode())
    if before is None:
        refuses("outside the (file|line)", text_around_cursor, f"{tmp_path / 'file'}:{place}")
    else:
        assert text_around_cursor(f"{tmp_path / 'file'}:{place}")[1] == before


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"caf\xe9\n")
    refuses(r"file: not UTF-8 at byte 3", text_around_cursor, f"{tmp_path / 'file'}:1:1")


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r", "\n\n", "\r\nmore", "\r\r\n"])
def test_the_rest_of_a_line_is_without_its_end(end, monkeypatch):
    monkeypatch.setattr("dunes.completion.copy_mixture.RememberedLogits.begin", lambda self, length: None)
    for tokenizer in (Tokenizer.train("bytes", []), foreign([";\n", ";\r", ";\r\n", "\n\n", "b;"])):
        engine = CompletionEngine(LoadedModel(None, tokenizer, 64), prompt_tokens=64)
        ids = [*tokenizer.encode(f"a\x0cb;{end}"), tokenizer.eos]
        monkeypatch.setattr(LineSearch, "beams", lambda self, ids=ids: [Beam(tuple(ids), (0.0,) * len(ids))])
        assert engine.complete("x=", options=CompleteOptions(width=3)).text == "a\x0cb;"


def foreign(tokens):
    """A tokenizer of another make, in which these are tokens, too, across line ends."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = ["".join(BYTE_TO_CHAR[b] for b in token.encode()) for token in tokens]
    merges, vocab = [], [*letters]
    for token in spelled:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut])
            merges += [pair] if pair not in merges else []
            vocab += [token[: cut + 1]] if token[: cut + 1] not in vocab else []
    inner = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(inner)


def test_standard_input_keeps_its_line_ends(monkeypatch, capsys):
    asked = []

    class Recorder:
        def complete(self, *arguments):
            asked.append(arguments)
            return Suggestion("ree")

    monkeypatch.setattr(checkpoint, "locate_model", lambda model: SimpleNamespace(folder=model))
    monkeypatch.setattr(completer, "find_completer", lambda *arguments: Recorder())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\r\ntwo\rth")))
    verbs.complete("run")
    assert asked == [("one\r\ntwo\rth", "", "")]
    assert capsys.readouterr().out == "ree\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    refuses("standard input: not UTF-8 at byte 3", verbs.complete, "run")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The README's runs/project, with a model of random numbers."""
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train("chars", map(chr, range(32, 127)))
    model = random_model(noise=0.3, vocab=tokenizer.vocab, dim=16, depth=1, context=64)
    checkpoint.save(model, tmp_path / "runs" / "project", tokenizer, 64)
    return tmp_path / "runs" / "project"


BOS = {"bos_token": "<|im_start|>", "add_bos_token": True}


@pytest.mark.parametrize("marks", [None, BOS, BOS | {"add_bos_token": False}])
def test_the_example_in_the_readme_writes_what_the_verb_writes(marks, folder, capsys):
    if marks is not None:
        (folder / "dunes.json").unlink()  # which has the digest of what is changed here
        (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall("```python\n(.*?)```", readme, re.DOTALL)
    (example,) = (block for block in blocks if "import generate" in block)
    exec(example, {})
    written = capsys.readouterr().out
    assert len(written) > 20
    verbs.generate("runs/project", SamplingOptions(max_tokens=40), "def main(")
    assert capsys.readouterr().out == f"def main({written}\n"


def test_an_own_tokenizer_sets_nothing_in_front_and_neither_does_transformers(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.prompt("def main(") == ours.encode("def main(") == theirs("def main(")["input_ids"]
    assert ours.prompt("") == [ours.eos]
