"""The benchmarks run and say what they promise; their figures are for LOG.md, never for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def last_line(script: str, *arguments: object):
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_race_on_a_gpu_runs_on_any_machine_at_toy_size():
    row = last_line("gpu.py", "--toy", "--rounds", 1)
    assert all(row[f"{side}: tokens/s"] > 0 for side in ("plain compiled", "Trainer", "ours"))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["plain float32", "Trainer float32", "ours"])
def test_each_side_of_the_training_race_runs(side):
    assert last_line("train.py", "--side", side, "--sizes", "1m", "--batch", 1)["seconds"] > 0


@pytest.mark.slow
def test_our_side_of_shakespeare_learns(tmp_path):
    words = "The quality of mercy is not strained, it droppeth as the gentle rain.\n"
    (tmp_path / "text.txt").write_text(words * 800)
    row = last_line("shakespeare.py", tmp_path / "text.txt", "--side", "ours")
    assert row["loss"] < 1.0
    assert row["steps"] == 170


@pytest.mark.slow
def test_the_sweep_runs_and_leaves_out_what_is_known(code, tmp_path):
    out = tmp_path / "dial.jsonl"
    arguments = ("--minutes", "0.34", "--shapes", "300k,2,32,300", "--source", code, "--out", out)
    command = [sys.executable, FOLDER / "dial.py", *map(str, arguments)]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        (row,) = map(json.loads, out.read_text().splitlines())
        assert row["bits_per_byte"] > 0


@pytest.mark.slow
def test_what_a_save_costs_is_said():
    assert last_line("save.py", "--size", "300k", "--rounds", 1, "--steps", 2)["blocked_seconds"] > 0
