"""Apple's GPU, where there is one; elsewhere, the code that checks it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dunes import ops

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "apple_gpu.py"


def run(*arguments, **environment):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **environment)


@pytest.mark.long
def test_the_same_code_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--device", "cpu", "--size", "50k")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs Apple's GPU")
def test_everything_passes_on_apples_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metal_is_for_apples_gpu():
    assert ops.Metal("").missing("mps") is None
    assert ops.Metal("").missing("cpu") == "its Metal kernels are for Apple's GPU, not cpu"
