"""The view that writes: an editor with a model's suggestions, and the places in files where they occur."""

import asyncio

from nicegui import ui

from dunes.completion.completer import training_sources
from dunes.data.files import source_roots
from dunes.studio.app import Studio
from dunes.studio.project_files import read_project_file


class GhostEditor(ui.element, component="ghost.js"):
    """An editor that shows the suggestion at the cursor and explains it. After a click on a token with
    a place in a file, emits `source` with the place."""


async def draw(studio: Studio) -> None:
    """Draw the view. In its address, `?model=` and `?file=` select a model and a file."""
    query, texts, roots = ui.context.client.request.query_params, dict[str, str](), [studio.root]
    paths = {entry.name: str(entry.path) for entry in await asyncio.to_thread(studio.entries) if entry.is_model}

    async def open_chosen(*fields: ui.element) -> None:
        """Open the model, the file (its text replaces the editor's), or both, as chosen in these fields."""
        status.text = "opening ..."
        if model in fields and model.value:
            key = await studio.models.open(paths.get(model.value, model.value))
            served = studio.models.worker(key).find("")
            current, threshold = served.current, min(1.0, served.threshold)
            texts.update(current.completer.training_files)
            values = {"key": key, "threshold": threshold, "note": current.note, "times": []}
            editor.run_method("load", values | {"beams": getattr(current.completer, "width", 1)})
            roots[1:] = [root for source in training_sources(served.folder)[0] for root in source_roots(source)]
        if file in fields and file.value:
            path, text = await asyncio.to_thread(read_project_file, file.value, roots)
            editor.run_method("load", {"path": str(path)}, text)
        status.text = ""

    with ui.row().classes("w-full items-end"):
        names = dict.fromkeys([*paths, *query.getlist("model")])
        model = ui.select([*names], label="Model", value=query.get("model"), new_value_mode="add-unique")
        file = ui.input("File", value=query.get("file", "")).classes("grow")
        status = ui.label().props("role=status")
    model.on_value_change(lambda: open_chosen(model))
    file.on("keydown.enter", lambda: open_chosen(file))
    editor = GhostEditor()
    editor.on("source", lambda event: editor.run_method("reveal", event.args, texts.get(event.args[0], "")))
    ui.on_exception(lambda: status.set_text(""))
    ui.timer(0, lambda: open_chosen(model, file), once=True)
