"""Find the runs and models in a folder."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dunes.checkpoint.open import is_model_folder
from dunes.runs.saving import METRICS
from dunes.text.gguf_file import SUFFIX
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

    Links to folders are not followed, and what cannot be read is skipped. Raises ValueError if `root` is not a
    readable folder.
    """
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        raise ValueError(f"{root}: not a readable folder; pass one with runs or models, like runs")
    entries = list[Entry]()
    _search(root, root, DEPTH, entries)
    return sorted(entries, key=lambda entry: -entry.modified)


def _search(path: Path, root: Path, depth: int, entries: list[Entry]) -> None:
    with suppress(OSError):  # it cannot be read, or was deleted during the search
        metrics, plan = path / METRICS, path / "state" / "plan.json"
        is_run, is_model = metrics.is_file() or plan.is_file(), path.is_file() or is_model_folder(path)
        if is_run or is_model:
            times = [file.stat().st_mtime for file in (metrics, path / "dunes.json", path) if file.exists()]
            name = path.relative_to(root) if path != root else path.resolve().name
            entries.append(Entry(showable(name), path, is_run, is_model, times[0]))
            return
        for child in sorted(os.scandir(path), key=lambda child: child.name) if depth else []:
            is_folder = child.is_dir(follow_symlinks=False) and child.name not in SKIPPED
            is_gguf = child.name.endswith(SUFFIX) and child.is_file()
            if (is_folder or is_gguf) and not child.name.startswith("."):
                _search(Path(child.path), root, depth - 1, entries)


def showable(text: object) -> str:
    """A text without the characters that a page cannot show, such as bytes of a file's name that are not UTF-8."""
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def describe_count(entries: list[Entry], root: Path) -> str:
    """One line on what was found, with a next step if it was nothing."""
    runs, models = sum(e.is_run for e in entries), sum(e.is_model for e in entries)
    found = f"{plural(runs, 'run')}, {plural(models, 'model')}" if entries else "no run and no model; train one: "
    return f"{root}: {found}" + f"dunes train SOURCE --out {root}/first" * (not entries)
