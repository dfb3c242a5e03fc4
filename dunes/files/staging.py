"""Staging folders, one for each writer; folders of dead writers are removed.

A writer locks its folder (flock), and the lock ends with the process. On a disk shared by several machines, the
lock is visible only to processes of the same machine.
"""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

STAGED = ".dunes-{}.new"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_local = threading.local()


def cache_home() -> Path:
    """$DUNES_HOME, or a folder in the user's cache folder. Raises ValueError for a user without a home."""
    if home := os.environ.get("DUNES_HOME"):
        return Path(home)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return cache.expanduser() / "dunes"
    except RuntimeError:
        raise ValueError("this user has no home folder for caches; set DUNES_HOME to a folder") from None


@contextmanager
def folder_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Lock a folder or a file; the system releases the lock when the process ends.

    The lock is reentrant. Raises BlockingIOError if another thread or process has it and `wait` is False.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
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
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the handle, too
    finally:
        os.close(handle)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, on the same disk, removed at the end.

    Folders of dead writers beside `path` are removed first.
    """
    with folder_lock(path.parent):
        _clear(path.parent)
        folder = path.with_name(STAGED.format(token_hex(8)))
        folder.mkdir()
        handle = os.open(folder, _OPEN)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _clear(parent: Path) -> None:
    """Remove the staging folders of dead writers."""
    for folder in parent.glob(STAGED.format("*")):
        with suppress(OSError):  # locked, or another user's
            handle = os.open(folder, _OPEN)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
