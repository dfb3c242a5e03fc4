"""A KV cache that also stores recurrent states, and snapshots of these states, which `truncate` restores."""

from collections.abc import Hashable
from typing import Self

import torch
from torch import Tensor

from dunes.parts.cache import Cache, readable_on_host

INTERVAL = 128
"""Number of tokens between two snapshots."""
SNAPSHOTS = 16
"""Number of snapshots of each row; the oldest is overwritten."""


class RecurrentCache(Cache):
    """A cache for models with recurrent states; since states cannot drop tokens, `truncate` restores snapshots.

    `states` contains one tensor (B, ...) for each name that `state` was called with, and `snapshots` (B,
    SNAPSHOTS, ...) are earlier states. Only layers with attention take memory for keys and values.
    """

    row_state = ("length", "snapshot_lengths", "unsaved", "next_snapshot", "unfinished")
    stored = ("keys", "values", "states", "snapshots")
    largest_piece = INTERVAL

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(batch, capacity, device)
        self.states: list[Tensor] = []
        self.snapshots: list[Tensor] = []
        # Number of tokens in each snapshot; 0 for an empty snapshot.
        self.snapshot_lengths = torch.zeros(batch, SNAPSHOTS, dtype=torch.long, device=device)
        # For each row: tokens since the last snapshot, index of the next snapshot, True during a forward.
        self.unsaved, self.next_snapshot = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self.unfinished = torch.zeros_like(self.length, dtype=torch.bool)
        self._most_unsaved = 0  # an upper bound of `unsaved`, known without a device read
        self._numbers: dict[Hashable, int] = {}
        self._layers: dict[int, int] = {}

    def state(self, name: Hashable, initial: Tensor) -> Tensor:
        """The state (B, ...) called `name`, to be changed in place; at first a copy of `initial` (zeros)."""
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
        self._most_unsaved = max(self._most_unsaved, other._most_unsaved)

    def _count(self, new: int | Tensor) -> None:
        if readable_on_host(self.unfinished) and any(self.unfinished.tolist()):
            raise ValueError("a forward was interrupted, which may have changed states; call truncate")
        super()._count(new)
        self._most_unsaved += new if isinstance(new, int) else new.shape[1]
        self.unfinished.copy_(self.length >= 0 if isinstance(new, int) else new.any(1))

    def advance(self, n: Tensor) -> None:
        """End the forward: add the numbers of new tokens `n` (B or 1,) to the rows' lengths."""
        super().advance(n)
        self.unfinished.zero_()
        self.unsaved += n
        if self._most_unsaved >= INTERVAL:
            self._save()

    def _save(self) -> None:
        """Make a snapshot of each row with INTERVAL or more tokens since its last snapshot."""
        rows, due = torch.arange(self.batch, device=self.length.device), self.unsaved >= INTERVAL
        pairs = [*zip(self.states, self.snapshots, strict=True), (self.length, self.snapshot_lengths)]
        for state, snapshots in pairs:
            earlier = snapshots[rows, self.next_snapshot]
            is_due = due.view(-1, *[1] * (state.dim() - 1))
            snapshots[rows, self.next_snapshot] = torch.where(is_due, state, earlier)
        self.next_snapshot.copy_((self.next_snapshot + due) % SNAPSHOTS)
        self.unsaved.masked_fill_(due, 0)
        self._most_unsaved = max(self.unsaved.tolist()) if readable_on_host(self.unsaved) else 0

    def truncate(self, n: Tensor) -> Tensor:
        """Keep at most the first `n` (B,) tokens of each row. Returns the number of tokens (B,) that remain.

        If a row has to drop tokens, or if its last forward was interrupted, the row is restored from its longest
        snapshot of at most `n` tokens. Without such a snapshot, the row is emptied. The caller must evaluate the
        later tokens again.
        """
        n = torch.minimum(self.length, n.to(self.length))
        usable = torch.where(self.snapshot_lengths <= n[:, None], self.snapshot_lengths, 0)
        length, number = usable.max(1)
        drops = (n < self.length) | (n == 0) | self.unfinished
        for state, snapshots in zip(self.states, self.snapshots, strict=True):
            earlier = snapshots[torch.arange(self.batch, device=number.device), number]
            earlier[length == 0] = 0
            state[drops] = earlier[drops]
        remaining = super().truncate(torch.where(drops, length, n))
        self.unsaved.masked_fill_(drops, 0)
        self.unfinished.zero_()
        self.snapshot_lengths.masked_fill_(self.snapshot_lengths > remaining[:, None], 0)
        return remaining
