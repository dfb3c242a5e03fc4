"""Plots of measurements, drawn with plotnine. The plotting functions return a plot; `save_plot` writes it.

The colours are Okabe and Ito's palette for colour-blind readers (https://jfly.uni-koeln.de/color/).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

from dunes.bench.rows import CASE, Row, differing_columns, group_rows, summaries
from dunes.extra import extra
from dunes.units import format_bytes, format_count, format_seconds

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999", "#F0E442")
AXES = ("parameters", "context", "batch", "threads")
NAMES = {"seconds": "time per run", "peak_bytes": "tensors at peak memory"}


def table_of(records: Sequence[Mapping[str, Any]]) -> Any:
    """A table of records with equal keys."""
    return extra("polars", "plot").DataFrame(list(records), strict=False, infer_schema_length=None)


def base(frame: Any, *, high: float = 4.2, **aesthetics: str) -> Any:
    """An empty plot of a table, `high` inches high, with this package's look."""
    p = extra("plotnine", "plot")
    thin = p.element_line(color="#e6e6e6", size=0.5)
    look = p.theme_minimal(base_size=11) + p.theme(
        figure_size=(7.0, high),
        plot_title=p.element_text(size=13, weight="bold", ha="left"),
        plot_background=p.element_rect(fill="white", color="white"),
        panel_grid_major=thin,
        panel_grid_minor=p.element_blank(),
        legend_title=p.element_blank(),
        legend_position="bottom",
    )
    return p.ggplot(frame, p.aes(**aesthetics)) + look


def save_plot(plot: Any, path: Path) -> None:
    """Write the plot to a file, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.save(path, dpi=150, verbose=False)


def exponent(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(k, a) of the power law `y = a x^k`, fitted by linear regression of the logarithms."""
    slope, intercept = linear_regression([math.log(v) for v in x], [math.log(v) for v in y])
    return slope, math.exp(intercept)


def scaling_lines(results: Sequence[Row], axis: str) -> dict[str, list[Row]]:
    """Groups of two or more summaries that differ only in `axis`; each group is a line of a plot.

    The keys name the settings in which the groups differ.
    """
    along = {"parameters": ("parameters", "subject")}.get(axis, (axis,))  # another size is also another subject
    columns = [n for n in CASE if n not in along]
    groups = group_rows(results, columns)
    varying = [i for i, _ in enumerate(columns) if len({k[i] for k in groups}) > 1]
    lines = {k: m for k, m in groups.items() if len({f[axis] for f in m}) > 1}
    return {", ".join(f"{columns[i]} {k[i]}" for i in varying): m for k, m in lines.items()}


def scaling(results: Sequence[Row], axis: str, of: str) -> Any:
    """Plot column `of` over column `axis`, both logarithmic; the legend shows each line's fitted exponent.

    `results` are summaries. Raises ValueError if no two of the summaries differ only in the axis.
    """
    p, records = extra("plotnine", "plot"), list[dict[str, Any]]()
    for name, members in scaling_lines(results, axis).items():
        xs, ys = [float(m[axis]) for m in members], [float(m[of]) for m in members]
        k, a = exponent(xs, ys)
        label = f"{name}: exponent {k:.2f}".removeprefix(": ")
        records += [{"x": x, "y": y, "fit": a * x**k, "line": label} for x, y in zip(xs, ys, strict=True)]
    if not records:
        raise ValueError(f"no two measurements differ in {axis} alone; measure several: --{axis} 1 2 4")
    format_value = format_seconds if of == "seconds" else format_bytes if of == "peak_bytes" else format_count
    high = 3.6 + 0.25 * len({r["line"] for r in records})
    return (
        base(table_of(records), high=high, x="x", y="y", color="line", shape="line")
        + p.geom_line(p.aes(y="fit"), size=0.8)
        + p.geom_point(size=3)
        + p.scale_x_log10(labels=rounded)
        + p.scale_y_log10(labels=lambda v: [format_value(t) for t in v])
        + p.scale_color_manual(COLOURS * 4)
        + p.guides(color=p.guide_legend(ncol=1), shape=p.guide_legend(ncol=1))
        + p.labs(title=f"{results[0]['benchmark']}: {NAMES[of]} over {axis}", x=axis, y="")
    )


def rounded(values: Sequence[float]) -> list[str]:
    return [format_count(v) for v in values]


def bars(results: Sequence[Mapping[str, Any]], title: str, interval: str = "p25 to p75") -> Any:
    """A bar chart of rates, labelled with their values. `interval` names the intervals in the axis label; "" draws
    no intervals.

    `results` are records with keys `name`, `rate`, `low` and `high` (the ends of the interval), and `unit`.
    """
    p = extra("plotnine", "plot")
    frame = table_of([f | {"label": f"  {format_count(f['rate'])}"} for f in map(dict, results)])
    order = [str(f["name"]) for f in reversed(results)]
    ends = p.geom_errorbar(p.aes(ymin="low", ymax="high"), width=0.25, color="#222222")
    unit = results[0]["unit"] + (f"/s (line: {interval})" if interval else "/s")
    return (
        base(frame, high=1.2 + 0.42 * len(results), x="name", y="rate")
        + p.geom_col(fill=COLOURS[0], width=0.65)
        + ([ends] if interval else [])
        + p.geom_text(p.aes(label="label", y="high"), ha="left", size=9)
        + p.scale_x_discrete(limits=order)
        + p.scale_y_continuous(labels=rounded, expand=(0, 0, 0.18, 0))
        + p.coord_flip()
        + p.labs(title=title, x="", y=unit)
        + p.theme(panel_grid_major_y=p.element_blank())
    )


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write all plots of these measurements, and return their paths.

    There is a scaling plot for each axis that varies, and a bar chart of rates.
    """
    results, paths = summaries(rows), []
    for axis in AXES:
        if scaling_lines(results, axis):
            for of in ("seconds", "peak_bytes") if results[0].get("peak_bytes") else ("seconds",):
                paths.append(folder / f"{results[0]['benchmark']}-{NAMES[of].split()[0]}-over-{axis}.svg")
                save_plot(scaling(results, axis, of), paths[-1])
    name, entries = results[0]["benchmark"], [_bar(f, results) for f in results]
    paths.append(folder / f"{name}-rates.svg")
    save_plot(bars(entries, f"{name}: {results[0]['unit']}/s"), paths[-1])
    return paths


def _bar(f: Row, among: Sequence[Row]) -> Row:
    name = ", ".join([f["subject"], *(f"{n} {f[n]}" for n in differing_columns(among) if n != "subject")])
    name += f", {f['rate'] / f['limit']:.0%} of the limit" if f.get("limit") else ""
    low, high = (f["rate"] * f["seconds"] / f[key] for key in ("high", "low"))
    return {"name": name, "rate": f["rate"], "unit": f["unit"], "low": low, "high": high}
