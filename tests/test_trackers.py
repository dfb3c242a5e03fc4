"""What trackers show, read back by their own libraries, beside metrics.jsonl."""

import json

import numpy as np
import pytest

from conftest import display, raising, toy, training_output
from dunes import checkpoint
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.saving import read_metrics
from dunes.runs.trackers import read_samples
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def opened(folder):
    """TensorBoard's view of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def shown(folder, found=None):
    """What TensorBoard finds in a run: the scalars by tag and step, in order, and the samples by step."""
    found = opened(folder) if found is None else found.Reload()
    points = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    samples = found.Tensors("sample/text_summary") if "sample/text_summary" in found.Tags()["tensors"] else []
    return points, [(e.step, e.tensor_proto.string_val[0].decode()) for e in samples]


def by_name(points):
    """Pairs of step and value, by name."""
    found = {}
    for name, step, value in points:
        found.setdefault(name, []).append((step, value))
    return found


def metrics(folder, value=float):
    """The numbers in metrics.jsonl, by name and step."""
    lines = read_metrics(folder / "metrics.jsonl")
    lines = [r | {f"metrics/{name}": v for name, v in r.get("metrics", {}).items()} for r in lines]
    numbers = ((name, r["step"], v) for r in lines for name, v in r.items() if isinstance(v, int | float))
    return by_name((name, step, value(v)) for name, step, v in numbers if name != "step")


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
    assert {"metrics/balance", "bits_per_byte"} <= points.keys()
    assert [step for step, _ in texts] == [5, 50, 55]
    assert any(text.strip() for _, text in texts)
    (plan,) = opened(folder).Tensors("config/text_summary")
    assert b"\n    family: mixtral\n" in plan.tensor_proto.string_val[0]


@pytest.mark.parametrize("second", [(57, ()), (30, ("tensorboard",))])
def test_a_run_that_went_back_has_no_point_twice(second, code, tmp_path, monkeypatch):
    """Killed at step 53 with no state after step 20, and again, with or without a tracker."""
    folder, real = tmp_path / "run", saving.Saver.start
    monkeypatch.setattr(saving, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(saving.Saver, "start", lambda s, r: r.trainer.number <= 20 and real(s, r))

    def killed(step, config, **how):
        with monkeypatch.context() as patch:
            errors = [KeyError("killed")]
            kill = lambda trackers: len(metrics(folder)["loss"]) == step and errors and raising(errors.pop())()
            after_each_step(kill, patch)
            with pytest.raises(KeyError):
                train(config, folder, display()[0], **how)
        assert len(metrics(folder)["loss"]) == step
        assert "step-000001" <= checkpoint.latest_state(folder).name <= "step-000020"

    killed(53, toy(code, steps=60), track=["tensorboard"])
    assert shown(folder) == noted(folder)
    watching = opened(folder)
    killed(second[0], TrainConfig(sources=()), resume=True, track=second[1])
    assert (shown(folder) == noted(folder)) is bool(second[1])
    assert train(TrainConfig(sources=()), folder, display()[0], resume=True, track=["tensorboard"]) == 0
    points, texts = shown(folder)
    assert (points, texts) == noted(folder)
    assert [step for step, _ in points["loss"]] == list(range(1, 61))
    assert shown(folder, watching)[0] == points, "also for a TensorBoard that was open all the time"
    assert sum(file.stat().st_size > 0 for file in (folder / "tensorboard").iterdir()) == 1


class Own:
    """A tracker of the user's, which fails after some steps."""

    def __init__(self, most=99):
        self.logged, self.most = [], most

    def log(self, values, step):
        if step > self.most:
            raise KeyError(step)
        self.logged += [(name, step, value) for name, value in values.items()]


def test_one_that_fails_does_not_end_the_run_and_one_is_switched_on_later(code, tmp_path):
    own, later, folder = Own(), Own(), tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("in the way")
    printed = training_output(toy(code), folder, track=["tensorboard", own, Own(7)])
    assert printed.count("warning: tensorboard failed") == 1
    assert printed.count("warning: Own (tracker 3) failed: 8; training continues without it") == 1
    assert by_name(own.logged) == metrics(folder)
    (folder / "tensorboard").unlink()
    config = (folder / "state" / "plan.json").read_bytes()
    longer = {"resume": True, "override": ["steps"], "track": ["tensorboard", later]}
    assert train(toy(code, steps=15), folder, display()[0], **longer) == 0
    assert shown(folder) == noted(folder)
    assert by_name(later.logged)["loss"] == metrics(folder)["loss"][12:]
    assert config.replace(b'"steps": 12', b'"steps": 15') == (folder / "state" / "plan.json").read_bytes()


def read_wandb(folder):
    """The history in an offline run of W&B: one block of a LevelDB log, with records of protobuf."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the last lines after `finish`
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

    client = MlflowClient(f"sqlite:///{str(folder).replace('%', '%25')}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dunes").experiment_id])
    for name in run.data.metrics:
        yield from (
            (name, metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
        )


@pytest.mark.parametrize("read", [read_wandb, read_trackio, read_mlflow])
def test_a_resumed_run_is_one_run_in_the_library_with_the_numbers_of_metrics(read, code, tmp_path):
    name, folder = read.__name__.removeprefix("read_"), tmp_path / "a%20run"
    pytest.importorskip(name)
    for steps in (12, 15):
        options = {"track": [name], "override": ["steps"], "resume": steps == 15}
        assert "continues without it" not in training_output(toy(code, steps=steps), folder, **options)
        found = by_name(point for point in read(folder) if not point[0].startswith("_"))
        assert {name: sorted(points) for name, points in found.items()} == metrics(folder)
