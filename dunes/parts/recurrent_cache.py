"""A KV cache that also stores recurrent states, and snapshots of them, from which `truncate` continues."""

from collections.abc import Hashable
from typing import Self

import torch
from torch import Tensor

from dunes.parts.cache import Cache

INTERVAL = 128
"""Number of tokens between two snapshots."""
SNAPSHOTS = 16
"""Number of snapshots of each row; the oldest is overwritten."""


class RecurrentCache(Cache):
    """A cache for models with recurrent states, which forget the tokens that they have read.

    `states` are tensors (B, ...), one for each name that `state` was called with, and `snapshots` (B, SNAPSHOTS,
    ...) are earlier ones. Layers without keys and values take no memory for them.
    """

    row_state = ("length", "snapshot_lengths")
    stored = ("keys", "values", "states", "snapshots")
    largest_piece = INTERVAL

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(batch, capacity, device)
        self.states: list[Tensor] = []
        self.snapshots: list[Tensor] = []
        # Tokens that each snapshot has read; 0 for none.
        self.snapshot_lengths = torch.zeros(batch, SNAPSHOTS, dtype=torch.long, device=device)
        self._next, self._new = 0, 0
        self._numbers: dict[Hashable, int] = {}
        self._layers: dict[int, int] = {}

    def state(self, name: Hashable, initial: Tensor) -> Tensor:
        """The state (B, ...) of this name, to be changed in place; at first a copy of `initial`, which is zero."""
        number = self._numbers.setdefault(name, len(self.states))
        if number == len(self.states):
            self.states.append(initial.clone())
            self.snapshots.append(initial.new_zeros(len(initial), SNAPSHOTS, *initial.shape[1:]))
        return self.states[number]

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D) at `positions`; return all readable keys and values (B, K, S, D)."""
        return super().put(self._layers.setdefault(layer, len(self.keys)), k, v, positions)

    def write_rows(self, rows: Tensor | slice, other: Self) -> None:
        """Copy the N rows of another cache to these rows (N,) of this cache: the inverse of `select_rows`."""
        super().write_rows(rows, other)
        self._next, self._new = other._next, other._new  # else the rows would overwrite one snapshot

    def _count(self, new: int | Tensor) -> None:
        super()._count(new)
        self._new += new if isinstance(new, int) else new.shape[1]

    def advance(self, n: Tensor) -> None:
        """End the forward: add the numbers of new tokens `n` (B or 1,) to the rows' lengths."""
        super().advance(n)
        if self._new < INTERVAL:
            return
        for state, snapshots in zip(self.states, self.snapshots, strict=True):
            snapshots[:, self._next] = state
        self.snapshot_lengths[:, self._next] = self.length
        self._next, self._new = (self._next + 1) % SNAPSHOTS, 0

    def truncate(self, n: Tensor) -> Tensor:
        """Keep at most the first `n` (B,) tokens of each row. Returns the number of tokens (B,) that remain.

        A row that has to drop tokens continues from its last snapshot that has none of them, or is emptied; the
        caller must evaluate the tokens after it again.
        """
        n = torch.minimum(self.length, n.to(self.length))
        usable = torch.where(self.snapshot_lengths <= n[:, None], self.snapshot_lengths, 0)
        length, number = usable.max(1)
        drops = (n < self.length) | (n == 0)  # an interrupted forward leaves states in an empty row
        for state, snapshots in zip(self.states, self.snapshots, strict=True):
            earlier = snapshots[torch.arange(self.batch), number]
            earlier[length == 0] = 0
            state[drops] = earlier[drops]
        remaining = super().truncate(torch.where(drops, length, n))
        self.snapshot_lengths.masked_fill_(self.snapshot_lengths > remaining[:, None], 0)
        return remaining
