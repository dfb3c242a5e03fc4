"""Find the runs and models in a folder."""

import os
from dataclasses import dataclass
from pathlib import Path

from dunes.checkpoint.open import is_model_folder
from dunes.runs.saving import METRICS
from dunes.units import plural

DEPTH = 5
"""Levels of folders that are searched."""
SKIPPED = frozenset(("node_modules", "site-packages", "__pycache__"))
"""Names of folders that are not searched, besides hidden ones."""


@dataclass(frozen=True)
class Entry:
    """A run, a model folder or a GGUF file. `name` is its path relative to the searched folder; `modified` is a
    time in seconds."""

    name: str
    path: Path
    is_run: bool
    is_model: bool
    modified: float


def find_entries(root: Path) -> list[Entry]:
    """The runs and models in a folder, or the folder itself if it is one; the last modified is first.

    Links are not followed, and folders that cannot be read are skipped. Raises ValueError if `root` is not a
    readable folder.
    """
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        raise ValueError(f"{root}: not a readable folder; pass one with runs or models, like runs")
    entries = list[Entry]()
    _search(root, root, DEPTH, entries)
    return sorted(entries, key=lambda entry: -entry.modified)


def _search(folder: Path, root: Path, depth: int, entries: list[Entry]) -> None:
    metrics, plan = folder / METRICS, folder / "state" / "plan.json"
    is_run, is_model = metrics.is_file() or plan.is_file(), is_model_folder(folder)
    if is_run or is_model:
        times = [path.stat().st_mtime for path in (metrics, folder / "dunes.json", folder) if path.exists()]
        name = str(folder.relative_to(root)) if folder != root else folder.resolve().name
        entries.append(Entry(name, folder, is_run, is_model, times[0]))
        return
    try:
        children = sorted(os.scandir(folder), key=lambda child: child.name) if depth else []
    except OSError:
        return
    for child in children:
        if child.name.startswith(".") or child.name in SKIPPED:
            continue
        path = Path(child.path)
        if child.is_dir(follow_symlinks=False):
            _search(path, root, depth - 1, entries)
        elif path.suffix == ".gguf" and child.is_file():
            entries.append(Entry(str(path.relative_to(root)), path, False, True, child.stat().st_mtime))


def describe_count(entries: list[Entry], root: Path) -> str:
    """One line on what was found, with a next step if it was nothing."""
    runs, models = sum(e.is_run for e in entries), sum(e.is_model for e in entries)
    if entries:
        return f"{root}: {plural(runs, 'run')}, {plural(models, 'model')}"
    return f"{root}: no run and no model; train one: dunes train SOURCE --out {root}/first"
