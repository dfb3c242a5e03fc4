"""The card of a model folder (`dunes.json`, which lists the files' digests), and atomic saves into a folder."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dunes import __version__
from dunes.checkpoint.weights.safetensors_file import INDEX, quote
from dunes.checkpoint.weights.safetensors_file import SINGLE as WEIGHTS
from dunes.files import atomic, json_file
from dunes.files.atomic import folder_lock
from dunes.files.model_file import find_file, listed_file
from dunes.units import plural

CARD = "dunes.json"
FORMAT = 3
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
UNFINISHED = ".unfinished"
"""Subfolder with parts of a model that a running `dunes augment` has finished, such as quantized blocks."""
READY = ".ready"
"""Subfolder of a complete save whose files are being renamed into place."""
T = TypeVar("T")


def ready_folder(folder: Path) -> Path:
    """The path of a folder's `.ready` subfolder. Raises ValueError if the subfolder is a symbolic link."""
    if (folder / READY).is_symlink():
        raise ValueError(f"{folder / READY}: a symbolic link, not a folder created by dunes; remove it")
    return folder / READY


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
        raise ValueError(f"{folder / CARD}: format {quote(number)}, but this version reads {FORMAT}; {remedy}")
    return card


def listed_files(folder: Path, card: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that a card lists. Raises ValueError for a damaged card."""
    files = card.get("files", None if card else {})
    entries = files.values() if isinstance(files, dict) else [None]
    if any(not isinstance(e, dict) or (type(e.get("size")), type(e.get("sha256"))) != (int, str) for e in entries):
        raise ValueError(f"{folder / CARD}: 'files' must have size and sha256 of each file, or be {{}}")
    return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}


def verified_card(folder: Path, max_bytes: float = atomic.LARGE) -> dict[str, Any]:
    """Call `finish_save`, and return the folder's card, or {}. Raises ValueError for a file that differs from its
    entry.

    An entry has the name, size and SHA-256 of a plain file in the folder. SHA-256 is compared only if all files
    have at most `max_bytes` in total.
    """
    card = read_card(finish_save(folder))
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


def finish_save(folder: Path) -> Path:
    """Finish a save that was interrupted after its files were written, or wait for a save in progress.

    Returns the folder. Raises OSError if renaming fails, and ValueError if `.ready` is a symbolic link.
    """
    ready = ready_folder(folder)
    if (ready / CARD).is_file() or (ready.is_dir() and not any(ready.iterdir())):
        with folder_lock(folder):
            place_files(folder)
    return folder


def place_files(folder: Path) -> None:
    """Move the files of `.ready` into the folder, the card last. The caller must hold the folder's lock."""
    if not (ready := ready_folder(folder)).is_dir():
        return
    _remove_old(folder, ready)
    for file in sorted(ready.iterdir(), key=lambda file: file.name == CARD):
        if file.name == CARD:  # the card must reach the disk after the files that it lists
            atomic.fsync_path(folder)
        os.replace(file, folder / file.name)
    atomic.fsync_path(folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    ready.rmdir()
    atomic.fsync_path(folder)


def _remove_old(folder: Path, ready: Path) -> None:
    """Remove an older save's files that are not part of the new save."""
    new, old = {f.name for f in ready.iterdir()} | {*listed_files(ready, read_card(ready))}, set[str]()
    if CARD in new:
        with suppress(ValueError):  # raised if the older card is damaged
            paths = {name: folder / name for name in listed_files(folder, read_card(folder)) if name != ".."}
            old = {name for name, path in paths.items() if path.parent == folder and not path.is_dir()}
    if new & {WEIGHTS, INDEX}:
        old |= {INDEX, WEIGHTS, *(f.name for f in folder.glob("model-*-of-*.safetensors"))}
    for name in old - new:
        (folder / name).unlink(missing_ok=True)


def read_consistently(folder: Path, read: Callable[[Path], T]) -> T:
    """The result of `read(folder)`; calls `read` again if another thread or process saved into the folder
    meanwhile.
    """
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
        with suppress(OSError):  # a save is renaming the file, `folder` is a GGUF file, or links form a loop
            stat = path.stat()
            stamps.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return stamps


def has_own_form(card: Mapping[str, Any]) -> bool:
    """True if a card records a model that no Hugging Face config describes."""
    return isinstance(card.get("family"), dict) or isinstance(card.get("structure"), dict)


def write_files(folder: Path, fill: Callable[[Path], None], size: int) -> None:
    """Write about `size` bytes of files into a folder atomically; `fill` writes them into a temporary folder.

    Several processes may save at once; the last to finish wins.
    """
    finish_save(folder)
    atomic.write_folder(ready_folder(folder), fill, size, _publish)


def _publish(staged: Path, ready: Path) -> None:
    """Rename the temporary folder to `.ready`, and then its files into place."""
    with folder_lock(ready.parent):
        place_files(ready.parent)  # finishes a save that was interrupted earlier
        os.rename(staged, ready)
        atomic.fsync_path(ready.parent)
        place_files(ready.parent)


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the card of a folder whose files are complete, with `facts` and each file's size and SHA-256."""
    files = {
        f.name: {"size": f.stat().st_size, "sha256": atomic.digest(f)}
        for f in sorted(folder.iterdir())
        if f.name != CARD
    }
    card = {"format": FORMAT, "dunes": __version__, **facts, "files": files}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n")


@contextmanager
def exclusive_folder(out: Path) -> Iterator[None]:
    """Context in which `out` exists and is locked; if the body raises, folders created here are removed.

    Raises ValueError if another process has the lock.
    """
    created = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out, wait=False), ExitStack() as stack:
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)  # a killed process may have left it
            stack.callback(shutil.rmtree, out / UNFINISHED, ignore_errors=True)
            yield
    except BlockingIOError:
        raise ValueError(f"{out}: another process is writing there; wait for it or choose another name") from None
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


def require_new_folder(source: Path, out: Path) -> None:
    """Raise ValueError if `out` is a file or a non-empty folder, or if `out` or the source contains the other."""
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"{out}: source and result must not contain each other; choose another folder")
    existing = next(p for p in (out, *out.absolute().parents) if p.exists() or p.is_symlink())
    if not existing.is_dir():
        raise ValueError(f"{existing}: exists and is not a folder; choose another name")
    ready = out / READY
    if links := [path for path in (ready, out / UNFINISHED) if path.is_symlink()]:
        raise ValueError(f"{links[0]}: a symbolic link, not a folder created by dunes; remove it")
    if ready.is_dir():
        with folder_lock(out):  # another process may be renaming the files.
            # Remove a complete save if none of its files was renamed into place yet; otherwise finish it.
            shutil.rmtree(ready) if _empty(out) and (ready / CARD).is_file() else finish_save(out)
    if out.exists() and (ready.exists() or not _empty(out)):
        raise ValueError(f"{out}: exists already; choose another name, or remove it")


def _empty(path: Path) -> bool:
    """True if the folder is empty except for hidden files, since an interrupted conversion leaves hidden files."""
    return all(p.name.startswith(".") for p in path.iterdir())
