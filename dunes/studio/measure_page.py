"""The view of measurements: rates with their intervals, memory over a step, time by module."""

from nicegui import ui

from dunes.bench.table import draw_folder
from dunes.context import prefix_errors
from dunes.studio.app import Studio
from dunes.studio.model_page import working

NARROW = "max-lg:[&_th]:hidden max-lg:[&_td]:flex max-lg:[&_td]:justify-between max-lg:[&_table]:w-full"
"""Classes of Tailwind with which a line of a table becomes a block in a narrow window."""


async def draw(studio: Studio) -> None:
    """Draw the view."""
    message = f"{studio.root}: a measurement that dunes bench did not write"
    with prefix_errors(message, (ValueError, LookupError, TypeError, ArithmeticError), describe=repr):
        pictures = await working(lambda: [*draw_folder(studio.root)])
    for title, picture in pictures:
        ui.label(title).classes("font-medium [overflow-wrap:anywhere]")
        shown = f"w-full overflow-x-auto text-sm max-lg:[&_td]:before:content-[attr(title)] {NARROW}"
        ui.html(picture, sanitize=False).classes(shown)
    hint = f"measure: dunes bench train --size 3m --out {studio.root}/bench/train.jsonl"
    ui.label(hint).classes("dim [overflow-wrap:anywhere]")
