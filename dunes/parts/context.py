"""What all layers of one forward share: the positions, the cache, and what follows from them."""

# Shapes: B batch, T new tokens, S readable keys, K key/value heads, D head dim.

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.ops.attention import Bands, bands
from dunes.parts.cache import Cache


class Context:
    """Made once per forward and passed to every block.

    `at` holds positions (B or 1, T), -1 for padding. Without a cache, a position that does not
    follow its neighbour's begins another document, which sees only itself: that is how packed
    examples stay apart. In a single row `begins` (T,) may say where each token's document does; T is then
    a multiple of `ops.attention.BAND`.
    """

    def __init__(
        self,
        at: Tensor,
        cache: Cache | None = None,
        consecutive: bool = False,
        begins: Tensor | None = None,
    ) -> None:
        self.at, self.cache, self.begins = at, cache, begins
        # The usual case in training, known without looking at the tensor: 0..T-1 in every row.
        self.consecutive = consecutive
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, ids: Tensor, at: Tensor | None = None, cache: Cache | None = None) -> "Context":
        """For tokens or states whose first two dimensions are (B, T); positions 0..T-1 unless given."""
        if cache is not None:
            if at is None:
                at = cache.start(torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device))
            return cls(at, cache)
        if at is not None:
            return cls(at)
        return cls(torch.arange(ids.shape[1], device=ids.device)[None], consecutive=True)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, computed by the first layer that asks and shared by the others."""
        if torch.compiler.is_compiling():
            return make()  # a checkpointed block may write to nothing outside of it, and equal terms become one
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, D) that this layer can read: the new ones, or all in the cache."""
        return (k, v) if self.cache is None else self.cache.put(layer, k, v, self.at)

    def mask(self, window: int | None = None) -> Tensor | None:
        """True (B, T, S) where a query may look; None if query t sees exactly keys 0..t.

        With a window, a query sees that many keys, itself included. Raises ValueError if the cache
        does not remember as many.
        """
        if self.consecutive and (window is None or window >= self.at.shape[1]):
            return None
        mask: Tensor = self.once(("mask", window), lambda: self._mask(window))
        return mask

    def _mask(self, window: int | None) -> Tensor:
        reach = None if self.cache is None else self.cache.reach
        if reach is not None and (window is None or window > reach):
            raise ValueError(f"a rolling cache of {reach} positions, but a layer sees {window or 'all'} of them")
        query = self.at[:, :, None]
        key = self.at if self.cache is None else self.cache.where(self.at.amax(1))
        key = key[:, None, :]
        seen = (key >= 0) & (key <= query)
        if window is not None:
            seen &= key > query - window
        if self.cache is None:
            document = (self.at.diff(prepend=self.at[:, :1]) != 1).cumsum(1)
            seen &= document[:, :, None] == document[:, None, :]
        # Padding sees something, whatever it is: a softmax over nothing would be NaN.
        return seen | (query < 0)

    def bands(self, dtype: torch.dtype, window: int | None) -> list[Bands]:
        """The same where `begins` says it."""
        assert self.begins is not None
        begins = self.begins
        made: list[Bands] = self.once(("bands", dtype, window), lambda: bands(begins, dtype, window))
        return made

    def close(self) -> None:
        """The forward is over: the cache, if there is one, now holds the new tokens."""
        if self.cache is not None:
            self.cache.advance((self.at >= 0).sum(1))


def documents(at: Tensor) -> Tensor:
    """Of tokens at positions (B, T), all but padding in a row (N,): where in it the document of each begins."""
    before = F.pad(at[:, :-1], (1, 0), value=-1)
    fresh = ((before < 0) | (at != before + 1))[at >= 0]
    place = torch.arange(len(fresh), device=at.device)
    return torch.where(fresh, place, 0).cummax(0).values


def at_hand(x: Tensor) -> bool:
    """Whether the numbers can be looked at without waiting for a device, and are there at all."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
