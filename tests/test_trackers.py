"""Event files for TensorBoard, read back by TensorBoard, beside metrics.jsonl."""

import errno
import warnings

import numpy as np
import pytest

from conftest import display, toy, training_output
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.saving import read_metrics
from dunes.runs.tensorboard import read_samples
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
TAGS = {
    "loss": lambda r: r["loss"],
    "bits_per_byte": lambda r: r.get("bits_per_byte"),
    "lr_scale": lambda r: r["lr_scale"],
    "grad_norm": lambda r: r["grad_norm"],
    "tokens_per_second": lambda r: r["count"] / r["seconds"],
    **{
        f"metrics/{name}": lambda r, name=name: r["metrics"][name] if "metrics" in r else None
        for name in ("balance", "MaxVio")
    },
}


def opened(folder):
    """TensorBoard's view of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def shown(folder, found=None):
    """What TensorBoard finds in a run: the scalars by tag and step, in order, and the samples by step."""
    found = opened(folder) if found is None else found.Reload()
    tags = found.Tags()
    points = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for t in tags["tensors"] for e in found.Tensors(t)]
    return points, texts


def noted(folder):
    """The same, as metrics.jsonl and samples.md say it."""
    lines = [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
    points = {
        tag: [(r["step"], float(np.float32(value(r)))) for r in lines if value(r) is not None]
        for tag, value in TAGS.items()
        if any(value(r) is not None for r in lines)
    }
    samples = [(n, text) for n, text in read_samples(folder / "samples.md").items() if n <= lines[-1]["step"]]
    return points, [(n, "\n".join("    " + line for line in text.split("\n"))) for n, text in samples]


def stopping_at(step, monkeypatch, error):
    """Something that ends the run in this step, after it was noted."""
    real = run_module.TensorBoard.step

    def mirrored(self, done, bits):
        real(self, done, bits)
        if done.number == step:
            raise error

    monkeypatch.setattr(run_module.TensorBoard, "step", mirrored)


def test_events_say_what_the_metrics_say(code, tmp_path, monkeypatch):
    real, live = run_module.TensorBoard.step, []

    def step(self, done, bits):
        real(self, done, bits)
        live.append(shown(self.run)[0] == noted(self.run)[0])

    monkeypatch.setattr(run_module.TensorBoard, "step", step)
    config = toy(code, family="mixtral", steps=55)
    assert train(config, tmp_path / "run", display()[0], tensorboard=True) == 0
    assert all(live), "after each step"
    points, texts = shown(tmp_path / "run")
    assert (points, texts) == noted(tmp_path / "run")
    assert [step for step, _ in points["loss"]] == list(range(1, 56))
    assert [step for step, _ in points["metrics/balance"]] == list(range(1, 56))
    assert [step for step, _ in points["bits_per_byte"]] == [10, 25, 50, 55]
    assert [step for step, _ in texts] == [5, 50, 55]
    assert any(text.strip() for _, text in texts)


@pytest.mark.parametrize("second", [(57, False), (30, True)])
def test_a_run_that_went_back_has_no_point_twice(second, code, tmp_path, monkeypatch):
    """Killed at step 53 with no state after step 20, and again, with or without a mirror."""
    folder, back = tmp_path / "run", []
    monkeypatch.setattr(saving, "SAVE_SECONDS", 0.0)
    real, cut = saving.Saver.start, saving.truncate_metrics
    monkeypatch.setattr(saving.Saver, "start", lambda s, r: r.trainer.number <= 20 and real(s, r))
    monkeypatch.setattr(saving, "truncate_metrics", lambda path, step: back.append(step) or cut(path, step))

    def killed(step, config, **how):
        with monkeypatch.context() as patch:
            stopping_at(step, patch, KeyError("killed"))
            with pytest.raises(KeyError):
                train(config, folder, display()[0], **how)
        assert len(noted(folder)[0]["loss"]) == step

    killed(53, toy(code, steps=60), tensorboard=True)
    assert shown(folder) == noted(folder)
    watching = opened(folder)
    killed(second[0], TrainConfig(sources=()), resume=True, tensorboard=second[1])
    assert (shown(folder) == noted(folder)) is second[1]
    assert train(TrainConfig(sources=()), folder, display()[0], resume=True, tensorboard=True) == 0
    assert all(0 < step <= 20 for step in back)
    points, texts = shown(folder)
    assert (points, texts) == noted(folder)
    assert [step for step, _ in points["loss"]] == list(range(1, 61))
    assert shown(folder, watching)[0] == points, "also for a TensorBoard that was open all the time"
    assert sum(file.stat().st_size > 0 for file in (folder / "tensorboard").iterdir()) == 1


def test_it_is_switched_on_later_and_is_no_part_of_the_plan(code, tmp_path):
    train(toy(code), tmp_path / "run", display()[0])
    assert not (tmp_path / "run" / "tensorboard").exists()
    config = (tmp_path / "run" / "state" / "plan.json").read_bytes()
    longer = {"resume": True, "override": ["steps"], "tensorboard": True}
    assert train(toy(code, steps=15), tmp_path / "run", display()[0], **longer) == 0
    assert shown(tmp_path / "run") == noted(tmp_path / "run")
    plan = (tmp_path / "run" / "state" / "plan.json").read_bytes()
    assert config.replace(b'"steps": 12', b'"steps": 15') == plan


def test_a_full_disk_ends_the_mirroring_and_not_the_run(code, tmp_path, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    real, left = RecordWriter.write, [40]

    def write(self, data):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", write)
        printed = training_output(toy(code), tmp_path / "run", tensorboard=True)
    said = "warning: writing to TensorBoard failed: [Errno 28] No space left on device; training continues"
    assert printed.count(said) == 1
    assert 30 < sum(map(len, shown(tmp_path / "run")[0].values())) <= 40, "nothing after what is missing"
    assert len(noted(tmp_path / "run")[0]["loss"]) == 12
    assert train(TrainConfig(sources=()), tmp_path / "run", display()[0], resume=True, tensorboard=True) == 0
    assert shown(tmp_path / "run") == noted(tmp_path / "run"), "made whole by the next session"
    (tmp_path / "other" / "tensorboard").parent.mkdir()
    (tmp_path / "other" / "tensorboard").write_text("in the way")
    printed = training_output(toy(code), tmp_path / "other", tensorboard=True)
    assert printed.count("warning: writing to TensorBoard failed") == 1
