"""Folders that an earlier version wrote are read as it read them: `make_gallery.py` made them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import make_gallery
from conftest import display
from dunes import checkpoint
from dunes.checkpoint.card import read_card
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

GALLERY = Path(__file__).parent / "gallery"
LOGITS, EXPECTED = load_file(GALLERY / "expected.safetensors"), json.loads((GALLERY / "expected.json").read_text())
NAMES = sorted(EXPECTED["models"])


def test_every_folder_has_something_expected_of_it():
    assert [folder.name for folder in make_gallery.model_folders(GALLERY)] == NAMES
    assert {*LOGITS} == {*NAMES, "network", "network-trained"}
    made = {*make_gallery.TRAINED, *make_gallery.METHODS, *make_gallery.CHANGES, "hf", "packed", "from-q8_0"}
    assert {*NAMES} == made - {"killed"}


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_computes_what_it_did(name):
    model = checkpoint.load(GALLERY / name).model
    torch.testing.assert_close(make_gallery.last_logits(model), LOGITS[name], rtol=1e-4, atol=1e-4)
    assert make_gallery.greedy_ids(model) == EXPECTED["models"][name]["greedy"]
    assert (read_card(GALLERY / name) or {}).get("changes", []) == EXPECTED["models"][name]["changes"]


def test_a_network_computes_what_it_did():
    found = make_gallery.scores(checkpoint.load_network(GALLERY / "network"))
    torch.testing.assert_close(found, LOGITS["network"], rtol=1e-4, atol=1e-4)


def test_a_network_trains_on_as_it_did():
    found = make_gallery.scores(make_gallery.resumed_network(GALLERY))
    torch.testing.assert_close(found, LOGITS["network-trained"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_lines_are_completed_as_they_were(every):
    found, expected = make_gallery.completions(GALLERY, every), EXPECTED["completions"][::every]
    assert len(EXPECTED["completions"]) == make_gallery.CUTS
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 2, "two numbers may be nearly equal"


def test_a_killed_run_goes_on_to_what_the_finished_one_has(tmp_path):
    """It differs from the run "arcee" in nothing but that, and its text lies elsewhere now."""
    folder, programs = shutil.copytree(GALLERY / "killed", tmp_path / "killed"), str(tmp_path / "programs")
    make_gallery.write_programs(tmp_path / "programs")
    assert checkpoint.latest_state(folder).name == "step-000004"
    asked = {"sources": (programs,)}
    config = TrainConfig(**asked)
    shown, out = display()
    assert train(config, folder, shown, resume=True, override=("sources",), asked=asked) == 0, out.getvalue()
    model = checkpoint.load(folder).model
    torch.testing.assert_close(make_gallery.last_logits(model), LOGITS["arcee"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", make_gallery.STATES)
def test_a_training_state_is_read(name):
    state = checkpoint.load_state(checkpoint.latest_state(GALLERY / name))
    if name == "network-trained":
        assert state["trainer"]["number"] == 2
        return
    assert state["weights"]
    assert state["best_step"] == (0 if name == "killed" else 4)
