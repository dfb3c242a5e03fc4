"""Find and open the files of an untrusted model folder, and permit imports of functions named in its model card.

Each file must be a regular file in that folder, and not be a placeholder for a download.
"""

import os
import re
import stat
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from dunes.context import bound

HEAD = 512
"""Number of bytes at the start of a file that are checked before the file is read."""

_AGAIN = "fetch the file again"
_STAND_INS = (
    (rb"version https://(git-lfs|hawser)\.github\.com/spec/", "a Git LFS pointer", "run git lfs pull"),
    (rb"# xet version ", "a Xet pointer", _AGAIN),
    (rb"/annex/objects/", "a git-annex pointer", "run git annex get"),
    (rb"\.\./\.\./blobs/", "the path in a link of the Hub's cache", _AGAIN),
)
"""Placeholders for files that were not fetched: pattern of the first bytes, name, and remedy."""
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)\b", re.IGNORECASE)
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2")
"""Suffixes of unfinished downloads."""
_trusted = ContextVar("trusted", default=False)


def trust_cards(trust: bool = True) -> AbstractContextManager[None]:
    """Permit, in this context and thread, the import of functions that model cards name (third-party code).

    The option `--trust-code` does the same. `trust=False` leaves the permission unchanged.
    """
    return bound(_trusted, trust or cards_trusted())


def cards_trusted() -> bool:
    """True inside `trust_cards`. Child processes do not inherit the permission."""
    return _trusted.get()


def find_file(folder: Path, name: str) -> Path | None:
    """The path of a file in a folder, or None if it does not exist. Raises ValueError like `require_inside`."""
    path = folder / name
    return require_inside(folder, path) if os.path.lexists(path) else None


def require_inside(folder: Path, path: Path, index: str = "") -> Path:
    """Return the path unchanged if it is a regular file below the folder and completely downloaded.

    The file may be a link within its own folder. In the Hub's cache, the file may also be a link into the folder
    `blobs` beside all snapshots. Raises ValueError for any other path, such as a link to another folder. `index`
    is the name of the file that lists this file, for the error message if this file is missing.
    """
    try:
        real, home = path.resolve(), folder.resolve()
        mode = real.stat().st_mode if real.exists() else None
    except (OSError, RuntimeError) as error:  # for a name that is too long, or a loop of links
        raise ValueError(f"{str(path)[:400]}: cannot be opened: {str(error)[:80]}") from None
    allowed = [home / path.relative_to(folder).parent]
    allowed += [p.parent / "blobs" for p in home.parents if p.name == "snapshots"]
    if real.parent not in allowed:
        raise ValueError(f"{path}: leads out of the folder, to {real}; put the file itself there")
    if mode is None:
        raise ValueError(f"{path}: no such file{f', but {index} lists it' if index else ''}; fetch it")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: not a regular file")
    if os.path.lexists(f"{path}.aria2"):  # aria2 allocates the full size first
        raise ValueError(f"{path}: an unfinished download, since {path.name}.aria2 exists; {_AGAIN}")
    return path


def listed_file(folder: Path, name: str, index: Path) -> Path:
    """The path of file `name`, which file `index` in the folder lists. Raises ValueError like `require_inside`."""
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable() or "\\" in name:
        printable = ascii(name[:80]) + "..." * (len(name) > 80)
        raise ValueError(f"{index}: {printable} is not the name of a file in this folder")
    return require_inside(folder, folder / name, index.name)


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises ValueError like `require_inside` and `require_content`."""
    with open_file(require_inside(path.parent, path)) as file:
        require_content(path, file)
        return file.read()


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ValueError if it is no regular file, and OSError if it cannot be opened."""
    # Checked before opening: a pipe blocks until its other end opens, and a device may do anything.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: not a regular file")
    return path.open("rb")


def require_content(path: Path, file: BinaryIO) -> None:
    """Raise ValueError if the file is empty, or begins like a placeholder, a web page or an unfinished download.

    The reader of the file's format checks the rest.
    """
    head = file.read(HEAD)
    file.seek(0)
    reason = stand_in(head)
    if not head.strip(b"\0"):
        reason = f"{'begins with zeros' if head else 'empty'}, like an unfinished download; {_AGAIN}"
    elif _PAGE.match(head):
        reason = f"a web page, perhaps an error message; {_AGAIN}"
    if reason:
        raise ValueError(f"{path}: {reason}")


def stand_in(head: bytes) -> str:
    """An error message with a remedy if a file with these first bytes is a placeholder; otherwise empty."""
    matches = ((name, remedy) for start, name, remedy in _STAND_INS if re.match(start, head))
    return next((f"{name}, not the file itself; {remedy}" for name, remedy in matches), "")


def unfinished_downloads(folder: Path) -> str:
    """The end of an error message: names an unfinished download in the folder; empty if there is none."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(UNFINISHED)) if folder.is_dir() else []
    return f"; {names[0]} is an unfinished download: {_AGAIN}" if names else ""
