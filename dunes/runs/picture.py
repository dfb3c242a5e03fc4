"""Pictures of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def loss_picture(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss (nats a token) and validation bits a byte over the steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [r for r in records if "loss" in r and not r["skipped"]]
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="#c9b28f", linewidth=0.8)
    axes.plot(
        [r["step"] for r in steps],
        smoothed([r["loss"] for r in steps]),
        color="#8c5a1f",
        label="training loss",
    )
    axes.set(xlabel="step", ylabel="training loss, nats a token")
    checks = [r for r in records if "bits_per_byte" in r]
    if checks:
        other = axes.twinx()
        x, y = [r["step"] for r in checks], [r["bits_per_byte"] for r in checks]
        other.plot(x, y, "o-", color="#2f6f8f", markersize=3, label="validation")
        other.set_ylabel("validation, bits a byte", color="#2f6f8f")
        best = min(checks, key=lambda r: float(r["bits_per_byte"]))
        text = f"{best['bits_per_byte']:.3f}"
        other.annotate(text, (best["step"], best["bits_per_byte"]), (0, 8), textcoords="offset points", ha="right")
    axes.grid(alpha=0.3)
    axes.spines[["top"]].set_visible(False)
    figure.legend(loc="upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)


def smoothed(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """A running mean without the bias towards zero at its beginning."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out
