"""Plots of a run's losses, of its experts' loads, of a model before and after a change, and of estimates."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from dunes.evaluate.comparison import PHASES, Comparison
from dunes.evaluate.preferences import PreferenceScore
from dunes.evaluate.text_loss import Score
from dunes.train import Step

TRAINING, VALIDATION = "#8c5a1f", "#2f6f8f"
LOAD = "expert_load"
LAST = 0.1
"""Fraction of the steps, at the end of the run, over which the plot of loads averages."""


def loss_picture(records: Sequence[dict[str, Any]], score: Score, step: int, path: Path) -> None:
    """Plot training and validation loss over steps as a PNG, in nats/token (left axis) and bits/byte (right axis).

    For preferences, the left axis is the loss per pair, and the right axis is the margin of rewards.

    `records` are the records of metrics.jsonl. `score` and `step` are the validation score and the training step
    of the saved weights.
    """
    with _figure(path, 8, 4.5) as figure:
        axes = figure.add_subplot()
        steps = [r for r in records if "loss" in r and not r["skipped"] and is_drawable(r["loss"])]
        x, losses = [r["step"] for r in steps], [r["loss"] for r in steps]
        axes.plot(x, losses, color="#c9b28f", linewidth=0.8)
        axes.plot(x, centered_mean(losses), color=TRAINING, label="training loss")
        pairs = isinstance(score, PreferenceScore)
        bits = score.bits_per_byte / score.loss if score.loss and not pairs else 0.0
        checks = [(r["step"], r["validation_loss"]) for r in records if is_drawable(r.get("validation_loss", inf))]
        if checks:
            axes.plot(*zip(*checks, strict=True), "o-", color=VALIDATION, markersize=3, label="validation loss")
        if is_drawable(score.loss):
            label = f"saved: step {step}, {score.loss:.3f} nats/token, {score.bits_per_byte:.3f} bits/byte"
            label = f"saved: step {step}, {score.text}" if pairs else label
            axes.plot([step], [score.loss], "*", color=VALIDATION, markersize=12, label=label)
        axes.set(xlabel="step", ylabel="loss per pair" if pairs else "loss, nats/token")
        if pairs:
            margins = axes.twinx()
            values = centered_mean([r["metrics"]["margin"] for r in steps])
            margins.plot(x, values, color="black", linewidth=0.8, linestyle=":", label="margin")
            margins.set(ylabel="margin of rewards")
        if 0 < bits < inf:
            conversions = (lambda loss: loss * bits, lambda value: value / bits)
            axes.secondary_yaxis("right", functions=conversions).set_ylabel("bits/byte")
        axes.grid(alpha=0.3)
        axes.spines[["top"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)


def comparison_picture(comparison: Comparison, path: Path) -> None:
    """Draw a bar chart (PNG) of a model's size, memory and speed after a change, relative to the original
    model."""
    a, b = comparison.before, comparison.after
    ratios = {"size on disk": b.size / max(1, a.size), "peak memory": b.memory / max(1, a.memory)}
    labels = [f"{ratio:.2f}" for ratio in ratios.values()] + [str(speed) for speed in comparison.speeds.values()]
    ratios |= {f"{PHASES[phase]}, tokens/s": speed.ratio for phase, speed in comparison.speeds.items()}
    loss = "" if a.loss is None or b.loss is None else f"; validation loss {a.loss:.4f} to {b.loss:.4f} nats/token"
    with _figure(path, 8, 3.5) as figure:
        axes = figure.add_subplot()
        colors = [TRAINING, TRAINING, VALIDATION, VALIDATION][: len(ratios)]
        bars = axes.barh([*ratios], [*ratios.values()], color=colors)
        axes.bar_label(bars, labels, padding=3)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set(xlabel=f"after, relative to before{loss}", xlim=(0, 1.5 * max(1.0, *ratios.values())))
        axes.spines[["top", "right"]].set_visible(False)


def plan_picture(bounds: Mapping[float, tuple[float, float, float]], minutes: float, path: Path) -> None:
    """Plot estimated bits/byte over minutes of training (logarithmic) as a PNG, with a star at `minutes`.

    `bounds` has the lower bound, the estimate and the upper bound, by minutes.
    """
    low, bits, high = zip(*bounds.values(), strict=True)
    with _figure(path, 8, 4.5) as figure:
        axes = figure.add_subplot()
        axes.fill_between([*bounds], low, high, color=VALIDATION, alpha=0.2, label="95 % of texts")
        axes.plot([*bounds], bits, "o-", color=VALIDATION, markersize=3, label="estimated validation loss")
        axes.plot(minutes, bounds[minutes][1], "*", color=TRAINING, markersize=12, label=f"{minutes:g} minutes")
        axes.set(xlabel="minutes of training", ylabel="bits/byte", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yields an empty figure; at the end of the `with` block, writes it as a PNG."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(path, dpi=130)


def is_drawable(loss: float) -> bool:
    """True if a loss can be plotted: it is finite and below 1e30."""
    return abs(loss) < 1e30


def centered_mean(values: Sequence[float], reach: int = 10) -> list[float]:
    """Centered moving mean of the values, over up to `reach` values on each side."""
    sums = [0.0, *accumulate(values)]
    near = [min(i, len(values) - 1 - i, reach) for i in range(len(values))]
    return [(sums[i + n + 1] - sums[i - n]) / (2 * n + 1) for i, n in enumerate(near)]


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Bias-corrected exponential moving average of the values, with decay `keep`."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def max_violation(load: Sequence[float]) -> float:
    """MaxVio of a layer: (largest load - mean load) / mean load. https://arxiv.org/abs/2408.15664

    Negative entries are ignored; they pad layers with fewer experts.
    """
    loads = [value for value in load if not value < 0]
    return max(loads) * len(loads) / sum(loads) - 1 if sum(loads) else 0.0


def with_violation(step: Step) -> Step:
    """A copy of the step with the mean MaxVio of all layers as a metric; the step itself if it has no loads of
    experts."""
    layers = step.metrics.get(LOAD)
    if not layers:
        return step
    rounded = [[round(share, 5) for share in layer] for layer in layers]
    mean = sum(map(max_violation, layers)) / len(layers)
    return replace(step, metrics={**step.metrics, "MaxVio": mean, LOAD: rounded})


def load_picture(records: Sequence[dict[str, Any]], path: Path) -> bool:
    """Plot the loads of each layer's experts in the last steps, and each layer's MaxVio over steps, as a PNG.

    `records` are the records of metrics.jsonl. If no record has loads, returns False and writes no file.
    """
    steps = [r for r in records if (r.get("metrics") or {}).get(LOAD)]
    if not steps:
        return False
    loads = [r["metrics"][LOAD] for r in steps]
    with _figure(path, 10, 4.5) as figure:
        _draw_loads(figure, loads)
        _draw_violations(figure, [r["step"] for r in steps], loads)
    return True


def _draw_loads(figure: Any, loads: Sequence[Sequence[Sequence[float]]]) -> None:
    """Draw a heat map of loads (layers by experts), divided by the layer's mean load; 1 is balanced."""
    last = loads[-max(1, round(LAST * len(loads))) :]
    sums = [[sum(values) for values in zip(*layers, strict=True)] for layers in zip(*last, strict=True)]
    means = [sum(v for v in layer if v >= 0) / sum(v >= 0 for v in layer) for layer in sums]
    nan = float("nan")
    pairs = zip(sums, means, strict=True)
    relative = [[v / mean if v >= 0 and mean else nan for v in layer] for layer, mean in pairs]
    axes = figure.add_subplot(1, 2, 1)
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    figure.colorbar(image, ax=axes, label=f"load over the layer's mean, last {LAST:.0%} of steps")
    axes.set(xlabel="expert", ylabel="layer", xticks=range(len(relative[0])), yticks=range(len(relative)))


def _draw_violations(figure: Any, steps: Sequence[int], loads: Sequence[Sequence[Sequence[float]]]) -> None:
    axes = figure.add_subplot(1, 2, 2)
    for layer, series in enumerate(zip(*loads, strict=True)):
        axes.plot(steps, list(map(max_violation, series)), linewidth=0.8, label=f"layer {layer}")
    axes.set(xlabel="step", ylabel="MaxVio", ylim=(0, None))
    axes.grid(alpha=0.3)
    if len(loads[0]) <= 12:
        axes.legend(frameon=False, fontsize="small")
