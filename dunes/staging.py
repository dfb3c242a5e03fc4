"""Places to write in before a name is given: each writer has its own, and those of the dead are removed.

A lock on a folder (flock) tells the living from the dead. Every file system grants it among the threads and
processes of one machine; on a disk that several machines share, only those of one machine see each other.
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
_mine = threading.local()


@contextmanager
def folder_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder or a file, which a process that dies lets go by itself.

    A thread that holds it may ask for it again. Raises BlockingIOError where it is held and `wait` is False.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        seen, held = os.fstat(handle), _mine.__dict__.setdefault("held", set())
        key = os.getpid(), seen.st_dev, seen.st_ino
        if key in held and wait:
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held.add(key)
        try:
            yield
        finally:
            held.discard(key)
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the handle, too
    finally:
        os.close(handle)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, on the same disk; at the end it is removed with what was not moved away.

    What writers that died have left beside `path` is removed first.
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
    """Remove what writers that died have left in a folder."""
    for folder in parent.glob(STAGED.format("*")):
        with suppress(OSError):  # held, or somebody else's
            handle = os.open(folder, _OPEN)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
