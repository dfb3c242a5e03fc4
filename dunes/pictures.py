"""Tables as HTML and pictures as SVG, for notebooks, pages and files. All texts are escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import chain, zip_longest

from dunes.units import format_seconds

COLOURS = ("#b0712a", "#2f6f8f", "#009e73", "#cc79a7", "#56b4e9", "#999999", "#7b5ea7", "#d55e00")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{}" style="max-width:100%" role="img" '
SVG += 'font-family="system-ui,sans-serif" font-size="12" fill="currentColor" stroke-width="1.5">{}</svg>'
BAR = '<td style="min-width:9em;height:1.6em;background:linear-gradient(90deg,#b0712a {:.1%},#b0712a66 0 {:.1%},'
BAR += '#0000 0) 0/100% 1em no-repeat"></td>'


def html_table(titles: Sequence[str], lines: Iterable[Sequence[str]], bars: Iterable[Sequence[float]] = ()) -> str:
    """A table with left-aligned labels and right-aligned figures. `bars` has an interval, from 0 to 1, for each
    line: a bar ends where the interval begins, and the interval is lighter."""
    rows = [_row("td", titles, line) + (BAR.format(*bar) if bar else "") for line, bar in zip_longest(lines, bars)]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in [_row('th', titles, titles), *rows])}</table>"


def _row(tag: str, titles: Sequence[str], line: Sequence[str]) -> str:
    cells = zip(titles, line, ["left;white-space:pre", *["right"] * len(line)], strict=False)
    style = "padding:.15em .6em;text-align"
    return "".join(f'<{tag} title="{escape(n)}" style="{style}:{s}">{escape(t)}</{tag}>' for n, t, s in cells)


def svg_curves(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves in one frame, which includes the point (0, 0), above their names."""
    xs, ys = zip((0, 0), *chain.from_iterable(curves.values()), strict=True)
    frame = f"{min(xs)} {-1.02 * max(ys)} {max(xs) - min(xs) or 1} {1.04 * (max(ys) - min(ys)) or 1}"
    lines, names = "", ""
    for number, (name, points) in enumerate(curves.items()):
        colour, path = COLOURS[number % len(COLOURS)], " ".join(f"{x},{-y}" for x, y in points)
        lines += f'<polyline stroke="{colour}" vector-effect="non-scaling-stroke" points="{path}"/>'
        place = f'x="{number % 3 * 33}%" y="{180 + number // 3 * 16}"'
        names += f'<text {place}><tspan fill="{colour}">■</tspan> {escape(name)}</text>'
    picture = f'<svg height="160" viewBox="{frame}" preserveAspectRatio="none" fill="none">{lines}</svg>'
    return SVG.format(220, picture + names)


def svg_boxes(seconds: Mapping[str, float], parent: str = "", colour: str = "") -> str:
    """A box for each dotted name in `parent`, as wide as its part of the parent's seconds, above the boxes in
    it."""
    boxes, left = "", 0.0
    for number, name in enumerate(n for n in seconds if n and n.rpartition(".")[0] == parent):
        share, fill = seconds[name] / (seconds[parent] or 1), colour or COLOURS[number]
        label = escape(f"{name.rpartition('.')[2]} {format_seconds(seconds[name])}")
        boxes += (
            f'<svg x="{left:.3%}" y="{20 * bool(parent)}" width="{share:.3%}"><title>{escape(name)}: {label}'
            f'</title><rect width="100%" height="19" fill="{fill}" fill-opacity=".5" stroke="{fill}"/>'
            f'<text x="4" y="14">{label}</text>{svg_boxes(seconds, name, fill)}</svg>'
        )
        left += share
    return boxes
