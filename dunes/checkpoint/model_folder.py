"""Read a model folder: its card `dunes.json`, its files' digests in the card, and complete or interrupted saves.

For a path that is no model folder, an error message says what it is and names a remedy.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dunes.checkpoint.formats.native import PARAMS
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files import atomic, json_file
from dunes.files.atomic import folder_lock
from dunes.files.model_file import find_file, listed_file
from dunes.text.gguf_file import SUFFIX
from dunes.units import plural

CARD = "dunes.json"
FORMAT = 3
MAX_CHANGES = 500
"""Maximum number of changes that a card may list, since repeating each change visits all modules."""
MAX_RETRIES = 10
"""After this many reads disturbed by concurrent saves, a folder is locked and read once more."""
CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""File names of unsharded weights; an index of shards has such a name with the suffix .index.json."""
COMPACT = "model.compact.safetensors"
"""File name of pruned weights, as stored by versions before 0.2.0."""
ADAPTER = "adapter_config.json"
UNFINISHED = ".unfinished"
"""Subfolder with the finished parts of a change that is in progress."""
READY = ".ready"
"""Subfolder of a complete save whose files are being renamed into place (`folder.py`)."""
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".html", ".json", ".jsonl", ".parquet"}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".pt", ".ckpt"}
MOST = 2000
"""Maximum number of files that are listed to describe a folder."""
T = TypeVar("T")


def named_folder(folder: Path) -> Path:
    """The folder as a user names it: for a `.ready` subfolder its parent, otherwise the folder itself."""
    return folder.parent if folder.name == READY else folder


def ready_folder(folder: Path) -> Path:
    """The path of a folder's `.ready` subfolder. Raises ValueError if it is a link, which leads elsewhere."""
    if (folder / READY).is_symlink():
        raise ValueError(f"{folder / READY}: a link, not the folder of a save of ours; remove it")
    return folder / READY


def is_model_folder(folder: Path) -> bool:
    """True if a folder has files with the names of a model's files, or an unfinished save. No file is read."""
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
    if (path / ADAPTER).is_file():
        base = quote(json_file.read(path / ADAPTER, json_file.MAX_CONFIG_BYTES).get("base_model_name_or_path"))
        return f"{path}: an adapter of {base}, not a whole model; merge it first: dunes augment merge {path} OUT"
    runs = [run for run in (path.parent, path.parent.parent) if _is_run(run)]
    if runs := [run for run in runs if (run / "state").resolve() in (path.resolve(), path.resolve().parent)]:
        return f"{path}: the training state of a run, not a model folder; name the run: {runs[0]}"
    if _is_run(path):
        plan = path / "state" / "plan.json"
        verb = "finetune" if plan.is_file() and "method" in json_file.read(plan) else "train"
        return (
            f"{path}: a run without a model yet, still training, or stopped before its first save; continue it: "
            f"dunes {verb} --resume --out {path}"
        )
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
    remedy = f"; to train a model on them: dunes train {folder} --out RUN" if any(map(_is_text, files)) else ""
    return f"it holds {listed}{remedy}"


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder, except in folders of version control and dependencies."""
    from dunes.data.files import DEPENDENCIES, NEVER  # late: the room imports much

    for parent, folders, names in os.walk(folder):
        folders[:] = sorted({*folders} - NEVER - DEPENDENCIES)
        yield from (Path(parent, name) for name in sorted(names))


def _is_text(path: Path) -> bool:
    from dunes.data.files import CODE_SUFFIXES

    return path.suffix.lower() in CODE_SUFFIXES | TEXT_SUFFIXES


def read_card(folder: Path) -> dict[str, Any]:
    """The folder's card, or {} if the folder has none. Raises ValueError if the card is damaged."""
    if find_file(folder, CARD) is None:
        return {}
    card = json_file.read(folder / CARD)
    for key in ("changes", "history"):
        if not isinstance(changes := card.get(key, []), list) or not all(isinstance(c, dict) for c in changes):
            raise ValueError(f"{folder / CARD}: {key!r} must be a list of objects; download the file again")
        if len(changes) > MAX_CHANGES:
            raise ValueError(f"{folder / CARD}: lists {len(changes):,} changes; the limit is {MAX_CHANGES:,}")
    if type(number := card.get("format", FORMAT)) is not int or number > FORMAT:
        raise ValueError(f"{folder / CARD}: of format {quote(number)}, this version reads {FORMAT}; update dunes")
    if card.get("format") == 1 and "context" in card:  # the name in format 1
        card["context_length"] = card.pop("context")
    return card


def listed_files(folder: Path, card: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that a card lists. Raises ValueError for a damaged card."""
    files = card.get("files", None if card else {})
    entries = files.values() if isinstance(files, dict) else [None]
    if any(not isinstance(e, dict) or (type(e.get("size")), type(e.get("sha256"))) != (int, str) for e in entries):
        raise ValueError(f"{folder / CARD}: 'files' must have size and sha256 of each file, or be {{}}")
    return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}


def verified_card(folder: Path, max_bytes: float = atomic.LARGE) -> dict[str, Any]:
    """The card of a folder, or {} if it has none. Raises ValueError if a file differs from its entry in the card.

    Each listed file must be a plain file in the folder with the listed size. If all files have at most `max_bytes`
    in total, each must also have the listed SHA-256.
    """
    card = read_card(folder)
    files = listed_files(folder, card)
    paths = {name: listed_file(folder, name, folder / CARD) for name in files}
    for name, (size, _) in files.items():
        if (actual := paths[name].stat().st_size) != size:
            raise _file_error(folder, name, f"{plural(actual, 'byte')} instead of {size}")
    if (total := sum(size for size, _ in files.values())) <= max_bytes:
        with atomic.progress("hashing", total) as advance:
            for name, (_, digest) in files.items():
                if atomic.digest(paths[name], advance) != digest:
                    raise _file_error(folder, name, "another SHA-256")
    return card


def _file_error(folder: Path, name: str, reason: str) -> ValueError:
    return ValueError(
        f"{folder / name}: not the bytes that were written ({reason}); the save was interrupted or the file was "
        f"changed since; if it was changed on purpose, set 'files' to {{}} in {folder / CARD}"
    )


def readable_folder(folder: Path) -> Path:
    """The `saved_folder` of a model, adapter, network or GGUF file.

    For any other path, raises ValueError with the text of `explain`.
    """
    if not (folder.suffix == SUFFIX and folder.is_file()) and not is_model_folder(folder):
        raise ValueError(explain(folder))
    return saved_folder(folder)


def saved_folder(folder: Path) -> Path:
    """The folder to read from: its complete `.ready` subfolder after an interrupted save, else the folder itself.

    Waits for a save in progress. No file is changed; the next save into the folder finishes the interrupted one.
    Raises ValueError if `.ready` is a link, or incomplete, as after a crash on a file system without hard links.
    """
    ready = ready_folder(folder)
    if not (ready / CARD).is_file():
        return folder
    with atomic.add_path_to_errors(folder), folder_lock(folder):
        if not (ready / CARD).is_file():
            return folder
        missing = listed_files(ready, read_card(ready)).keys() - {*os.listdir(ready)}
    if missing:
        name = min(missing)[:80]
        raise ValueError(
            f"{ready}: has no {name!a}; move what is in it to {folder}, which ends an interrupted save"
        )
    return ready


def read_consistently(folder: Path, read: Callable[[Path], T]) -> T:
    """The result of `read(folder)`, repeated if another thread or process saved into the folder meanwhile."""
    for _ in range(MAX_RETRIES):
        saved_folder(folder)
        before = _save_stamp(folder)
        try:
            result = read(folder)
        except (ValueError, FileNotFoundError):
            if _save_stamp(folder) == before:
                raise
        else:
            if _save_stamp(folder) == before:
                return result
    with folder_lock(folder):
        saved_folder(folder)
        return read(folder)


def _save_stamp(folder: Path) -> list[tuple[str, int, int]]:
    """A value that changes with each save into the folder."""
    stamps = []
    for path in (folder / CARD, folder / READY):
        with suppress(OSError):  # renamed by a save, inside a GGUF file's path, or a loop of links
            stat = path.stat()
            stamps.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return stamps
