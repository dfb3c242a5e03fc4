"""Files of one JSON object per line: damage by a full disk, a kill or an edit affects only the damaged line."""

import errno
import json
import os

import pytest
import torch

from conftest import toy, training_output
from dunes import checkpoint
from dunes.checkpoint.weights import safetensors_file
from dunes.files.json_file import append_record, append_text, parse_line, read_lines, read_records
from dunes.runs import saving
from dunes.runs.saving import read_metrics, truncate_metrics
from teacher import tasks
from teacher.endpoint import Budget, Ledger

METRIC = {"step": 1, "loss": 2.0, "count": 9, "grad_norm": 1.0, "lr_scale": 1.0, "skipped": False, "seconds": 0.5}
DAMAGED = {
    "cut short": b'{"step": 3, "lo',
    "not UTF-8": b'{"step": 3, "word": "caf\xe9"}',
    "a number": b"12",
    "zeros": b"\0" * 40,
    "deep": b"[" * 100_000,
    "a long number": b"9" * 5000,
    "no step": b'{"loss": 1.0}',
    "no seconds": b'{"step": 3, "loss": 1.0}',
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


@pytest.mark.parametrize("room", [0, 7, 60])
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
    real = saving.append_metrics

    def note(folder, record):
        if record["step"] == step:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record)[:40])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, record)

    monkeypatch.setattr(saving, "append_metrics", note)


def test_a_run_goes_on_after_a_disk_was_full_for_a_moment(code, tmp_path, monkeypatch):
    """The third save finds no room for its tensors, half-way, and step 4 none for its metrics; all others do."""
    folder, count, real = tmp_path / "run", [0], safetensors_file.write_file

    def write(path, tensors):
        count[0] += 1
        if count[0] == 3:
            path.write_bytes(b"\0" * 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, tensors)

    monkeypatch.setattr(saving, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(safetensors_file, "write_file", write)
    crash_at(4, monkeypatch)
    printed = training_output(toy(code, steps=8), folder)
    assert printed.count("saving the state failed") == 1
    assert printed.count("warning: writing metrics.jsonl failed") == 1
    assert "metrics.jsonl, line 4: " in printed, "said when the picture is drawn"
    state = checkpoint.latest_state(folder, pytest.fail)
    assert state.name == "step-000008"
    assert not list((folder / "state").glob(".step-*"))
    assert torch.isfinite(checkpoint.load_state(state)["weights"]["norm.weight"]).all()
    training_output(toy(code, steps=9), folder, resume=True, override=["steps"])
    steps = [r["step"] for r in read_metrics(folder / "metrics.jsonl", list) if "loss" in r]
    assert steps == [1, 2, 3, 5, 6, 7, 8, 9]


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
