"""Plots of a run's loss, and of a comparison before and after a change."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from dunes.evaluate.comparison import Comparison
from dunes.evaluate.text_loss import Score

TRAINING, VALIDATION = "#8c5a1f", "#2f6f8f"


def loss_picture(records: Sequence[dict[str, Any]], score: Score, step: int, path: Path) -> None:
    """Plot training and validation loss in nats/token over steps, with bits/byte on the right, as a PNG.

    `records` are lines of metrics.jsonl. `score` is the validation score of the saved weights, from step `step`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [r for r in records if "loss" in r and not r["skipped"] and is_drawable(r["loss"])]
    x, losses = [r["step"] for r in steps], [r["loss"] for r in steps]
    axes.plot(x, losses, color="#c9b28f", linewidth=0.8)
    axes.plot(x, centered_mean(losses), color=TRAINING, label="training loss")
    bits = score.bits_per_byte / score.loss if score.loss else 0.0
    if checks := _checks(records, bits):
        axes.plot(*zip(*checks, strict=True), "o-", color=VALIDATION, markersize=3, label="validation loss")
    if is_drawable(score.loss):
        values = f"{score.loss:.3f} nats/token, {score.bits_per_byte:.3f} bits/byte"
        label = f"saved: step {step}, {values}"
        axes.plot([step], [score.loss], "*", color=VALIDATION, markersize=12, label=label)
    axes.set(xlabel="step", ylabel="loss, nats/token")
    if 0 < bits < inf:
        conversions: tuple[Any, Any] = (lambda loss: loss * bits, lambda value: value / bits)
        axes.secondary_yaxis("right", functions=conversions).set_ylabel("bits/byte")
    axes.grid(alpha=0.3)
    axes.spines[["top"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def comparison_picture(comparison: Comparison, path: Path) -> None:
    """Plot size, memory and speed of a model after a change, relative to before, as bars in a PNG."""
    from matplotlib.figure import Figure

    a, b = comparison.before, comparison.after
    ratios = {
        "size on disk": b.size / max(1, a.size),
        "peak memory": b.memory / max(1, a.memory),
        "prefill, tokens/s": b.prefill / a.prefill,
        "decoding, tokens/s": b.decode / a.decode,
    }
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([*ratios], [*ratios.values()], color=[TRAINING, TRAINING, VALIDATION, VALIDATION])
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios.values()], padding=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    loss = "" if a.loss is None or b.loss is None else f"; validation loss {a.loss:.4f} to {b.loss:.4f} nats/token"
    axes.set(xlabel=f"after, relative to before{loss}", xlim=(0, 1.15 * max(1.0, *ratios.values())))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _checks(records: Sequence[dict[str, Any]], bits: float) -> list[tuple[int, float]]:
    """Steps and validation losses in nats/token, converted from bits/byte if a record has only these."""
    points = []
    for record in records:
        loss = record.get("validation_loss")
        if loss is None and bits and record.get("bits_per_byte") is not None:
            loss = record["bits_per_byte"] / bits
        if loss is not None and is_drawable(loss):
            points.append((record["step"], loss))
    return points


def is_drawable(loss: float) -> bool:
    """True if a loss can be plotted: it is finite and below 1e30."""
    return abs(loss) < 1e30


def centered_mean(values: Sequence[float], reach: int = 10) -> list[float]:
    """Centered moving mean over up to `reach` values on either side."""
    sums = [0.0, *accumulate(values)]
    near = [min(i, len(values) - 1 - i, reach) for i in range(len(values))]
    return [(sums[i + n + 1] - sums[i - n]) / (2 * n + 1) for i, n in enumerate(near)]


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Bias-corrected exponential moving average with decay `keep`."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out
