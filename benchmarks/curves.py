"""Curves of several runs in one plot, drawn with plotnine."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from dunes.bench.plot import COLOURS, base, table_of
from dunes.extra import extra
from dunes.runs.picture import is_drawable


def losses(runs: Mapping[str, Sequence[Mapping[str, Any]]], over: str = "minutes") -> Any:
    """Plot the validation bits/byte of several runs over `minutes`, `tokens` or `steps`.

    `runs` maps names to the records of metrics.jsonl. Raises ValueError if no run has a validation loss.
    """
    points = [point | {"run": name} for name, lines in runs.items() for point in run_points(lines)]
    measured = [point for point in points if point["y"] is not None and is_drawable(point["y"])]
    if not measured:
        raise ValueError(f"{', '.join(runs)}: no run has a validation loss yet; train for at least 10 steps")
    return line_plot(
        [point | {"x": point[over]} for point in measured], "run", "validation bits/byte", over, "bits/byte"
    )


def line_plot(records: Sequence[Mapping[str, Any]], by: str, title: str, x: str, y: str) -> Any:
    """Line plot of the records' "x" and "y", with one line for each value of column `by`."""
    p = extra("plotnine", "plot")
    return (
        base(table_of(records), x="x", y="y", color=by)
        + p.geom_line(size=0.9)
        + p.geom_point(size=1.6)
        + p.scale_color_manual(COLOURS * 4)
        + p.labs(title=title, x=x, y=y)
        + p.guides(color=p.guide_legend(ncol=1))
    )


def run_points(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One point per training step: the steps, tokens and minutes so far, and the validation bits/byte `y` (None if
    not measured)."""
    steps = [line for line in lines if "loss" in line]
    tokens, seconds = (accumulate([line[key] for line in steps]) for key in ("count", "seconds"))
    return [
        {"steps": line["step"], "tokens": count, "minutes": time / 60, "y": line.get("bits_per_byte")}
        for line, count, time in zip(steps, tokens, seconds, strict=True)
    ]
