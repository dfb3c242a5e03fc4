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


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="Apple's GPU is here")
def test_without_apples_gpu_one_line_says_so():
    done = run()
    assert done.returncode == 2
    assert done.stderr == "error: PyTorch finds no GPU of Apple's here; --device cpu runs the same code\n"


@pytest.mark.slow
def test_a_silent_fallback_to_the_cpu_is_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    done = run("--device", "cpu")
    assert done.returncode == 2
    assert "unset it" in done.stderr


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
