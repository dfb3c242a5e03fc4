"""Files of one JSON object per line: damage by a full disk, a kill or an edit affects only the damaged line."""

import errno
import json
import os
import re
from typing import ClassVar

import pytest
import torch

from conftest import display, raising, refuses, toy, training_output
from dunes import checkpoint
from dunes.bench import rows
from dunes.checkpoint.weights import safetensors_file
from dunes.cli.bench import plot
from dunes.files import atomic
from dunes.files.json_file import append_record, append_text, parse_line, read_lines, read_records
from dunes.runs import loop as loop_module
from dunes.runs.run import read_metrics, truncate_metrics
from dunes.runs.tensorboard import read_samples
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from teacher import tasks
from teacher.endpoint import Answer, Budget, Ledger, Tokens
from test_recipes import recipe

METRIC = {"step": 1, "loss": 2.0, "count": 9, "grad_norm": 1.0, "lr_scale": 1.0, "skipped": False, "seconds": 0.5}
DAMAGED = {
    "cut short": b'{"step": 3, "lo',
    "not UTF-8": b'{"step": 3, "word": "caf\xe9"}',
    "a number": b"12",
    "a list": b"[1, 2]",
    "null": b"null",
    "text": b'"step"',
    "zeros": b"\0" * 40,
    "deep": b"[" * 100_000,
    "a long number": b"9" * 5000,
}
ODD = {
    "no step": {"loss": 1.0},
    "no seconds": {k: v for k, v in METRIC.items() if k != "seconds"},
}


def metric(step, **more):
    return METRIC | {"step": step, "loss": 9.0 / step} | more


def metrics(path, count, **damaged):
    """A file of so many metrics, some lines of which are something else."""
    lines = [damaged.get(f"line_{i}", json.dumps(metric(i)).encode()) for i in range(1, count + 1)]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_costs_itself_alone_and_is_told(damage, tmp_path):
    path, warnings = metrics(tmp_path / "metrics.jsonl", 6, line_3=DAMAGED[damage]), []
    assert [r["step"] for r in read_metrics(path, warnings.append)] == [1, 2, 4, 5, 6]
    assert len(warnings) == 1
    assert f"{path}, line 3: " in warnings[0]
    assert "\n" not in warnings[0]
    assert len(warnings[0]) < 400


@pytest.mark.parametrize("odd", ODD)
def test_an_object_that_is_no_metric_is_passed_over_and_told(odd, tmp_path):
    path, warnings = metrics(tmp_path / "metrics.jsonl", 4, line_2=json.dumps(ODD[odd]).encode()), []
    assert [r["step"] for r in read_metrics(path, warnings.append)] == [1, 3, 4]
    assert "line 2: " in warnings[0]


def test_damage_is_told_on_standard_error_where_nobody_listens(tmp_path, capsys):
    assert len(read_metrics(metrics(tmp_path / "metrics.jsonl", 3, line_1=b"{", line_3=b"}"))) == 1
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path / 'metrics.jsonl'}, line 1: ")
    assert read_metrics(tmp_path / "nowhere.jsonl") == []
    assert capsys.readouterr().err == ""


def test_a_line_ends_where_a_file_s_lines_do(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "b\u2028c\x85\x0cd"}\r\n\n  \n{"e": 1}'.encode().replace(b"\x0c", b"\\f"))
    read = [parse_line(text) for text in read_lines(path)]
    assert read == [{"a": "b\u2028c\x85\x0cd"}, None, None, {"e": 1}]
    assert read_records(path, "an object", warn=pytest.fail) == [{"a": "b\u2028c\x85\x0cd"}, {"e": 1}]
    assert read_lines(tmp_path / "nowhere.jsonl") == []


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_goes_on_from_an_earlier_step_leaves_every_other_line_as_it_is(damage, tmp_path):
    path = metrics(tmp_path / "metrics.jsonl", 400, line_44=DAMAGED[damage], line_399=DAMAGED[damage])
    own = b'{"somebody": "wrote this"}\n\n'
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(own + b"".join(lines))
    truncate_metrics(path, 350)
    assert path.read_bytes() == own + b"".join([*lines[:350], lines[398]])
    assert [r["step"] for r in read_metrics(path, list)] == [i for i in range(1, 351) if i != 44]
    before = path.stat()
    truncate_metrics(path, 350)
    assert path.stat() == before, "not written again for nothing"
    append_record(path, metric(351))
    assert read_metrics(path, list)[-1]["step"] == 351


def room_for(monkeypatch, room: int) -> None:
    """A disk with room for so many bytes more: what does not fit is cut off first, and refused then."""
    left, real = [room], os.write

    def write(file, data):
        part = data[: left[0]]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(part)
        return real(file, part)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("room", [0, 1, 7, 30, 60])
def test_a_disk_that_is_full_for_a_moment_costs_the_lines_of_that_moment(room, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    append_record(path, metric(1))
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        room_for(patch, room)
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space left on device.*a\.jsonl"):
                append_record(path, metric(2))
    assert path.read_bytes() == whole, "nothing of what did not fit"
    append_record(path, metric(3))
    assert [record["step"] for record in read_records(path, "a step", warn=pytest.fail)] == [1, 3]


def test_an_end_that_a_crash_left_is_mended_before_more_is_written(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    append_record(path, {"step": 3})
    append_text(path, '{"step": 4}')
    append_record(path, {"step": 5})
    records = [parse_line(text) for text in read_lines(path)]
    assert [record and record["step"] for record in records] == [1, None, 3, 4, 5, None]


def crash_at(step, monkeypatch):
    """A disk that is full while this step is noted, and leaves half of its line."""
    real = loop_module.append_metrics

    def note(folder, record):
        if record["step"] == step:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record)[:40])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, record)

    monkeypatch.setattr(loop_module, "append_metrics", note)


def test_a_run_on_a_disk_that_was_full_keeps_all_other_metrics(code, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        crash_at(4, patch)
        printed = training_output(toy(code), folder)
    assert printed.count("warning: writing metrics.jsonl failed") == 1
    assert "metrics.jsonl, line 4: " in printed, "said when the picture is drawn"
    expected = [n for n in range(1, 13) if n != 4]
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl", list)] == expected
    printed = training_output(toy(code, steps=15), folder, resume=True, override=["steps"])
    assert "metrics.jsonl, line 4: " in printed
    records = read_metrics(folder / "metrics.jsonl", list)
    assert [r["step"] for r in records if "loss" in r] == [*expected, 13, 14, 15]


def test_pictures_are_made_of_what_is_whole(code, tmp_path, capsys):
    folder = tmp_path / "run"
    train(toy(code), folder, display()[0])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in DAMAGED.values()))
        file.write(b"".join(json.dumps(odd).encode() + b"\n" for odd in ODD.values()))
    with (folder / "samples.md").open("ab") as file:
        file.write(b"\xff\xfe")
    pytest.importorskip("plotnine")
    assert plot((folder,), tmp_path / "pictures") == 0
    assert (tmp_path / "pictures" / "loss.svg").stat().st_size > 5000
    assert "metrics.jsonl, line 13: " in capsys.readouterr().err
    assert [*read_samples(folder / "samples.md")] == [5, 12]
    (folder / "metrics.jsonl").write_text(json.dumps(METRIC | {"loss": float("nan")}) + "\n")
    refuses("run: no run has a validation loss yet", plot, (folder,), tmp_path / "pictures")


def test_samples_after_one_that_was_cut_short_are_found(tmp_path):
    path = tmp_path / "samples.md"
    append_text(path, "## After 5 steps\n\n```\nfive\n```\n\n")
    with path.open("ab") as file:
        file.write(b"## After 50 steps\n\n```\nfif\xc3")
    append_text(path, "## After 200 steps\n\n```\ntwo hundred\n```\n\n")
    assert read_samples(path)[5] == "five"
    assert read_samples(path)[200] == "two hundred"


ROW = {"benchmark": "train", "seconds": 0.5, "amount": 10, "unit": "tokens"}


def test_a_damaged_measurement_costs_itself_alone(tmp_path, capsys):
    path = tmp_path / "laps.jsonl"
    rows.append_row(path, ROW)
    odd = [{"a": 1}]
    with path.open("ab") as file:
        for line in [*DAMAGED.values(), *(json.dumps(o).encode() for o in odd), b'{"benchm']:
            file.write(line + b"\n" * (line != b'{"benchm'))
    rows.append_row(path, ROW)
    assert rows.read_rows(path) == [ROW, ROW]
    words = capsys.readouterr().err
    assert f"{path}, line 2: " in words
    assert re.search(rf"{len(DAMAGED) + len(odd)} more", words)


def test_rounds_that_were_paid_for_are_kept_after_a_damaged_one(tmp_path, capsys):
    task = tasks.Task("Name a colour of the sky.", "", "Blue.")
    made = [tasks.Round(i, (tasks.Item("x", task),)) for i in range(3)]
    path = tmp_path / "out.json.requests.jsonl"
    append_record(path, made[0].row())
    with path.open("ab") as file:
        file.write(b'{"number": 1, "items": [{"te\n[1]\n{"number": 1, "items": [1]}\n')
        file.write(json.dumps(made[1].row() | {"number": "1"}).encode() + b"\n")
    append_record(path, made[2].row())
    content = path.read_bytes()
    assert list(Ledger(path, Budget(), tasks.Round.fits).others) == [0, 2]
    assert path.read_bytes() == content
    assert "line 2: " in capsys.readouterr().err


class Scripted:
    """A model with one answer."""

    source: ClassVar = {"model": "m"}

    def at_most(self, prompt):
        return Tokens(1, 1)

    def ask(self, prompt):
        return Answer(" Name a bird of the sea.\n4. Input:\n\n4. Output:\nGull.")


def test_a_result_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path, monkeypatch):
    module, out = recipe("self_instruct"), tmp_path / "out.json"
    out.write_text("[]")
    seeds = tmp_path / "seeds.jsonl"
    seed = {"instruction": "Name a colour.", "input": "", "output": "Red."}
    seeds.write_text("".join(json.dumps(seed) + "\n" for _ in range(3)))
    (tmp_path / "out.json.requests.jsonl").write_text("\n")
    monkeypatch.setattr(module, "teacher", lambda options: Scripted())
    options = module.Options(seeds=str(seeds), out=str(out), model="m", count=1)
    monkeypatch.setattr(atomic, "fsync_path", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space"):
        module.main(options)
    assert out.read_text() == "[]"


def test_a_seed_task_may_hold_any_line_separator_of_unicode(tmp_path):
    path = tmp_path / "seeds.jsonl"
    seed = {"instruction": "Name\u2028one\x85colour.", "input": "", "output": "Red."}
    path.write_text(json.dumps(seed, ensure_ascii=False) + "\n", encoding="utf-8")
    assert tasks.read_seed_tasks(path)[0].instruction == seed["instruction"]
    path.write_bytes(b'{"instruction": "caf\xe9"}\n')
    refuses(r"seeds\.jsonl, line 1: not UTF-8 at byte 20", tasks.read_seed_tasks, path)


def test_a_run_keeps_saving_after_a_disk_was_full_for_a_moment(code, tmp_path, monkeypatch):
    """The third save finds no room for its tensors, half-way; the ones after it do."""
    monkeypatch.setattr(loop_module, "SAVE_SECONDS", 0.0)
    count, real = [0], safetensors_file.write_file

    def write(path, tensors):
        count[0] += 1
        if count[0] == 3:
            path.write_bytes(b"\0" * 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, tensors)

    monkeypatch.setattr(safetensors_file, "write_file", write)
    printed = training_output(toy(code, steps=30), tmp_path / "run")
    assert printed.count("saving the state failed") == 1
    assert checkpoint.latest_state(tmp_path / "run", pytest.fail).name == "step-000030"
    assert not list((tmp_path / "run" / "state").glob(".step-*"))
    state = checkpoint.load_state(checkpoint.latest_state(tmp_path / "run"))
    assert torch.isfinite(state["weights"]["norm.weight"]).all()
    assert train(TrainConfig(sources=()), tmp_path / "run", display()[0], resume=True) == 0
