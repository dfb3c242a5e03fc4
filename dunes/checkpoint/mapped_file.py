"""A file in memory without being read: its pages come when a tensor's numbers are used.

The mapping is copy on write. Tensors must be writable for torch, and what is written stays in this process.
"""

import mmap
import os
import stat
import sys
from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dunes.plural import plural

# <https://man7.org/linux/man-pages/man2/mmap.2.html>; Python names it from 3.13 on
_NORESERVE = 0x4000
RANK = 8
"""The most dimensions of a tensor that is read."""


class MappedFile:
    """A regular file of which tensors are views. Raises ValueError for anything else at its path.

    Nothing is mapped before the first tensor is asked for, and then once for all. The file must stay as it
    was found here: a change before the mapping is a ValueError, but one that is cut afterwards takes the
    process with it (SIGBUS), as with every mapped file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            self._found = _identity(file)
        self.size = self._found[0]

    def open(self) -> BinaryIO:
        """The same file, to read from its begin. Raises ValueError if it is another by now."""
        file = _opened(self.path)
        if _identity(file) != self._found:
            file.close()
            raise ValueError(f"{self.path}: changed while it was being read; try again when its writer is done")
        return file

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Tensor:
        """Numbers that begin `offset` bytes into the file, as a view of the mapping.

        `stride` counts numbers, not bytes, and is that of a contiguous tensor if not given. Copied are only
        tensors that do not begin at a multiple of their item's size, and bool: a byte other than 0 and 1 is
        no bool for C++. Raises ValueError if it does not lie in the file.
        """
        shape = tuple(shape)
        reason = shape_error(shape)
        if reason:
            raise ValueError(f"{self.path}: a tensor at byte {offset} {reason}")
        steps = torch.empty(shape, device="meta").stride() if stride is None else tuple(stride)
        count = extent(shape, steps)
        end = offset + count * dtype.itemsize
        if len(steps) != len(shape) or min(steps, default=0) < 0 or not 0 <= offset <= end <= self.size:
            raise ValueError(
                f"{self.path}: a tensor of {shape} {dtype} with stride {steps} at byte {offset} does not lie in "
                f"the file's {plural(self.size, 'byte')}; the file was cut or is damaged: fetch it again"
            )
        if not count:
            return torch.empty(shape, dtype=dtype)
        numbers = torch.frombuffer(self._map, dtype=torch.uint8, count=end - offset, offset=offset)
        if dtype is torch.bool:
            numbers = numbers != 0
        elif offset % dtype.itemsize:
            numbers = numbers.clone()
        # A dimension of 1 is never stepped along, so that its stride may be any number, even one no int64 holds.
        steps = tuple(step if size > 1 else 1 for size, step in zip(shape, steps, strict=True))
        return numbers.view(dtype).as_strided(shape, steps)

    def release(self) -> None:
        """Give the pages back to the system, so that a file greater than memory can pass through.

        Tensors stay valid and read their numbers from the file again. Only for tensors that nobody wrote into:
        what was written is lost. Does nothing where the system has no such call.
        """
        if "_map" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.open() as file:
            if sys.platform != "linux":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # A private writable map counts as memory: Linux refuses one greater than memory unless it is told
            # to reserve nothing.
            return mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )


def shape_error(shape: Sequence[int]) -> str:
    """Why torch could not hold a tensor of this shape, in words; empty if it could."""
    if len(shape) > RANK:
        return f"has {len(shape)} dimensions; at most {RANK} are read"
    if min(shape, default=0) < 0:
        return "has a negative size"
    # Also where one size is 0: torch multiplies the others into strides of 64 bits.
    if prod(max(size, 1) for size in shape) >= 1 << 59:
        return "has more numbers than can be addressed"
    return ""


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many numbers lie between the first and the last of a tensor, both included; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))


def _opened(path: Path) -> BinaryIO:
    try:
        # Before it is opened: opening a pipe waits for its other end, and opening a device may do anything.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path}: not a regular file")
        return path.open("rb")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened: {error.strerror}") from None


def _identity(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev
