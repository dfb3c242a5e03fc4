"""Tensors that lie in files: known by name, shape and dtype before a single number is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from dunes.models.names import Conversion


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a file. `origin` says where it lies, for messages; `read` brings its numbers.

    `release` gives back the memory that a mapped file takes after reading; nobody may use the tensor then.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    read: Callable[[], Tensor]
    release: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes that the numbers take."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


Weights: TypeAlias = Mapping[str, LazyTensor]


def in_memory(tensors: Mapping[str, Tensor], origin: str = "memory") -> dict[str, LazyTensor]:
    """Tensors that are here already, as if they were stored."""
    return {
        key: LazyTensor(tuple(t.shape), t.dtype, f"{origin}: {key}", lambda t=t: t.detach())  # type: ignore[misc]
        for key, t in tensors.items()
    }


def renamed(moves: Iterable[Conversion], weights: Weights) -> dict[str, LazyTensor]:
    """The tensors that these moves make, made when they are read."""
    return {move.target: _made(move, [weights[s] for s in move.sources]) for move in moves}


def _made(move: Conversion, sources: list[LazyTensor]) -> LazyTensor:
    shape = tuple(move.make([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources]).shape)
    origin = ", ".join(s.origin for s in sources)

    def read() -> Tensor:
        return move.make([s.read() for s in sources]).contiguous()

    def release() -> None:
        for source in sources:
            source.release()

    return LazyTensor(shape, sources[0].dtype, origin, read, release)


def track_reads(weights: Weights, tick: Callable[[int], None]) -> dict[str, LazyTensor]:
    """The same tensors; `tick` is told the bytes of each when it is let go."""

    def release(stored: LazyTensor) -> None:
        stored.release()
        tick(stored.nbytes)

    return {k: replace(w, release=partial(release, w)) for k, w in weights.items()}


def cast(weights: Weights, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """The same tensors in another dtype."""
    return {
        key: LazyTensor(w.shape, dtype, w.origin, lambda w=w: w.read().to(dtype), w.release)  # type: ignore[misc]
        for key, w in weights.items()
    }
