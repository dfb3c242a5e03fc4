"""The view of runs: a list, and charts, samples and differences of the selected runs."""

import asyncio
from signal import SIGINT, SIGUSR1
from typing import Any

from nicegui import ui

from dunes.runs.saving import signal_run
from dunes.studio.app import Studio
from dunes.studio.folders import Entry, describe_count, showable
from dunes.studio.runs import MetricsFile, config_differences, describe, samples_at

CHARTS = {"loss": "h-96 md:col-span-3", "lr_scale": "h-64", "tokens/s": "h-64", "memory, GB": "h-64"}
"""Series with a chart, and the CSS classes of the chart."""
COLOURS = ("#b0712a", "#2f6f8f", "#3f9a6b", "#b5608f", "#7a70c8", "#8a8a3a")
CONFIRM = "() => confirm('Stop the selected runs? Each one saves, and can be continued.') && emit()"


def chart(name: str, axis: str, runs: dict[str, MetricsFile]) -> dict[str, Any]:
    """ECharts options of a chart of one series of several runs; the training loss is also smoothed."""
    series = list[dict[str, Any]]()
    for number, (run, metrics) in enumerate(runs.items()):
        line = {"type": "line", "name": run, "color": COLOURS[number % len(COLOURS)], "symbol": "none"}
        if name == "loss":
            series.append(line | {"data": metrics.points(name, axis), "lineStyle": {"width": 1, "opacity": 0.3}})
            checks = {"name": f"{run}, validation", "data": metrics.points("validation_loss", axis)}
            series.append(line | checks | {"symbol": "circle", "symbolSize": 7, "lineStyle": {"type": "dotted"}})
        series.append(line | {"data": metrics.points(name, axis, smooth=name in ("loss", "tokens/s"))})
    grid = {"axisLabel": {"color": "#888"}, "splitLine": {"lineStyle": {"color": "#8883"}}}
    return {
        "title": {"text": name, "left": 0, "textStyle": {"color": "#888", "fontSize": 14}},
        "legend": {"show": name == "loss", "type": "scroll", "top": 0, "left": 60, "textStyle": {"color": "#888"}},
        "grid": {"left": 50, "right": 20, "top": 40, "bottom": 30},
        "tooltip": {"trigger": "axis", ":valueFormatter": "value => value?.toPrecision(5)"},
        "animation": False,
        "xAxis": grid,
        "yAxis": grid | {"scale": True},
        "series": series,
    }


def draw(studio: Studio) -> None:
    """Draw the view. One timer lists the runs, and one shows what is new in the selected runs."""
    entries, metrics, shown = dict[str, Entry](), dict[str, MetricsFile](), list[Any]()
    select = ui.select({}, label="runs", multiple=True, with_input=True).props("use-chips").classes("w-full")
    with ui.row().classes("items-center"):
        axis = ui.toggle(["step", "tokens", "minutes"], value="step").props("dense no-caps")
        ui.button("Save", on_click=lambda: send(SIGUSR1, "saves after this step")).props("outline no-caps")
        stop = ui.button("Stop").props("outline no-caps")
        stop.on("click", lambda: send(SIGINT, "stops after this step, and saves"), js_handler=CONFIRM)
    note = ui.label().classes("code")
    with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-3 gap-4"):
        charts = {name: ui.echart({}).classes(classes) for name, classes in CHARTS.items()}
    slider = ui.slider(min=0, max=0, value=0).props("snap markers aria-label=sample")
    sample, differences = ui.label().classes("code"), ui.table(rows=[], columns=[]).props("flat dense wrap-cells")

    async def list_runs() -> None:
        found = await asyncio.to_thread(studio.entries)
        runs = {entry.name: entry for entry in found if entry.is_run}
        texts = await asyncio.to_thread(lambda: {n: f"{n}: {describe(e).split(';')[0]}" for n, e in runs.items()})
        entries.update(runs)
        select.set_options(texts, value=[name for name in select.value if name in runs] or [*runs][:1])
        select.props["label"] = describe_count(found, studio.root)

    async def follow() -> None:
        chosen = [entries[name] for name in select.value]
        folders = {entry.name: entry.path for entry in chosen}
        live = [name for name, folder in folders.items() if signal_run(folder)]
        state = [axis.value, slider.value, chosen, live]
        if state == shown and not live:
            return
        shown[:] = state
        runs = {name: metrics.setdefault(name, MetricsFile(folder)) for name, folder in folders.items()}
        await asyncio.to_thread(lambda: [run.update() for run in runs.values()])
        for name, element in charts.items():
            element.options.update(await asyncio.to_thread(chart, name, axis.value, runs))
        notes = [describe(entry).partition("; ")[2] for entry in chosen]
        notes += [f"{run.path}: damaged lines skipped: {run.damaged}" for run in runs.values() if run.damaged]
        note.text = showable("\n".join(filter(None, notes)))
        count, sample.text = samples_at(folders, slider.value)
        if slider.props["max"] != max(0, count - 1):  # the newest sample is shown first
            slider.props["max"] = slider.value = max(0, count - 1)
        differences.columns = [{"name": name, "label": name, "field": name} for name in ("option", *folders)]
        differences.rows = config_differences(folders)
        differences.visible = bool(differences.rows)

    def send(number: int, text: str) -> None:
        for name in select.value:
            sent = signal_run(entries[name].path, number)
            ui.notify(f"{name} {text if sent else 'does not train on this machine'}")

    ui.timer(5.0, list_runs)
    ui.timer(0.5, follow)
