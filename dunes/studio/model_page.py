"""The view of a model: its outline, changes and weights, a second model beside it, and the attention of a text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import run, ui

from dunes.studio import weights
from dunes.studio.app import Studio

COLORS, GREY = ["#b0712a", "#2f6f8f"], {"color": "#888"}
AXIS = {"type": "value", "axisLabel": GREY, "splitLine": {"show": False}, "axisLine": {"onZero": False}}
CHART = {"color": COLORS, "legend": {"textStyle": GREY}, "xAxis": AXIS, "yAxis": AXIS}
LINE = {"type": "line", "step": "end", "symbol": "none", "areaStyle": {"opacity": 0.3}}
ROW = """<div class="col row no-wrap items-baseline gap-3" style="font-variant-numeric: tabular-nums">
<span class="col break-all">{{props.node.id.split(".").pop()}}
<span class="dim">{{props.node.type.replace("torch.", "")}}</span></span>
<span class="gt-xs w-14 dim">{{props.node.trained ? "trained" : ""}}</span>
<span class="gt-xs w-28 text-right">{{props.node.parameters.toLocaleString("en")}}</span>
<span class="w-28 text-right">{{Math.ceil(props.node.bytes / 1e3).toLocaleString("en")}} kB</span></div>"""


async def draw(studio: Studio) -> None:
    """Draw the models that the address names: /model?model=NAME&with=NAME."""
    paths = {entry.name: entry.path for entry in studio.entries() if entry.is_model}
    asked = {key: ui.context.client.request.query_params.get(key, "") for key in ("model", "with")}
    paths |= {name: Path(name) for name in asked.values() if name and name not in paths}
    with ui.row().classes("w-full"):
        for key, label in {"model": "Model", "with": "Compare with"}.items():
            go = lambda event, key=key: ui.navigate.to(f"/model?{urlencode(asked | {key: event.value or ''})}")
            chooser = ui.select([*paths], label=label, value=asked[key] or None, new_value_mode="add-unique")
            chooser.on_value_change(go).props("clearable").classes("grow")
    models = {name: await working(weights.read_rows, paths[name]) for name in asked.values() if name}
    if models:
        first, facts = paths[next(iter(models))], ui.label().classes("code text-sm")
        _draw_weights(models)
        _draw_attention(first)
        facts.text = "\n".join(await working(weights.describe, first))


async def working(function: Any, *arguments: Any) -> Any:
    """The result of a function that runs in a thread; meanwhile the page shows that it works."""
    spinner = ui.spinner(size="lg")
    try:
        return await run.io_bound(function, *arguments)
    finally:
        spinner.delete()


def _draw_weights(models: Mapping[str, tuple[weights.Rows, Any]]) -> None:
    """Draw the outline of the first model, how the second differs, and the histogram of the chosen weight."""

    async def show(event: Any) -> None:
        found = {name: tensors[event.value] for name, (_, tensors) in models.items() if event.value in tensors}
        shown = await working(weights.histograms, found)
        panel.clear()
        with panel:
            lines = [LINE | {"name": name, "data": points} for name, (points, _) in shown.items()]
            ui.echart(CHART | {"series": lines, "tooltip": {"trigger": "axis"}})
            for name, (_, figures) in shown.items():
                ui.label(f"{name}, {event.value}: {weights.text(figures)}")

    rows = {name: rows for name, (rows, _) in models.items()}
    if len(rows) == 2:
        table = ui.table(rows=weights.differences(rows), pagination=8, column_defaults={"align": "left"})
        table.props("flat dense wrap-cells").classes("w-full break-all")
    with ui.element("div").classes("grid w-full md:grid-cols-[3fr_2fr] gap-8"):
        outline = ui.tree(next(iter(rows.values()))[""]["children"], on_select=show)
        panel = ui.column().classes("md:sticky top-16 self-start")
    outline.props("no-transition no-selection-unset selected-color=brown-5").add_slot("default-header", ROW)


def _draw_attention(folder: Path) -> None:
    """Draw a field for a text; its button draws the maps of all heads of the chosen layer."""

    async def attend() -> None:
        tokens, maps, loads = await working(weights.attention, folder, field.value)
        panel.clear()
        with panel:
            if loads:
                experts = [f"expert {number}" for number in range(max(map(len, loads.values())))]
                _draw_map("tokens of each expert", [*loads.values()], [*loads], experts)

            @ui.refreshable
            def heads() -> None:
                with ui.row():
                    for number, values in enumerate(maps.get(layer.value, [])):
                        _draw_map(f"head {number}", values, tokens, tokens)

            layer = ui.select([*maps], label="Layer", value=next(iter(maps), None), on_change=heads.refresh)
            heads()

    with ui.row().classes("w-full items-baseline"):
        field = ui.input("Text", value="def add(a, b): return a + b").classes("grow").on("keydown.enter", attend)
        ui.button("Show attention", on_click=attend)
    panel = ui.column().classes("w-full")


def _draw_map(title: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw a table of values as colours; the pointer shows the names of row and column, and the value."""
    cells = [[x, y, round(v, 3), v**0.5] for y, row in enumerate(values) for x, v in enumerate(row) if v]
    named = f"p => {json.dumps(rows)}[p.data[1]] + ' → ' + {json.dumps(columns)}[p.data[0]] + ': ' + p.data[2]"
    shades, axis = {"color": COLORS[:1], "opacity": [0, 1]}, {"type": "category", "show": False}
    options = {
        "title": {"text": title, "left": 0, "top": 0, "textStyle": GREY | {"fontSize": 13}},
        "grid": {"left": 0, "right": 0, "top": 24, "bottom": 0},
        "tooltip": {":formatter": named, "renderMode": "richText", "confine": True},
        "xAxis": axis | {"data": columns},
        "yAxis": axis | {"data": rows, "inverse": True},
        "visualMap": {"show": False, "dimension": 3, "max": max(map(max, values)) ** 0.5, "inRange": shades},
        "series": {"type": "heatmap", "data": cells},
    }
    ui.echart(options).classes("w-44 h-44")
