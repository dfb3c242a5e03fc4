"""Read a model folder: its card `dunes.json`, its files' digests in the card, and complete or interrupted saves.

For a path that is no model folder, an error message says what it is and names a remedy.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dunes.checkpoint.formats.native import PARAMS
from dunes.checkpoint.weights.safetensors_file import INDEX, quote
from dunes.checkpoint.weights.safetensors_file import SINGLE as WEIGHTS
from dunes.files import atomic, json_file
from dunes.files.atomic import folder_lock
from dunes.files.model_file import find_file, listed_file
from dunes.text.gguf_file import SUFFIX
from dunes.units import plural

CARD = "dunes.json"
FORMAT = 3
CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""File names of unsharded weights; an index of shards has such a name with the suffix .index.json."""
ADAPTER = "adapter_config.json"
UNFINISHED = ".unfinished"
"""Subfolder with the finished parts of a change that is in progress."""
READY = ".ready"
"""Subfolder of a complete save whose files are being renamed into place."""
T = TypeVar("T")


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
        return f"{path}: no such folder"
    if not path.is_dir():
        return f"{path}: a file, not a model folder; name a model folder"
    if (path / ADAPTER).is_file():
        return f"{path}: an adapter, not a whole model; merge it first: dunes augment merge {path} OUT"
    if _is_run(path):
        return (
            f"{path}: a run without a model yet, still training, or stopped before its first save; continue it "
            f"with --resume --out {path}"
        )
    if (path / UNFINISHED).is_dir():
        return f"{path}: an unfinished model; remove it, or run the dunes augment command that began it again"
    inside = sorted(
        f for f in (*path.glob("*"), *path.glob("snapshots/*")) if f.suffix == SUFFIX or is_model_folder(f)
    )
    if inside:
        return f"{path}: not a model folder; it holds {', '.join(map(str, inside[:3]))}; name one"
    names = ", ".join([*SINGLE, *(f"{s}.index.json" for s in SINGLE)])
    missing = "no weights" if (path / CONFIG).is_file() else "not a model folder"
    return f"{path}: {missing}; looked for {CONFIG} with {names}, and consolidated.* with {PARAMS}"


def _is_run(folder: Path) -> bool:
    """True if a folder has the state of a training run."""
    state, files = folder / "state", ("plan.json", "tokenizer.json")
    known = any((state / name).is_file() for name in files) or any(state.glob("step-[0-9]*"))
    return known or (state.is_dir() and not any(state.iterdir()))


def read_card(folder: Path) -> dict[str, Any]:
    """The folder's card, or {} if the folder has none. Raises ValueError if the card is damaged."""
    if find_file(folder, CARD) is None:
        return {}
    card = json_file.read(folder / CARD)
    for key in ("changes", "history"):
        if not isinstance(changes := card.get(key, []), list) or not all(isinstance(c, dict) for c in changes):
            raise ValueError(f"{folder / CARD}: {key!r} must be a list of objects; download the file again")
    if (number := card.get("format", FORMAT)) != FORMAT:
        remedy = "make the folder again, or update dunes"
        raise ValueError(f"{folder / CARD}: of format {quote(number)}, this version reads {FORMAT}; {remedy}")
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
    """The folder of a model, adapter or network, or the GGUF file, after `finish_save`.

    For any other path, raises ValueError with the text of `explain`.
    """
    if not (folder.suffix == SUFFIX and folder.is_file()) and not is_model_folder(folder):
        raise ValueError(explain(folder))
    return finish_save(folder)


def finish_save(folder: Path) -> Path:
    """Finish a save that was interrupted after its files were written, or wait for one in progress.

    Returns the folder. Raises OSError if renaming fails, and ValueError if `.ready` is a link.
    """
    ready = ready_folder(folder)
    if (ready / CARD).is_file() or (ready.is_dir() and not any(ready.iterdir())):
        with folder_lock(folder):
            place_files(folder)
    return folder


def place_files(folder: Path) -> None:
    """Put the files of `.ready` into place, the card last, then remove it. The caller has locked the folder."""
    if not (ready := ready_folder(folder)).is_dir():
        return
    _remove_old(folder, ready)
    for file in sorted(ready.iterdir(), key=lambda file: file.name == CARD):
        if file.name == CARD:  # must be on the disk after the files that it lists
            atomic.fsync_path(folder)
        os.replace(file, folder / file.name)
    atomic.fsync_path(folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    ready.rmdir()
    atomic.fsync_path(folder)


def _remove_old(folder: Path, ready: Path) -> None:
    """Remove the files of an older save that the new save does not have."""
    new, old = {f.name for f in ready.iterdir()} | {*listed_files(ready, read_card(ready))}, set[str]()
    if CARD in new:
        with suppress(ValueError):  # the older card is damaged
            paths = {name: folder / name for name in listed_files(folder, read_card(folder)) if name != ".."}
            old = {name for name, path in paths.items() if path.parent == folder and not path.is_dir()}
    if new & {WEIGHTS, INDEX}:
        old |= {INDEX, WEIGHTS, *(f.name for f in folder.glob("model-*-of-*.safetensors"))}
    for name in old - new:
        (folder / name).unlink(missing_ok=True)


def read_consistently(folder: Path, read: Callable[[Path], T]) -> T:
    """The result of `read(folder)`, read again if another thread or process saved into the folder meanwhile."""
    before = _save_stamp(finish_save(folder))
    try:
        result = read(folder)
        if _save_stamp(folder) == before:
            return result
    except (ValueError, FileNotFoundError):
        if _save_stamp(folder) == before:
            raise
    with folder_lock(folder):
        return read(finish_save(folder))


def _save_stamp(folder: Path) -> list[tuple[str, int, int]]:
    """A value that changes with each save into the folder."""
    stamps = []
    for path in (folder / CARD, folder / READY):
        with suppress(OSError):  # renamed by a save, inside a GGUF file's path, or a loop of links
            stat = path.stat()
            stamps.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return stamps
