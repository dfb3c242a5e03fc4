"""Keys and values that were computed before: one object for all layers, owned by the caller.

It is allocated once, at its full capacity, when a layer first writes to it. A token at position p
lies in slot p, or in a rolling cache in slot p modulo the slots, so rows of unequal length need no
shifting: padding (position -1) is written to a slot of its own that nobody reads.
"""

# Shapes: B batch, T new tokens, S readable slots, K key/value heads, D head dim.

import copy
from typing import Self

import torch
from torch import Tensor

from dunes.plural import plural


class Cache:
    """Room for `capacity` positions in each of `batch` rows. Use it under `torch.no_grad()`.

    `start` gives new tokens their positions, each layer calls `put`, `where` says which position
    each readable slot holds, `advance` ends the forward. `keep` rolls back, `take` picks rows.
    """

    reach: int | None = None
    """How many positions back a layer may look; None: all."""

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.batch, self.capacity = batch, capacity
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        # No row is longer than this: known without asking the device.
        self.bound = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def readable(self) -> int:
        """Slots to read: a power of two, so that a short sequence is cheap and few shapes occur."""
        return min(self.capacity, max(64, 1 << (self.bound - 1).bit_length()))

    def start(self, real: Tensor) -> Tensor:
        """Positions (B, T) for the tokens that are `real` (B, T, bool); -1 where they are padding.

        Raises ValueError when they do not fit into the capacity.
        """
        self.bound += real.shape[1]
        if self.bound > self.capacity:
            self.bound = int((self.length + real.sum(1)).max())  # the bound may be above the truth
        if self.bound > self.capacity:
            raise ValueError(
                f"{plural(self.bound, 'token does', 'tokens do')} not fit into a cache of "
                f"{self.capacity}; make it larger"
            )
        return self._positions(real)

    def _positions(self, real: Tensor) -> Tensor:
        at = self.length[:, None] + real.long().cumsum(1) - 1
        return torch.where(real, at, -1)

    def put(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at positions `at`; return all readable ones (B, K, S, D)."""
        self._write(layer, k, v, torch.where(at >= 0, at, self.capacity))
        return self._read(layer)

    def _write(self, layer: int, k: Tensor, v: Tensor, slot: Tensor) -> None:
        if layer == len(self.keys):
            for kept, new in ((self.keys, k), (self.values, v)):
                kept.append(new.new_zeros(self.batch, new.shape[1], self.capacity + 1, new.shape[3]))
        slot = slot[:, None, :, None].expand_as(k)
        self.keys[layer].scatter_(2, slot, k)
        self.values[layer].scatter_(2, slot, v)

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:, :, : self.readable], self.values[layer][:, :, : self.readable]

    def where(self, last: Tensor) -> Tensor:
        """The position (B, S) in each readable slot when each row's newest position is `last` (B,).

        -1 in slots that hold nothing of the row.
        """
        slots = torch.arange(self.readable, device=last.device)
        return torch.where(slots <= last[:, None], slots, -1)

    def advance(self, n: Tensor) -> None:
        """The forward is over: each row is longer by `n` (B,) tokens."""
        self.length += n

    def keep(self, n: Tensor) -> Tensor:
        """Forget all but the first `n` (B,) tokens of each row; returns how many could be kept."""
        self.length.copy_(torch.minimum(self.length, n.to(self.length)))
        self.bound = int(self.length.max())
        return self.length.clone()

    def take(self, rows: Tensor) -> Self:
        """A new cache with these rows (N,) of this one, in this order; rows may repeat."""
        new = copy.copy(self)
        new.batch, new.length = len(rows), self.length[rows]
        new.keys = [k[rows] for k in self.keys]
        new.values = [v[rows] for v in self.values]
        return new

    def write_rows(self, rows: Tensor, other: Self) -> None:
        """Replace these rows (N,) by those of another cache, which `take` made of them: the inverse of `take`."""
        self.length[rows] = other.length
        self.bound = int(self.length.max())
        for kept, new in zip(self.keys + self.values, other.keys + other.values, strict=True):
            kept[rows] = new


class IdCache(Cache):
    """Remembers ids in the place of keys and values: for models that have to see a text whole each time."""

    def put_ids(self, ids: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Write ids (B, T) at positions `at`; return all of them and their positions (B, S), -1 where none is."""
        if not self.keys:
            self.keys = [ids.new_zeros(self.batch, self.capacity + 1)]
        self.keys[0].scatter_(1, torch.where(at >= 0, at, self.capacity), ids)
        last = torch.maximum(at.amax(1), self.length - 1)
        return self.keys[0][:, : self.readable], self.where(last)


class Rolling(Cache):
    """The last `window` positions of each row and `slack` more, in memory that does not grow with the text.

    For models whose every layer has a window, of at most this size. `slack` is what `keep` can take
    back from a text that is longer than the memory.
    """

    def __init__(self, batch: int, window: int, device: torch.device | str = "cpu", slack: int = 16) -> None:
        super().__init__(batch, window + slack, device)
        self.reach, self.slack = window, slack
        # One past the furthest position ever written in each row: what was rolled back still lies in its slot.
        self.high = torch.zeros_like(self.length)
        self._beside: Tensor | None = None
        self._empty = True

    def start(self, real: Tensor) -> Tensor:
        """Positions (B, T) for the tokens that are `real` (B, T, bool); -1 for padding. They always fit."""
        at = self._positions(real)
        self._empty = self.bound == 0
        self.bound += real.shape[1]
        # A single token takes the place of one that nobody sees any more. Of several, the first would
        # still see what the last replaces, so they are read beside the slots.
        self._beside = at if real.shape[1] > 1 else None
        return at

    def put(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at positions `at`; return all readable ones (B, K, S, D)."""
        read = k, v
        if self._beside is not None and not self._empty:
            read = torch.cat([self._read(layer)[0], k], 2), torch.cat([self._read(layer)[1], v], 2)
        stays = (at >= 0) & (at > at.amax(1, keepdim=True) - self.capacity)
        self._write(layer, k, v, torch.where(stays, at % self.capacity, self.capacity))
        return self._read(layer) if self._beside is None else read

    def where(self, last: Tensor) -> Tensor:
        """The position (B, S) in each readable slot when each row's newest position is `last` (B,).

        -1 in slots that hold nothing of the row. New tokens that are read beside the slots follow them.
        """
        if self._beside is None:
            return self._held(last)
        return self._beside if self._empty else torch.cat([self._held(self.length - 1), self._beside], 1)

    def _held(self, last: Tensor) -> Tensor:
        slots = torch.arange(self.readable, device=last.device)
        return (last[:, None] - (last[:, None] - slots) % self.capacity).clamp(min=-1)

    def advance(self, n: Tensor) -> None:
        """The forward is over: each row is longer by `n` (B,) tokens."""
        super().advance(n)
        self.high = torch.maximum(self.high, self.length)

    def keep(self, n: Tensor) -> Tensor:
        """Forget all but the first `n` (B,) tokens of each row; returns how many could be kept.

        A row that was ever longer than the memory can lose its last `slack + 1` tokens and keep the
        others; where more is asked it keeps none (0), and has to be read again.
        """
        n = torch.minimum(self.length, n.to(self.length))
        possible = (self.high <= self.capacity) | (self.high - n <= self.slack + 1)
        kept = super().keep(torch.where(possible, n, 0))
        self.high = torch.where(kept == 0, 0, self.high)
        return kept

    def take(self, rows: Tensor) -> Self:
        """A new cache with these rows (N,) of this one, in this order; rows may repeat."""
        new = super().take(rows)
        new.high = self.high[rows]
        return new

    def write_rows(self, rows: Tensor, other: Self) -> None:
        """Replace these rows (N,) by those of another cache, which `take` made of them: the inverse of `take`."""
        super().write_rows(rows, other)
        self.high[rows] = other.high
