"""The views of the studio."""

from dunes.studio import measure_page, runs_page
from dunes.studio.app import View

VIEWS: dict[str, View] = {"Runs": runs_page.draw, "Measure": measure_page.draw}
"""Functions that draw a view, by title; the first one is the start page."""
