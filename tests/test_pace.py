"""A run on a busy machine: what it says, when it ends, and that its losses are the same."""

import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from dunes.runs import finetune_data
from dunes.runs import report as module
from dunes.runs.report import PaceCheck
from dunes.runs.saving import read_metrics


def check(monkeypatch, share, seconds, cores=2, tokens=1000, **options):
    """The warnings of a run that makes 15 steps, so many seconds each, and gets this share of two processors."""
    times = iter([(0.0, 0.0), *[(10.0, 20.0 * share)] * 20])
    now = [None]

    def perf_counter():
        now[0] = next(times)
        return now[0][0]

    monkeypatch.setattr(module, "perf_counter", perf_counter)
    monkeypatch.setattr(module, "process_time", lambda: now[0][1])
    monkeypatch.setattr(module, "_cores", lambda: cores)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (3.94, 0, 0), raising=False)
    fixed = {"threads": 2, "rate": 20_600.0, "steps": None, "minutes": 3.0, "counted": "tokens"}
    config = SimpleNamespace(**fixed | options)
    trainer = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    made = PaceCheck(SimpleNamespace(config=config, trainer=trainer, pace=deque[float](maxlen=100)))
    warnings = []
    for _ in range(15):
        made.run.pace.append(seconds)
        warnings.append(made.warning(SimpleNamespace(count=tokens)))
    assert not any(warnings[: module.WATCHED - 1])
    return list(filter(None, warnings))


@pytest.mark.parametrize(
    ("share", "seconds", "options", "words"),
    [
        (0.5, 0.2, {}, "other programs leave 1.0 processors"),
        (0.95, 0.2, {"steps": 100}, "heat, power saving"),
        (0.5, 0.09, {}, ""),
        (0.4, 0.2, {"rate": None}, "other programs leave 0.8 processors"),
        (0.6, 0.2, {"rate": None}, ""),
        (0.4, 0.2, {"rate": None, "cores": 4}, ""),  # threads sleep, and nothing else runs
        (0.6, 0.2, {"rate": None, "threads": 8}, ""),  # more threads than processors
        (0.9, 0.2, {"tokens": 64}, ""),  # the fixed cost of a small step is not estimated
    ],
)
def test_a_run_that_is_slower_than_estimated_says_so_once_and_why(share, seconds, options, words, monkeypatch):
    warnings = check(monkeypatch, share, seconds, **options)
    assert len(warnings) == bool(words)
    assert all(words in warning for warning in warnings)


@pytest.mark.slow
def test_the_same_command_has_the_same_losses_beside_other_work(code, tmp_path):
    burn = [sys.executable, "-c", "while True: pass"]
    losses = []
    for number in (0, 0, 3):
        others = [subprocess.Popen(burn) for _ in range(number)]
        try:
            folder = tmp_path / f"run-{len(losses)}"
            options = ["--steps", "12", "--size", "100k", "--vocab-size", "300", "--no-complete", "--out", folder]
            subprocess.run(
                [sys.executable, "-m", "dunes", "train", code, *options], check=True, capture_output=True
            )
        finally:
            for other in others:
                other.kill()
                other.wait()
        losses.append([r["loss_hex"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r])
    assert len(losses[0]) == 12
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(("seconds", "tokens"), [(float("inf"), 50_000), (11.0, 10 * 2048), (2.5, 2048)])
def test_a_base_model_is_measured_within_the_time_that_there_is(monkeypatch, seconds, tokens):
    """One second for 2,048 tokens; the limit gives the same score again."""
    now = [0.0]
    monkeypatch.setattr(finetune_data, "monotonic", lambda: now[0])

    def score(limit):
        now[0] += limit / 2048
        return SimpleNamespace(tokens=limit)

    got, limit = finetune_data.score_within(seconds, score, 50_000, 100_000)
    assert got.tokens == limit == tokens
    assert now[0] <= seconds
    assert finetune_data.score_within(seconds, lambda limit: None, 50_000, 0) == (None, 50_000)
    fewer = lambda limit: score(limit - 100)  # windows that are not full
    assert finetune_data.score_within(10.5, fewer, 50_000, 100_000)[1] < 50_000
