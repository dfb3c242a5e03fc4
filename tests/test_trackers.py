"""What trackers show, read back by their own libraries, beside metrics.jsonl."""

import json
import sys

import numpy as np
import pytest

from conftest import display, raising, toy, training_output
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.saving import read_metrics
from dunes.runs.trackers import read_samples
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
NEW = TrainConfig(sources=())


def opened(folder):
    """TensorBoard's view of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def shown(folder, found=None):
    """What TensorBoard finds in a run: the scalars by tag and step, in order, and the samples by step."""
    found = opened(folder) if found is None else found.Reload()
    points = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    samples = found.Tensors("sample/text_summary") if "sample/text_summary" in found.Tags()["tensors"] else []
    return points, [(e.step, e.tensor_proto.string_val[0].decode()) for e in samples]


def metrics(folder, value=float):
    """The numbers in metrics.jsonl, by name and step."""
    points = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        named = line | {f"metrics/{name}": entry for name, entry in line.get("metrics", {}).items()}
        for name in named.keys() - {"step"}:
            if isinstance(named[name], int | float):
                points.setdefault(name, []).append((line["step"], value(named[name])))
    return points


def noted(folder):
    """What TensorBoard should find, as metrics.jsonl and samples.md say it."""
    points = metrics(folder, lambda value: float(np.float32(value)))
    samples = [(n, text) for n, text in read_samples(folder / "samples.md").items() if n <= points["loss"][-1][0]]
    return points, [(n, "\n".join("    " + line for line in text.split("\n"))) for n, text in samples]


def after_each_step(check, monkeypatch):
    """Calls `check` with the step, after the trackers were told of it."""
    real = run_module.Trackers.update

    def update(self):
        real(self)
        check(self)

    monkeypatch.setattr(run_module.Trackers, "update", update)


def test_events_say_what_the_metrics_say(code, tmp_path, monkeypatch):
    live, folder = [], tmp_path / "run"
    after_each_step(lambda trackers: live.append(shown(folder)[0] == noted(folder)[0]), monkeypatch)
    config = toy(code, family="mixtral", steps=55)
    assert train(config, folder, display()[0], track=["tensorboard"]) == 0
    assert all(live), "after each step"
    points, texts = shown(folder)
    assert (points, texts) == noted(folder)
    assert [step for step, _ in points["loss"]] == list(range(1, 56))
    assert [step for step, _ in points["metrics/balance"]] == list(range(1, 56))
    assert [step for step, _ in points["bits_per_byte"]] == [10, 25, 50, 55]
    assert [step for step, _ in texts] == [5, 50, 55]
    assert any(text.strip() for _, text in texts)
    (plan,) = opened(folder).Tensors("config/text_summary")
    assert b"\n    family: mixtral\n" in plan.tensor_proto.string_val[0]


@pytest.mark.parametrize("second", [(57, ()), (30, ("tensorboard",))])
def test_a_run_that_went_back_has_no_point_twice(second, code, tmp_path, monkeypatch):
    """Killed at step 53 with no state after step 20, and again, with or without a tracker."""
    folder, back = tmp_path / "run", []
    monkeypatch.setattr(saving, "SAVE_SECONDS", 0.0)
    real, cut = saving.Saver.start, saving.truncate_metrics
    monkeypatch.setattr(saving.Saver, "start", lambda s, r: r.trainer.number <= 20 and real(s, r))
    monkeypatch.setattr(saving, "truncate_metrics", lambda path, step: back.append(step) or cut(path, step))

    def killed(step, config, **how):
        with monkeypatch.context() as patch:
            kill = lambda trackers: len(noted(folder)[0]["loss"]) == step and raising(KeyError("killed"))()
            after_each_step(kill, patch)
            with pytest.raises(KeyError):
                train(config, folder, display()[0], **how)
        assert len(noted(folder)[0]["loss"]) == step

    killed(53, toy(code, steps=60), track=["tensorboard"])
    assert shown(folder) == noted(folder)
    watching = opened(folder)
    killed(second[0], NEW, resume=True, track=second[1])
    assert (shown(folder) == noted(folder)) is bool(second[1])
    assert train(NEW, folder, display()[0], resume=True, track=["tensorboard"]) == 0
    assert all(0 < step <= 20 for step in back)
    points, texts = shown(folder)
    assert (points, texts) == noted(folder)
    assert [step for step, _ in points["loss"]] == list(range(1, 61))
    assert shown(folder, watching)[0] == points, "also for a TensorBoard that was open all the time"
    assert sum(file.stat().st_size > 0 for file in (folder / "tensorboard").iterdir()) == 1


class Own:
    """A tracker of the user's, which fails after some steps."""

    def __init__(self, most=99):
        self.points, self.most = {}, most

    def log(self, values, step):
        if step > self.most:
            raise KeyError(step)
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))


def test_it_is_switched_on_later_and_is_no_part_of_the_plan(code, tmp_path):
    own, later, folder = Own(), Own(), tmp_path / "run"
    train(toy(code), folder, display()[0], track=[own])
    assert own.points == metrics(folder)
    assert not (folder / "tensorboard").exists()
    config = (folder / "state" / "plan.json").read_bytes()
    longer = {"resume": True, "override": ["steps"], "track": ["tensorboard", later]}
    assert train(toy(code, steps=15), folder, display()[0], **longer) == 0
    assert shown(folder) == noted(folder)
    assert later.points["loss"] == metrics(folder)["loss"][12:]
    plan = (folder / "state" / "plan.json").read_bytes()
    assert config.replace(b'"steps": 12', b'"steps": 15') == plan


def test_a_tracker_that_fails_does_not_end_the_run(code, tmp_path, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    real, left, own, folder = RecordWriter.write, [40], [Own(7), Own()], tmp_path / "run"

    def write(self, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("No space left on device")
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", write)
        printed = training_output(toy(code), folder, track=["tensorboard", *own])
    assert printed.count("warning: tensorboard failed: No space left on device; training continues") == 1
    assert printed.count("warning: Own (tracker 2) failed: 8; training continues without it") == 1
    assert [len(tracker.points["loss"]) for tracker in own] == [7, 12]
    assert 25 < sum(map(len, shown(folder)[0].values())) <= 40, "nothing after what is missing"
    assert train(NEW, folder, display()[0], resume=True, track=["tensorboard"]) == 0
    assert shown(folder) == noted(folder), "made whole by the next session"
    (tmp_path / "other" / "tensorboard").parent.mkdir()
    (tmp_path / "other" / "tensorboard").write_text("in the way")
    printed = training_output(toy(code), tmp_path / "other", track=["tensorboard"])
    assert printed.count("warning: tensorboard failed") == 1


@pytest.mark.parametrize(("track", "named"), [("tensorbord", "tensorbord"), (3, "3"), ("wandb", "wandb")])
def test_an_unknown_or_missing_tracker_is_refused_before_any_work(track, named, code, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=named):
        train(toy(code), tmp_path / "run", display()[0], track=[track])
    assert not (tmp_path / "run").exists()


def read_wandb(folder):
    """The history in an offline run of W&B: one block of a LevelDB log, with records of protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, place = file.read_bytes(), 7
    while place < len(data) < 32768:
        start, place = place + 7, place + 7 + int.from_bytes(data[place + 4 : place + 6], "little")
        history = Record.FromString(data[start:place]).history
        for item in history.item:
            yield item.key or "/".join(item.nested_key), history.step.num, json.loads(item.value_json)


def read_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("dunes")
    for row in SQLiteStorage.get_logs("dunes", name):
        yield from ((key, row["step"], value) for key, value in row.items() if key not in ("step", "timestamp"))


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dunes").experiment_id])
    for name in run.data.metrics:
        yield from (
            (name, metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
        )


@pytest.mark.parametrize("read", [read_wandb, read_trackio, read_mlflow])
def test_a_resumed_run_is_one_run_in_the_library_with_the_numbers_of_metrics(read, code, tmp_path):
    name, folder = read.__name__.removeprefix("read_"), tmp_path / "run"
    pytest.importorskip(name)
    for steps in (12, 15):
        options = {"track": [name], "override": ["steps"], "resume": steps == 15}
        assert "continues without it" not in training_output(toy(code, steps=steps), folder, **options)
        points = {}
        for key, step, value in read(folder):
            if not key.startswith("_"):
                points.setdefault(key, []).append((step, value))
        assert {key: sorted(pairs) for key, pairs in points.items()} == metrics(folder)
