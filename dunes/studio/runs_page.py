"""The view of runs."""

from nicegui import ui

from dunes.studio.app import Studio


def draw(studio: Studio) -> None:
    """Draw the view."""
    for entry in studio.entries():
        ui.label(entry.name)
