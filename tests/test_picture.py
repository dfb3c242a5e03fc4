"""loss.png: both curves in nats/token, bits/byte on the right, and the figures that the terminal says."""

import math
import re

import pytest
from matplotlib.figure import Figure

from conftest import display, raising, toy, training_output
from dunes.evaluate.text_loss import Score
from dunes.runs.picture import centered_mean, loss_picture
from dunes.runs.saving import read_metrics
from dunes.runs.tensorboard import read_samples
from dunes.runs.train import train
from test_runs import best_at_first

pytestmark = pytest.mark.usefixtures("draws")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or real(self, *a, **k))
    return figures


def step(number, loss, **more):
    return {"step": number, "loss": loss, "skipped": False} | more


def lines(figure):
    """The points of each labelled line."""
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}


def test_both_curves_are_in_one_unit_and_bits_stand_on_the_right(drawn, tmp_path):
    score = Score(loss_sum=6.0, tokens=3, size=4)  # 2 nats/token, of 4/3 bytes each
    metrics = [step(i, 10.0 / i) for i in range(1, 31)]
    metrics[9] |= {"validation_loss": 2.5, "bits_per_byte": 2.7}
    metrics[19] |= {"validation_loss": 3.0}
    loss_picture([*metrics, {"step": 30, "changed": {}}], score, 20, tmp_path / "loss.png")
    found = lines(drawn[0])
    assert [x for x, _ in found["training loss"]] == list(range(1, 31))
    assert found["training loss"][0] == [1, 10.0]
    assert found["training loss"][-1] == [30, pytest.approx(10.0 / 30)], "it does not lag behind"
    assert found["validation loss"] == [[10, 2.5], [20, 3.0]]
    assert found["saved: step 20, 2.000 nats/token, 2.164 bits/byte"] == [[20, 2.0]]
    axes = drawn[0].axes[0]
    (right,) = axes.child_axes
    assert "nats/token" in axes.get_ylabel()
    assert "bits/byte" in right.get_ylabel()
    drawn[0].canvas.draw()
    left_low, left_high = axes.get_ylim()
    bits_a_nat = score.bits_per_byte / score.loss
    assert right.get_ylim() == pytest.approx((left_low * bits_a_nat, left_high * bits_a_nat))


ODD = {
    "nothing": [],
    "one step": [step(1, 2.0)],
    "skipped": [step(1, math.nan) | {"skipped": True}, step(2, 2.0)],
    "not finite": [step(1, math.inf), step(2, math.nan), step(3, 1.0, validation_loss=math.inf)],
    "huge": [step(1, 1e308), step(2, -1e308)],
    "notes": [{"step": 0, "changed": {}}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "score", [Score(6.0, 3, 4), Score(math.nan, 3, 4), Score(math.inf, 3, 4), Score(0.0, 3, 0)]
)
@pytest.mark.parametrize("metrics", ODD)
def test_odd_metrics_make_a_picture(metrics, score, tmp_path):
    loss_picture(ODD[metrics], score, 1, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_means_are_of_what_lies_on_both_sides():
    assert centered_mean([]) == []
    assert centered_mean([3.0]) == [3.0]
    assert centered_mean([1.0, 2.0, 9.0], 10) == [1.0, 4.0, 9.0]
    assert centered_mean([float(i) for i in range(50)]) == pytest.approx(list(range(50))), "no lag on a slope"
    assert centered_mean([0.0] * 10 + [21.0] + [0.0] * 10)[10] == 1.0


@pytest.mark.slow
def test_the_last_figure_and_the_last_sample_are_of_the_weights_that_are_kept(code, tmp_path, monkeypatch, drawn):
    best = best_at_first(monkeypatch)

    def sample(loaded, *rest, **named):
        kept = best.get("weights", {})
        same = bool(kept) and all(bool((v == kept[k]).all()) for k, v in loaded.model.state_dict().items())
        return f"the best weights: {same}"

    monkeypatch.setattr("dunes.runs.train.sample_text", sample)
    printed = training_output(toy(code, steps=60), tmp_path / "run")
    found = read_samples(tmp_path / "run" / "samples.md")
    assert list(found) == [5, 50, 60]
    assert (tmp_path / "run" / "samples.md").read_text().count("## After") == 3
    assert found[60] == "the best weights: True"
    assert found[50] == "the best weights: False"
    assert "--- sample after 60 steps, with the best weights (step 10) ---" in printed
    loss, bits = re.search(r"validation loss (\S+) nats/token, perplexity \S+, (\S+) bits/byte", printed).groups()
    assert f"saved: step 10, {loss} nats/token, {bits} bits/byte" in lines(drawn[-1])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    checks = [[r["step"], r["validation_loss"]] for r in records if r.get("validation_loss")]
    assert lines(drawn[-1])["validation loss"] == checks
    assert [n for n, _ in checks] == [10, 25, 50, 60]
    before = (tmp_path / "run" / "samples.md").read_bytes()
    assert train(toy(code, steps=60), tmp_path / "run", display()[0], resume=True) == 0
    assert (tmp_path / "run" / "samples.md").read_bytes() == before, "nothing was trained"


def test_a_picture_or_sample_that_cannot_be_written_does_not_cost_the_last_words(code, tmp_path, monkeypatch):
    full = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr(Figure, "savefig", full)
    monkeypatch.setattr("dunes.runs.run.append_text", full)
    printed = training_output(toy(code), tmp_path / "run")
    assert "warning: plotting failed: [Errno 28] No space left on device" in printed
    assert "warning: sampling failed: [Errno 28]" in printed
    assert "done after 12 steps" in printed
    assert "dunes generate" in printed.splitlines()[-1]
