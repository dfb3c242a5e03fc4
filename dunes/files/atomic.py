"""Atomic writes: after a crash either the old or the new version exists, complete.

Data is fsynced before it is renamed into place, and the rename before the call returns.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dunes.files.staging import staging_folder
from dunes.progress import advance, is_shown
from dunes.units import format_bytes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LARGE = 1e9
"""Bytes above which hashing takes seconds and gets a progress bar."""
DIGEST_BLOCK = 1 << 18
"""Elements of a tensor that are hashed at a time."""


def fsync_path(path: Path) -> None:
    """fsync a file or a folder."""
    with add_path_to_errors(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add this path to an OSError that names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # numpy's, when it cannot write a complete array
            raise OSError(errno.EIO, f"{error}; is the disk full?", str(path)) from None
        if error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def digest(
    path: Path, advance: Callable[[int], object] = lambda size: None, hasher: "hashlib._Hash | None" = None
) -> str:
    """SHA-256 of a file in hex, or the continuation of another hash; `advance` gets the size of each part."""
    hasher = hasher or hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
            advance(len(part))
    return hasher.hexdigest()


@contextmanager
def progress(task: str, size: int) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal for more than LARGE bytes; yields the function that advances it by bytes.

    If a phase is shown already, its display is advanced instead.
    """
    if size <= LARGE or is_shown():
        yield advance(size)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(task, total=size)
        yield lambda size_done: bar.advance(bar.task_ids[0], size_done)


def tensor_digests(
    tensor: "torch.Tensor", dtypes: "Sequence[torch.dtype]", block: int = DIGEST_BLOCK
) -> list[str]:
    """SHA-256 in hex of a tensor's bytes in each of the dtypes, computed in blocks that fit into the cache."""
    import torch  # `dunes complete` asks a server without torch

    hashes = [hashlib.sha256() for _ in dtypes]
    for part in torch.split(tensor.detach().cpu().contiguous().flatten(), block):
        for digest_of, dtype in zip(hashes, dtypes, strict=True):
            digest_of.update(part.to(dtype).view(torch.uint8).numpy().data)
    return [digest_of.hexdigest() for digest_of in hashes]


def write_file(path: Path, data: bytes) -> None:
    """Replace one file; the last of several writers wins."""
    replace_file(path, lambda staged: staged.write_bytes(data))


def replace_file(path: Path, write: Callable[[Path], T]) -> T:
    """`write_file` for a file that `write` creates at the path it receives; returns the result of `write`."""
    with add_path_to_errors(path), staging_folder(path) as staged:
        result = write(staged / "data")
        fsync_path(staged / "data")
        os.replace(staged / "data", path)
        fsync_path(path.parent)
    return result


def require_free_space(folder: Path, size: int) -> None:
    """Raise OSError if fewer than `size` bytes are free on the folder's disk."""
    for existing in (folder, *folder.absolute().parents):
        with suppress(FileNotFoundError):  # another process may be moving it
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

    `write_files` writes about `size` bytes into a staging folder; `publish` renames it when everything is on disk.
    Raises OSError, and leaves an existing folder untouched, if anything cannot be written.
    """
    with add_path_to_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(folder) as staged:
            require_free_space(folder, size + (1 << 16))  # after leftovers of dead writers were removed
            write_files(staged)
            for file in staged.iterdir():
                fsync_path(file)
            fsync_path(staged)
            publish(staged, folder)
            fsync_path(folder.parent)
