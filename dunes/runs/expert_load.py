"""The load of experts while a mixture trains: its maximal violation of balance, and plots."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dunes.train import Step

LOAD = "expert_load"
LAST = 0.1
"""Fraction of the steps, at the end, over which the plot averages loads."""


def max_violation(load: Sequence[float]) -> float:
    """MaxVio of a layer: (largest load - mean load) / mean load. https://arxiv.org/abs/2408.15664

    Negative entries are no experts and are ignored.
    """
    loads = [value for value in load if not value < 0]
    return max(loads) * len(loads) / sum(loads) - 1 if sum(loads) else 0.0


def with_violation(step: Step) -> Step:
    """The step with the metric `MaxVio`, averaged over layers, if it has loads of experts."""
    layers = step.metrics.get(LOAD)
    if not layers:
        return step
    rounded = [[round(share, 5) for share in layer] for layer in layers]
    mean = sum(map(max_violation, layers)) / len(layers)
    return replace(step, metrics={**step.metrics, "MaxVio": mean, LOAD: rounded})


def load_picture(records: Sequence[dict[str, Any]], path: Path) -> bool:
    """Plot the loads of each layer's experts at the end, and the MaxVio of each layer over steps, as a PNG.

    `records` are lines of metrics.jsonl. Returns False, and draws nothing, if no step has loads.
    """
    steps = [r for r in records if (r.get("metrics") or {}).get(LOAD)]
    if not steps:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    _draw_loads(figure, [r["metrics"][LOAD] for r in steps])
    _draw_violations(figure, [r["step"] for r in steps], [r["metrics"][LOAD] for r in steps])
    figure.savefig(path, dpi=130)
    return True


def _draw_loads(figure: Any, loads: Sequence[Sequence[Sequence[float]]]) -> None:
    """Heat map of layers by experts, relative to the layer's mean (1: balanced)."""
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
