"""Pruned folders: made by the verb, opened by transformers, and with the same zeros after any training."""

import json
import re
import shutil

import pytest
import torch

from conftest import change_json, display, equal_states, refuses
from dunes import checkpoint, tree
from dunes.augment.options import Prune
from dunes.augment.prune import masked_places
from dunes.checkpoint.export import export
from dunes.cli import verbs
from dunes.cli.augment_verb import COMMANDS
from dunes.evaluate.text_loss import calibration_ids
from dunes.runs.augment import augment_folder, quantize_folder
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from test_finetune import asked, base, examples, finetuned, tokenizer
from test_runs import stop

__all__ = ["base", "examples", "tokenizer"]  # fixtures
IDS = torch.arange(60)[None]

prune = COMMANDS["prune"]


@pytest.fixture(scope="module")
def pruned(base, tmp_path_factory):
    """A model pruned to 2:4, and its calibration text."""
    folder = tmp_path_factory.mktemp("pruned")
    text = folder / "text.txt"
    text.write_text("".join(f"What comes after one two {i}? Six or seven of ten.\n" for i in range(400)))
    augment_folder(base, folder / "model", "prune", calibration=[str(text)], pattern="2:4")
    return folder / "model"


def without_measuring(monkeypatch):
    """Let the verbs leave out the measurements of both folders, which take seconds and have tests of their own."""
    plain = lambda *folders, **options: augment_folder(*folders, **options | {"validation": None})
    monkeypatch.setattr("dunes.runs.augment.augment_folder", plain)


def zeros(folder):
    model = checkpoint.load(folder).model
    places = masked_places(model)
    assert len(places) == 2 * 7
    return {p.name: tree.innermost(p.module).weight == 0 for p in tree.places(model) if p.name in places}


def assert_same_zeros(one, two):
    assert equal_states(zeros(one), zeros(two))


def test_the_verb_reports_what_it_pruned(base, pruned, tmp_path, capsys, monkeypatch):
    without_measuring(monkeypatch)
    text = str(pruned.parent / "text.txt")
    out, no = tmp_path / "out", tmp_path / "no"
    prune(str(base), out, prune=Prune(pattern="2:4"), calibration=(text,))
    printed = capsys.readouterr().out
    assert "50.0% of " in printed
    assert "(sparsegpt, 2:4)" in printed
    assert_same_zeros(pruned, out)
    assert (out / "model.safetensors").read_bytes() == (pruned / "model.safetensors").read_bytes()
    verbs.convert(out, tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    prune(str(base), tmp_path / "magnitude", prune=Prune(method="magnitude"))
    for options, calibration, message in (
        ({}, (), "does not record its training text; pass one with --calibration FILE"),
        ({"method": "magnitude"}, (text,), "with these options prune reads no text; omit --calibration"),
        ({"pattern": "2:3"}, (text,), "pattern is 2:3"),
    ):
        refuses(message, prune, str(base), no, prune=Prune(**options), calibration=calibration)
    assert not no.exists()


def test_calibration_has_as_many_tokens_as_asked(base, pruned):
    loaded, text = checkpoint.load(base), str(pruned.parent / "text.txt")
    assert calibration_ids(loaded, [text], 1000).shape == (8, 128)
    assert 1000 < calibration_ids(loaded, [text], 10**9).numel() < 10_000 * 3


def test_where_the_training_text_is_gone_int4_rounds_to_nearest_and_solvers_ask_for_text(base, pruned, tmp_path):
    folder, gone, text = tmp_path / "gone", tmp_path / "text", str(pruned.parent / "text.txt")
    shutil.copytree(base, folder)
    change_json(folder / "dunes.json", trained={"sources": [text, str(gone)]})
    said = f"method rtn: the text of the model's training is gone ({gone}); --calibration FILE uses gptq"
    small = {"kind": "int4", "group": 32}
    assert quantize_folder(folder, tmp_path / "int4", **small)[-1] == said
    assert said not in quantize_folder(folder, tmp_path / "rtn", **small, method="rtn")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("int4", "rtn")]
    assert weights[0] == weights[1]
    asked = re.escape(f"the text of the model's training is gone ({gone}); pass one with --calibration FILE")
    refuses(asked, quantize_folder, folder, tmp_path / "out", **small, method="gptq")
    refuses(asked, prune, str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    lines = quantize_folder(folder, tmp_path / "gptq", **small, calibration=[text])
    assert lines[-1] == "method gptq, which reads the calibration text; --method rtn needs no text"


def test_zeros_stay_in_training_that_is_stopped_and_resumed_and_goes_on(pruned, code, tmp_path, monkeypatch):
    fixed = {"batch": 4, "context_length": 32, "steps": 4, "lr": 0.01, "dtype": "float32", "threads": 1}
    config = TrainConfig(sources=(str(code),), base=str(pruned), **fixed)
    stop(config, tmp_path / "run", 2, monkeypatch)
    assert train(TrainConfig(), tmp_path / "run", display()[0], resume=True) == 0
    assert_same_zeros(pruned, tmp_path / "run")
    weights = [checkpoint.load(folder).model.blocks[0].attn.q.weight for folder in (pruned, tmp_path / "run")]
    assert not torch.equal(*weights)
    again = TrainConfig(sources=(str(code),), base=str(tmp_path / "run"), **fixed)
    assert train(again, tmp_path / "more", display()[0]) == 0
    assert_same_zeros(pruned, tmp_path / "more")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "dora"))]
)
def test_zeros_stay_in_finetuning_and_in_what_is_merged(method, pruned, examples, tmp_path):
    finetuned(asked(pruned, examples, method=method), tmp_path / "run")
    if method == "full":
        assert_same_zeros(pruned, tmp_path / "run")
        return
    report = export(tmp_path / "run", tmp_path / "merged").lines()
    assert "the zeros of 14 pruned matrices stay" in report
    assert_same_zeros(pruned, tmp_path / "merged")
    with torch.no_grad():
        one, two = (checkpoint.load(folder).model(IDS) for folder in (tmp_path / "run", tmp_path / "merged"))
        assert (one - two).abs().max() < 1e-4
        assert (one - checkpoint.load(pruned).model(IDS)).abs().max() > 1e-3


def test_cards_of_models_without_zeros_to_keep_say_nothing_of_them(base, pruned):
    assert "masked" not in json.loads((base / "dunes.json").read_text())
    card = json.loads((pruned / "dunes.json").read_text())
    assert len(card["masked"]) == 14
    assert card["changes"][-1]["places"]["blocks.0.attn.q"] == {"weights": 1024, "nonzero": 512}
