"""Runs as the studio reads them, and as browsers show and stop them."""

import os

import numpy as np
import pytest

from dunes.measure import ranks
from dunes.runs.saving import run_lock, signal_run
from dunes.studio.folders import find_entries
from dunes.studio.runs import MetricsFile, config_differences, describe, thin
from studio import needs_browser, opened, studio
from test_runs import TRAIN, start


def line(step, loss="2.0", more=""):
    return f'{{"step": {step}, "loss": {loss}, "count": 8, "seconds": 30{more}}}\n'


def test_metrics_are_read_while_they_are_written(tmp_path):
    path, metrics = tmp_path / "metrics.jsonl", MetricsFile(tmp_path)
    assert metrics.update().points("loss") == []
    path.write_text(line(1) + "{damaged\n" + line(1, '"2"') + line(2)[:20])
    assert (metrics.update().points("loss"), metrics.damaged) == ([(1, 2)], 2)
    with path.open("a") as file:
        file.write(line(2)[20:] + line(3, "NaN") + line(4, more=', "validation_loss": 3'))
    assert metrics.update().points("loss", "tokens") == [(8, 2), (16, 2), (32, 2)]
    assert metrics.points("validation_loss", "minutes") == [(2, 3)]
    path.write_text(line(1))  # as by a resumed run
    assert (metrics.update().points("tokens/s"), metrics.damaged) == ([(1, 8 / 30)], 0)


def test_a_thinned_series_keeps_its_spikes():
    y = np.random.default_rng(0).normal(size=100_000)
    y[[7, 77_777]] = 99, -99
    points = thin(np.arange(100_000), y)
    assert len(points) <= 1000
    assert {(7, 99), (77_777, -99)} <= {*points}


def test_only_the_process_that_has_the_lock_on_this_machine_gets_a_signal(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    with run_lock(tmp_path):
        assert signal_run(tmp_path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "gethostname", lambda: "elsewhere")
            assert not signal_run(tmp_path, 2)
    assert not signal_run(tmp_path, 2)
    assert sent == [(os.getpid(), 2)]


def test_a_killed_run_is_told_from_one_that_ended_and_configs_are_compared(tmp_path):
    for name in "ab":
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "plan.json").write_text(f'{{"lr": "{name}", "seed": 0, "sources": []}}')
        (tmp_path / name / "metrics.jsonl").write_text(line(4))
    (tmp_path / "b" / "dunes.json").write_text('{"trained": {"steps": 4}}')
    a, b = sorted(find_entries(tmp_path), key=lambda entry: entry.name)
    assert describe(a).startswith("unfinished, step 4, loss 2, ")
    assert describe(a).endswith(f"; continue with: dunes train --out {a.path} --resume")
    assert describe(b).startswith("ended, ")
    assert config_differences({"a": a.path, "b": b.path}) == [{"option": "lr", "a": "a", "b": "b"}]


@pytest.mark.slow
@needs_browser
def test_a_run_is_watched_to_its_end_and_another_is_stopped_while_two_look(code, tmp_path):
    with studio(tmp_path) as address, opened(address) as page:
        page.get_by_text("no run and no model").first.wait_for()
        first = start(code, tmp_path / "first", *TRAIN, "--no-complete", steps=300)
        page.get_by_text("first: training").first.wait_for(timeout=90_000)
        page.get_by_text("first: ended").first.wait_for(timeout=90_000)
        page.get_by_text("first, after 300 steps").wait_for()
        second = start(code, tmp_path / "second", *TRAIN, steps=9_000)
        other = page.context.browser.new_page(storage_state=page.context.storage_state())
        other.goto(address)
        other.get_by_text("first, after 300 steps").wait_for()
        other.get_by_role("combobox").click()
        other.get_by_text("second: training").click(timeout=90_000)
        other.keyboard.press("Escape")
        other.on("dialog", lambda dialog: dialog.accept())
        other.get_by_role("button", name="Stop").click()
        for process, status in ((first, 0), (second, 130)):
            process.communicate(timeout=60)
            assert process.returncode == status
        other.get_by_text("second: ended").wait_for(timeout=20_000)
