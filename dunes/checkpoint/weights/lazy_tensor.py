"""Lazy tensors: shape and dtype are known before the values are read, as from the header of a file."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from dunes.models.names import Conversion, Names, to_theirs


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand. `origin` describes it in error messages; `read` returns its values.

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
    return {
        key: LazyTensor(tuple(t.shape), t.dtype, f"{origin}: {key}", lambda t=t: t.detach())  # type: ignore[misc]
        for key, t in tensors.items()
    }


def renamed(conversions: Iterable[Conversion], weights: Weights) -> dict[str, LazyTensor]:
    """The tensors under the names and in the layouts of the conversions, converted when read."""
    return {c.target: combine(c.make, [weights[source] for source in c.sources]) for c in conversions}


def hf_weights(names: Names, weights: Weights) -> dict[str, LazyTensor]:
    """A model's tensors under the names and in the layouts of another format, whose table has all of them."""
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
    """A lazy tensor that `read` computes from the sources; releasing it releases them all."""

    def release() -> None:
        for source in sources:
            source.release()

    return LazyTensor(shape, dtype, origin, read, release)


def track_reads(weights: Weights, tick: Callable[[int], None]) -> dict[str, LazyTensor]:
    """The same tensors, except that `tick` is called with a tensor's bytes when it is released."""

    def release(tensor: LazyTensor) -> None:
        tensor.release()
        tick(tensor.nbytes)

    return {k: replace(w, release=partial(release, w)) for k, w in weights.items()}


def cast(weights: Weights, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """The same tensors in another dtype."""
    return {
        key: LazyTensor(w.shape, dtype, w.origin, lambda w=w: w.read().to(dtype), w.release)  # type: ignore[misc]
        for key, w in weights.items()
    }
