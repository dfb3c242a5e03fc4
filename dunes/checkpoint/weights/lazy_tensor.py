"""Lazy tensors: shape and dtype are known, for example from a file's header, before the values are read.

Pages of a memory-mapped file are read when a tensor's values are used. The mapping is copy on write, since torch
needs writable tensors; changes to the tensors stay in this process.
"""

import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
from torch import Tensor

from dunes.files.model_file import open_file, require_content
from dunes.models.names import Conversion, Names, to_theirs

# MAP_NORESERVE, which mmap has from Python 3.13 on: <https://man7.org/linux/man-pages/man2/mmap.2.html>
_NORESERVE = 0x4000
MAX_DIMS = 8
"""Maximum number of dimensions of a tensor."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand. `origin` describes the tensor in error messages; `read` returns its values.

    `release` frees the memory of a mapped file; tensors from `read` must not be used afterwards.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    read: Callable[[], Tensor]
    release: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


Weights: TypeAlias = Mapping[str, LazyTensor]


def in_memory(tensors: Mapping[str, Tensor], origin: str = "memory") -> dict[str, LazyTensor]:
    """Tensors in memory as lazy tensors."""
    return {k: LazyTensor(tuple(t.shape), t.dtype, f"{origin}: {k}", t.detach) for k, t in tensors.items()}


def renamed(conversions: Iterable[Conversion], weights: Weights) -> dict[str, LazyTensor]:
    """The tensors that the conversions make from `weights`, by their target names; a read converts the layout."""
    return {c.target: combine(c.make, [weights[source] for source in c.sources]) for c in conversions}


def hf_weights(names: Names, weights: Weights) -> dict[str, LazyTensor]:
    """A model's tensors with the names and layouts of another format; `names` must have every tensor's name."""
    conversions, unknown = to_theirs(names, weights)
    assert not unknown, "a family has a name for each of its weights"
    return renamed(conversions, weights)


def combine(make: Callable[[list[Tensor]], Tensor], sources: Sequence[LazyTensor]) -> LazyTensor:
    """A lazy tensor that `make` computes from the values of the sources."""
    shape = tuple(make([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources]).shape)
    origin, dtype = ", ".join(s.origin for s in sources), sources[0].dtype
    return computed(shape, dtype, origin, lambda: make([s.read() for s in sources]).contiguous(), sources)


def computed(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    origin: str,
    read: Callable[[], Tensor],
    sources: Collection[LazyTensor],
) -> LazyTensor:
    """A lazy tensor that `read` computes from the sources; releasing the tensor releases all sources."""

    def release() -> None:
        for source in sources:
            source.release()

    return LazyTensor(shape, dtype, origin, read, release)


def track_reads(weights: Weights, tick: Callable[[int], None]) -> dict[str, LazyTensor]:
    """The same tensors; releasing a tensor also calls `tick` with the tensor's size in bytes."""

    def release(tensor: LazyTensor) -> None:
        tensor.release()
        tick(tensor.nbytes)

    return {k: replace(w, release=partial(release, w)) for k, w in weights.items()}


def cast(weights: Weights, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """The same tensors, cast to another dtype when they are read."""
    read = lambda tensor: tensor.read().to(dtype)
    return {key: replace(w, dtype=dtype, read=partial(read, w)) for key, w in weights.items()}


class MappedFile:
    """A memory-mapped file whose tensors are views of the mapping. Raises ValueError if the file is not a regular
    file.

    The file is mapped once, when its first tensor is read. Raises ValueError if the file has changed by then. If
    the file is truncated later, the process is killed (SIGBUS), as with every mapped file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            self._stat = _identity(file)
        self.size = self._stat[0]

    def open(self) -> BinaryIO:
        """Open the file again. Raises ValueError if the file has changed."""
        file = open_file(self.path)
        if _identity(file) != self._stat:
            file.close()
            raise ValueError(f"{self.path}: changed while it was being read; try again when nothing writes to it")
        return file

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor at `offset` bytes in the file, as a view of the mapping.

        `stride` counts elements; by default, the tensor is contiguous. Tensors that are not aligned to their item
        size are copied. Bool tensors are also copied, since a byte other than 0 and 1 is no valid bool in C++. The
        caller must check that the tensor lies within the file.
        """
        shape = tuple(shape)
        steps = torch.empty(shape, device="meta").stride() if stride is None else tuple(stride)
        count = extent(shape, steps)
        end = offset + count * dtype.itemsize
        assert 0 <= offset <= end <= self.size, "the caller has compared offset and size"
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - offset, offset=offset)
        if dtype is torch.bool:
            flat = flat != 0
        elif offset % dtype.itemsize:
            flat = flat.clone()
        # The stride of a dimension of size 1 may exceed int64, so it is bounded. The bound is not 1, since torch
        # would take a tensor of shape (4, 1, 5, 5) for `channels_last` if its second stride were 1.
        steps = tuple(step if size > 1 else min(step, self.size) for size, step in zip(shape, steps, strict=True))
        return flat.view(dtype).as_strided(shape, steps)

    def release(self) -> None:
        """Return the pages to the operating system, so that a file larger than memory can be streamed.

        Tensors stay valid and read their values from the file again; changed values are lost. Does nothing on
        systems without `madvise`.
        """
        if "_map" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def lazy(
        self,
        name: str,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> LazyTensor:
        """A lazy tensor that reads `tensor(offset, shape, dtype, stride)`; `name` is for error messages."""
        read = partial(self.tensor, offset, shape, dtype, stride)
        return LazyTensor(shape, dtype, f"{self.path.name}: {name}", read, self.release)

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.open() as file:
            if sys.platform != "linux":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # Without MAP_NORESERVE, Linux refuses a private writable mapping that is larger than memory.
            return mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )


@contextmanager
def open_mapped(path: Path, remedy: str) -> Iterator[tuple[MappedFile, BinaryIO]]:
    """Yield a mapped file, and the same file opened for reading. Raises ValueError if the file is a placeholder, a
    web page or an unfinished download.

    The message of a ValueError inside the context becomes one line for users, which ends with `remedy`.
    """
    mapped = MappedFile(path)
    with mapped.open() as file:
        require_content(path, file)
        try:
            yield mapped, file
        except ValueError as error:
            raise ValueError(f"{path}: refused: {str(error).removeprefix(f'{path}: ')}; {remedy}") from None


def shape_error(shape: Sequence[int]) -> str:
    """The reason why a tensor of this shape is not supported; empty if it is supported."""
    if len(shape) > MAX_DIMS:
        return f"has {len(shape)} dimensions; at most {MAX_DIMS} are read"
    # Sizes of 0 count as 1, since torch multiplies the other sizes into 64-bit strides.
    if prod(max(size, 1) for size in shape) >= 1 << 59:
        return "has more elements than can be addressed"
    return ""


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of storage elements from a tensor's first element to its last; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))


def _identity(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
