"""A memory-mapped file, whose pages are read when a tensor's values are used.

The mapping is copy on write, as torch needs writable tensors; changes to them stay in this process.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dunes.files.model_file import open_file
from dunes.units import plural

# <https://man7.org/linux/man-pages/man2/mmap.2.html>; Python names it from 3.13 on
_NORESERVE = 0x4000
MAX_DIMS = 8
"""Most dimensions of a tensor."""


class MappedFile:
    """A regular file that tensors are views of. Raises ValueError for anything else at its path.

    The file is mapped once, for the first tensor. ValueError is raised if it changed before that; if it is
    truncated afterwards, the process is killed (SIGBUS), as with every mapped file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            self._stat = _identity(file)
        self.size = self._stat[0]

    def open(self) -> BinaryIO:
        """Open the file again. Raises ValueError if it has changed."""
        file = open_file(self.path)
        if _identity(file) != self._stat:
            file.close()
            raise ValueError(f"{self.path}: changed while it was being read; try again when nothing writes to it")
        return file

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor at `offset` bytes in the file, as a view of the mapping.

        `stride` counts elements and is contiguous by default. Tensors that are not aligned to their item size are
        copied, as are bool tensors, since a byte other than 0 and 1 is no valid bool in C++. Raises ValueError if
        the tensor is not within the file.
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
                f"{self.path}: a tensor of {shape} {dtype} with stride {steps} at byte {offset} exceeds the "
                f"file's {plural(self.size, 'byte')}; the file was truncated or is damaged: fetch it again"
            )
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - offset, offset=offset)
        if dtype is torch.bool:
            flat = flat != 0
        elif offset % dtype.itemsize:
            flat = flat.clone()
        # The stride of a dimension of size 1 may exceed int64. It is kept otherwise: torch takes the strides of
        # (4, 1, 5, 5) for `channels_last` if the second is 1.
        steps = tuple(step if size > 1 else min(step, self.size) for size, step in zip(shape, steps, strict=True))
        return flat.view(dtype).as_strided(shape, steps)

    def release(self) -> None:
        """Return the pages to the operating system, so that a file larger than memory can be streamed.

        Tensors stay valid and read their values from the file again; changes to them are lost. Does nothing on
        systems without `madvise`.
        """
        if "_map" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.open() as file:
            if sys.platform != "linux":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # Linux refuses a private writable mapping larger than memory unless no memory is reserved for it.
            return mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )


def shape_error(shape: Sequence[int]) -> str:
    """The reason why torch does not support a tensor of this shape; empty if it does."""
    if len(shape) > MAX_DIMS:
        return f"has {len(shape)} dimensions; at most {MAX_DIMS} are read"
    if min(shape, default=0) < 0:
        return "has a negative size"
    # Sizes of 0 count as 1, since torch multiplies the other sizes into 64-bit strides.
    if prod(max(size, 1) for size in shape) >= 1 << 59:
        return "has more elements than can be addressed"
    return ""


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of storage elements from a tensor's first element to its last; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))


def _identity(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
