"""The views of the studio."""

from dunes.studio import chat_page, measure_page, model_page, runs_page, write_page
from dunes.studio.app import View

VIEWS: dict[str, View] = {
    "Runs": runs_page.draw,
    "Write": write_page.draw,
    "Chat": chat_page.draw,
    "Model": model_page.draw,
    "Measure": measure_page.draw,
}
"""Functions that draw a view, by title; the first one is the start page."""
