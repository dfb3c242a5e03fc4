"""Keys and values that were computed before: one object for all layers, owned by the caller.

It is allocated once, at its full capacity, when a layer first writes to it. A token at position p
lies in slot p, so rows of unequal length need no shifting: padding (position -1) is written to a
slot of its own that nobody reads.
"""

# Shapes: B batch, T new tokens, S readable slots, K key/value heads, D head dim.

import torch
from torch import Tensor


class Cache:
    """Room for `capacity` positions in each of `batch` rows. Use it under `torch.no_grad()`.

    `start` gives new tokens their positions, each layer calls `put`, `where` says which position
    each readable slot holds, `advance` ends the forward. `keep` rolls back, `take` picks rows.
    """

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
            raise ValueError(f"{self.bound} tokens do not fit into a cache of {self.capacity}; make it larger")
        at = self.length[:, None] + real.long().cumsum(1) - 1
        return torch.where(real, at, -1)

    def put(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at positions `at`; return all readable ones (B, K, S, D)."""
        if layer == len(self.keys):
            for kept, new in ((self.keys, k), (self.values, v)):
                kept.append(new.new_zeros(self.batch, new.shape[1], self.capacity + 1, new.shape[3]))
        slot = torch.where(at >= 0, at, self.capacity)[:, None, :, None].expand_as(k)
        self.keys[layer].scatter_(2, slot, k)
        self.values[layer].scatter_(2, slot, v)
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

    def take(self, rows: Tensor) -> "Cache":
        """A new cache with these rows (N,) of this one, in this order; rows may repeat."""
        new = Cache(len(rows), self.capacity, self.length.device)
        new.length, new.bound = self.length[rows], self.bound
        new.keys = [k[rows] for k in self.keys]
        new.values = [v[rows] for v in self.values]
        return new
