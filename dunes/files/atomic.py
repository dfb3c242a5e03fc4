"""Atomic writes: after a crash, a file has either its complete old or its complete new content.

A file is fsynced before it is renamed into place, and the rename is fsynced before the call returns. Each writer
locks its own staging folder (flock). The lock ends with the writer's process; later writers remove the staging
folders of dead writers. On a disk shared by several machines, only processes of the same machine see the lock.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, TypeVar

from dunes.progress import Display, advance, is_shown, phase, shown_by
from dunes.units import format_bytes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
STAGED = ".dunes-{}.new"
KEPT, KEPT_SECONDS = ".dunes-kept-", 7 * 86_400
LARGE = 1e9
"""Size in bytes above which hashing shows a progress bar, since hashing more takes seconds."""
DIGEST_BLOCK = 1 << 18
"""Number of tensor elements that are hashed at a time; they fit into the CPU's cache."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_local = threading.local()


def cache_home() -> Path:
    """The folder for caches: $DUNES_HOME if set, otherwise the folder `dunes` in $XDG_CACHE_HOME or in ~/.cache.

    Raises ValueError if neither variable is set and the user has no home folder.
    """
    if home := os.environ.get("DUNES_HOME"):
        return Path(home)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return cache.expanduser() / "dunes"
    except RuntimeError:
        raise ValueError("this user has no home folder for caches; set DUNES_HOME to a folder") from None


@contextmanager
def open_handle(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or a folder and yield its file descriptor, which is closed afterwards."""
    handle = os.open(path, flags, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def folder_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Lock a folder or a file; the system releases the lock when the process ends.

    With `wait`, a thread may take a lock that it already has. Without `wait`, raises BlockingIOError if the folder
    is already locked, even by this thread.
    """
    # NFS locks only files that are open for writing.
    with open_handle(folder, os.O_RDONLY if folder.is_dir() else os.O_RDWR) as handle:
        status, locked = os.fstat(handle), _local.__dict__.setdefault("locked", set())
        key = os.getpid(), status.st_dev, status.st_ino
        if key in locked and wait:
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        locked.add(key)
        try:
            yield
        finally:
            locked.discard(key)
            fcntl.flock(handle, fcntl.LOCK_UN)  # otherwise a process forked meanwhile would keep the lock


@contextmanager
def staging_folder(path: Path, kept: str = "") -> Iterator[Path]:
    """Create a folder beside `path`, on the same disk, yield the folder, and remove it afterwards.

    Staging folders of dead writers beside `path` are removed first. For work that can be continued, pass a name as
    `kept`: the folder is then not removed, and the next writer that passes the same name gets the folder with its
    content.
    """
    with folder_lock(path.parent):
        # Another writer may have locked the first folder.
        for name in (f"kept-{kept}" if kept else token_hex(8), token_hex(8)):
            folder = path.with_name(STAGED.format(name))
            folder.mkdir(exist_ok=True)
            handle = os.open(folder, _OPEN)
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            os.close(handle)
        _clear(path.parent)
    try:
        yield folder
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _clear(parent: Path) -> None:
    """Remove dead writers' staging folders from `parent`; kept folders are removed after KEPT_SECONDS."""
    for folder in parent.glob(STAGED.format("*")):
        if folder.name.startswith(KEPT) and time() - folder.stat().st_mtime < KEPT_SECONDS:
            continue
        with suppress(OSError), open_handle(folder, _OPEN) as handle:  # locked, or owned by another user
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def fsync_path(path: Path) -> None:
    """Call fsync on a file or a folder."""
    with add_path_to_errors(path), open_handle(path) as handle:
        os.fsync(handle)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add this path to an OSError raised without a file name."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # numpy could not write a complete array
            raise OSError(errno.EIO, f"{error}; is the disk full?", str(path)) from None
        if error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def digest(path: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """The SHA-256 of a file in hex; `advance` is called with the size of each part read."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
            advance(len(part))
    return hasher.hexdigest()


@contextmanager
def progress(task: str, size: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal for more than LARGE bytes; yields a function that advances the bar.

    If the progress of a phase is shown already, the function advances that display instead.
    """
    if size <= LARGE or is_shown():
        yield advance(size)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with Display(console, quiet=not console.is_terminal) as bar, shown_by(bar.time_left), phase(task):
        yield advance(size)


def tensor_digests(
    tensor: "torch.Tensor", dtypes: "Sequence[torch.dtype]", block: int = DIGEST_BLOCK
) -> list[str]:
    """The SHA-256, in hex, of a tensor cast to each dtype, computed in blocks of `block` elements."""
    import torch  # imported late, since `dunes complete` with a server needs no torch

    hashes = [hashlib.sha256() for _ in dtypes]
    for part in torch.split(tensor.detach().cpu().contiguous().flatten(), block):
        for digest_of, dtype in zip(hashes, dtypes, strict=True):
            digest_of.update(part.to(dtype).view(torch.uint8).numpy().data)
    return [digest_of.hexdigest() for digest_of in hashes]


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to a file atomically; if several processes write it, the last one wins."""
    replace_file(path, lambda staged: staged.write_bytes(data))


def replace_file(path: Path, write: Callable[[Path], T]) -> T:
    """Replace a file atomically: `write` creates the new file at a temporary path. Returns `write`'s result."""
    with add_path_to_errors(path), staging_folder(path) as staged:
        result = write(staged / "data")
        fsync_path(staged / "data")
        os.replace(staged / "data", path)
        fsync_path(path.parent)
    return result


def require_free_space(folder: Path, size: int) -> None:
    """Raise OSError if fewer than `size` bytes are free on the folder's disk."""
    for existing in (folder, *folder.absolute().parents):
        with suppress(FileNotFoundError):  # another process may be moving the folder
            free = shutil.disk_usage(existing).free
            break
    if free < size:
        raise OSError(
            errno.ENOSPC, f"{format_bytes(size)} are needed and {format_bytes(free)} are free", str(folder)
        )


def write_folder(
    folder: Path, write_files: Callable[[Path], None], size: int, publish: Callable[[Path, Path], None] = os.rename
) -> None:
    """Create a folder atomically.

    `write_files` writes about `size` bytes into a staging folder; `publish` renames this folder after fsync.
    Raises OSError, and leaves an existing folder untouched, if anything cannot be written.
    """
    with add_path_to_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(folder) as staged:
            require_free_space(folder, size + (1 << 16))  # only now, since `staging_folder` freed space
            write_files(staged)
            for file in staged.iterdir():
                fsync_path(file)
            fsync_path(staged)
            publish(staged, folder)
            fsync_path(folder.parent)
