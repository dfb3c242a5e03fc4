"""dunes augment quantize: what it chooses by itself, what it says, and what it refuses before it writes."""

import pytest

from conftest import refuses
from dunes import checkpoint
from dunes.augment.options import Quantize
from dunes.augment.quantized import GroupInt
from dunes.cli.augment_verb import COMMANDS
from test_finetune import base, tokenizer

__all__ = ["base", "tokenizer"]  # fixtures

quantize = COMMANDS["quantize"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"What comes after one two {i}? Six or seven of ten.\n" for i in range(400)))
    return str(file)


def test_gptq_is_chosen_where_there_is_text_and_nothing_else(base, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dunes.runs.augment.compare_folders", lambda *_, **__: "not measured")
    options = Quantize(kind="int4", override=("blocks.0.**=int8",))
    quantize(str(base), tmp_path / "gptq", quantize=options, calibration=(text,))
    lines = capsys.readouterr().out.splitlines()
    assert "method gptq, which reads the calibration text; --method rtn needs no text" in lines
    assert "int4 in groups of 64, by GPTQ; int8 at 7 places" in lines
    loaded = checkpoint.load(tmp_path / "gptq")
    assert isinstance(loaded.model.blocks[1].attn.q, GroupInt)
    assert loaded.architecture.changes[0].request["method"] == "gptq"
    for kind, told in (("int3", "int3 in groups of 32, rounded to nearest"), ("int8", "int8, rounded to nearest")):
        group = 32 if kind == "int3" else None
        quantize(str(base), tmp_path / kind, quantize=Quantize(kind=kind, group=group))
        lines = capsys.readouterr().out.splitlines()
        assert told in lines
        assert not any(line.startswith("method") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "int4", "method": "gptq"}, "does not record its training text; pass one with --calibration"),
        ({"kind": "int4", "method": "rtn", "calibration": True}, "--method rtn reads no calibration text"),
    ],
)
def test_what_means_nothing_is_refused_with_nothing_written(base, text, tmp_path, options, message):
    calibration = (text,) if options.pop("calibration", False) else ()
    refuses(message, quantize, str(base), tmp_path / "out", quantize=Quantize(**options), calibration=calibration)
    assert not (tmp_path / "out").exists()
