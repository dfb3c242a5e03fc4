"""Recognise model folders by file names, and explain, with a remedy, what other paths are."""

import os
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from dunes.checkpoint.card import CARD
from dunes.checkpoint.formats.native import PARAMS
from dunes.data.files import CODE_SUFFIXES, DEPENDENCIES, NEVER
from dunes.files import json_file
from dunes.text.gguf_file import SUFFIX
from dunes.units import plural

CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Names of unsharded weights; an index of shards has the suffix .index.json."""
COMPACT = "model.compact.safetensors"
"""Pruned weights as stored by versions before 0.2.0."""
ADAPTER = "adapter_config.json"
UNFINISHED = ".unfinished"
"""Subfolder with the finished parts of a change that is in progress."""
READY = ".ready"
"""Subfolder of a complete save whose files are being renamed into place (`folder.py`)."""
TEXT_SUFFIXES = CODE_SUFFIXES | {".txt", ".md", ".rst", ".html", ".json", ".jsonl", ".parquet"}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".pt", ".ckpt"}
MOST = 2000
"""Most files to list in order to describe a folder."""


def named_folder(folder: Path) -> Path:
    """The folder as a user names it: the parent of a `.ready` subfolder."""
    return folder.parent if folder.name == READY else folder


def is_model_folder(folder: Path) -> bool:
    """True if a folder has files with the names of a model's, or a save in progress. No file is read."""
    if any((folder / name).exists() for name in (READY, CARD, ADAPTER, PARAMS)):  # CARD comes before READY goes
        return True
    weights = [name for single in SINGLE for name in (single, f"{single}.index.json")]
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in weights)


def explain(path: Path) -> str:
    """One sentence that says what a path is instead of a model folder, and the remedy."""
    if not os.path.lexists(path):
        return no_such_folder(path)
    if not path.is_dir():
        return f"{path}: a file, not a model folder; {_remedy_of_file(path)}"
    runs = [run for run in (path.parent, path.parent.parent) if _is_run(run)]
    if runs := [run for run in runs if (run / "state").resolve() in (path.resolve(), path.resolve().parent)]:
        return f"{path}: the training state of a run, not a model folder; name the run: {runs[0]}"
    if _is_run(path):
        return _explain_run(path)
    if (path / UNFINISHED).is_dir():
        return f"{path}: an unfinished model; remove it, or run the dunes augment command that began it again"
    if any((path / name).exists() for name in (COMPACT, f"{COMPACT}.index.json")):
        return (
            f"{path}: {COMPACT} is in the compact form, which version 0.2.0 dropped; dunes convert of version "
            "0.1.0 makes it plain"
        )
    if (path / CONFIG).is_file():
        names = ", ".join([*SINGLE, *(f"{s}.index.json" for s in SINGLE)])
        return f"{path}: no weights; looked for {names}, and consolidated.* with {PARAMS}; {_contents(path)}"
    return f"{path / CONFIG}: no such file; {path} is not a model folder: {_contents(path)}"


def no_such_folder(path: Path | str) -> str:
    """Message that a path does not exist, with a suggestion if a similar name exists."""
    path = Path(path)
    folders = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, folders, 1, 0.8)
    return f"{path}: no such folder" + (f" (did you mean {path.parent / near[0]}?)" if near else "")


def _is_run(folder: Path) -> bool:
    """True if a folder has the state of a training run."""
    state, files = folder / "state", ("plan.json", "tokenizer.json")
    known = any((state / name).is_file() for name in files) or any(state.glob("step-[0-9]*"))
    return known or (state.is_dir() and not any(state.iterdir()))


def _explain_run(run: Path) -> str:
    """Message for a run before its first save, with the command that resumes it."""
    plan = run / "state" / "plan.json"
    verb = "finetune" if plan.is_file() and "method" in json_file.read(plan) else "train"
    return (
        f"{run}: a run without a model yet, still training, or stopped before its first save; continue it: "
        f"dunes {verb} --resume --out {run}"
    )


def _remedy_of_file(path: Path) -> str:
    if is_model_folder(path.parent):
        return f"name its folder: {path.parent}"
    if path.suffix in WEIGHT_SUFFIXES:
        return f"put it into a folder with its {CONFIG}, and name that folder"
    return f"to train a model on it: dunes train {path} --out RUN" if _is_text(path) else "name a model folder"


def _contents(folder: Path) -> str:
    """Summary of a folder's files, with the next step for a user."""
    below = [f for f in (*folder.glob("*"), *folder.glob("snapshots/*")) if f.is_dir() and is_model_folder(f)]
    if below:
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        return f"it holds model folders, name one: {', '.join(map(str, sorted(below)[:3]))}{more}"
    files = [*islice(_files(folder), MOST)]
    if ggufs := [f for f in files if f.suffix == SUFFIX]:
        return f"it holds a GGUF file, name that: {ggufs[0]}"
    if weights := [f for f in files if f.suffix in WEIGHT_SUFFIXES]:
        missing = CONFIG if not (folder / CONFIG).is_file() else SINGLE[0]
        return f"it holds {weights[0].relative_to(folder)}, but no {missing}; get the whole model folder"
    if not files:
        return "it holds no files"
    counts = Counter(f.suffix or f.name for f in files).most_common(2)
    listed = " and ".join(plural(n, f"{suffix} file") for suffix, n in counts)
    text = any(map(_is_text, files))
    return f"it holds {listed}" + (f"; to train a model on them: dunes train {folder} --out RUN" if text else "")


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder, except in folders of version control and dependencies."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted({*folders} - NEVER - DEPENDENCIES)
        yield from (Path(parent, name) for name in sorted(names))


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in TEXT_SUFFIXES
