"""The notebooks run from their first cell to the last, and what they show is HTML."""

import ast
import json
import sys
from pathlib import Path

import pytest

from dunes import checkpoint
from dunes.checkpoint.open import ModelLocation
from real_models import smollm2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "smollm2"])
def test_a_notebook_runs_and_shows_five_objects(name, monkeypatch):
    shown, names = [], {"__name__": name}
    monkeypatch.setenv("DUNES_NOTEBOOK_STEPS", "3")
    monkeypatch.setattr(sys, "displayhook", shown.append)
    monkeypatch.setattr(checkpoint, "locate_model", lambda model: ModelLocation(smollm2(), {}))
    notebook = json.loads((Path(__file__).parents[1] / "notebooks" / f"{name}.ipynb").read_text())
    for source in [cell["source"] for cell in notebook["cells"] if cell.get("outputs") == []]:
        exec(compile(ast.Interactive(ast.parse("".join(source)).body), name, "single"), names)
    pictures = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert [picture[:4] in ("<tab", "<svg") for picture in pictures] == [True] * 5
