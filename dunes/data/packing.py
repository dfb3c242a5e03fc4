"""Batches of examples: one per row with padding, or packed rows of several, each attending only to itself.

The order is a pure function of (seed, epoch, position), as in `windows`. Packing is best-fit decreasing
(https://arxiv.org/abs/2404.10830): the lengths alone determine the layout, so every epoch has the same number of
rows; examples of equal length are permuted in each epoch.
"""

# Shapes: B batch, T tokens.

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dunes.data.examples import Example
from dunes.data.windows import shuffle_index
from dunes.ops.cross_entropy import IGNORE
from dunes.units import plural

Batch = tuple[Tensor, Tensor, Tensor]
"""ids, targets and positions, each (B, T) int64; targets may be IGNORE, positions are -1 for padding."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of `batch_size` rows of up to `context_length` tokens, from the examples that have a target.

    An example of more than `context_length` + 1 ids is truncated, and counted in `data_report`. Raises ValueError
    if no targets are left.
    """

    examples: Sequence[Example] = field(repr=False)
    context_length: int
    batch_size: int
    seed: int = 0
    packed: bool = True
    _cache: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.context_length < 1 or self.batch_size < 1:
            raise ValueError(
                f"context length and batch size are at least 1, not {self.context_length} and {self.batch_size}"
            )
        if not len(self._with_target):
            raise ValueError(
                f"none of {plural(len(self.examples), 'example')} has a target "
                f"within {plural(self.context_length, 'token')}"
            )

    @cached_property
    def _with_target(self) -> NDArray[np.int64]:
        """Indices of the examples with a target."""
        return np.flatnonzero(np.array([e.targets(self.context_length) > 0 for e in self.examples], bool))

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([min(len(self.examples[i]) - 1, self.context_length) for i in self._with_target], np.int64)

    @cached_property
    def _layout(self) -> list[list[int]]:
        """Examples in each row, as ranks in descending order of length."""
        lengths = np.sort(self._lengths)[::-1].tolist()
        return best_fit(lengths, self.context_length) if self.packed else [[i] for i in range(len(lengths))]

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows in an epoch."""
        return len(self._layout)

    def row(self, position: int) -> list[int]:
        """Indices of the examples in the row at this position of the endless order."""
        epoch, within = divmod(position, self.rows_per_epoch)
        ranks = self._layout[int(shuffle_index(np.array([within]), self.rows_per_epoch, (self.seed, epoch))[0])]
        return [int(self._with_target[i]) for i in self._ranking(epoch)[ranks]]

    def _ranking(self, epoch: int) -> NDArray[np.int64]:
        """Examples in descending order of length; examples of equal length are shuffled in each epoch."""
        if epoch not in self._cache:
            # A different key from the rows.
            size = len(self._with_target)
            order = shuffle_index(np.arange(size), size, (self.seed, -1 - epoch))
            self._cache.clear()
            self._cache[epoch] = np.lexsort((order, -self._lengths))
        return self._cache[epoch]

    def batch(self, number: int) -> Batch:
        """Batch `number` (0, 1, 2, ...), which may span epochs; packed rows are padded to `context_length`."""
        return self._rows(number * self.batch_size, (number + 1) * self.batch_size)

    def _rows(self, start: int, stop: int) -> Batch:
        rows = [[self.examples[i] for i in self.row(position)] for position in range(start, stop)]
        return collate(rows, self.context_length, full=self.packed)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Endless batches from number `start` on."""
        return map(self.batch, count(start))

    def one_epoch(self) -> Iterator[Batch]:
        """Each row of the first epoch once, for evaluation; the last batch may be smaller."""
        for start in range(0, self.rows_per_epoch, self.batch_size):
            yield self._rows(start, min(start + self.batch_size, self.rows_per_epoch))


def collate(rows: Sequence[Sequence[Example]], context_length: int, full: bool = False) -> Batch:
    """Rows of examples as a batch, padded to `context_length` if `full`, else to the longest row.

    Targets are the next ids of the same example, never of the following one. Padding has position -1 and id 0,
    which is never read.
    """
    parts = [_row(row, context_length) for row in rows]
    width = context_length if full else max(part.shape[1] for part in parts)
    batch = np.tile(np.array([0, IGNORE, -1], np.int64)[:, None, None], (1, len(rows), width))
    for i, part in enumerate(parts):
        batch[:, i, : part.shape[1]] = part
    ids, targets, positions = map(torch.from_numpy, batch)
    return ids, targets, positions


def _row(row: Sequence[Example], context_length: int) -> NDArray[np.int64]:
    """Ids, targets and positions (3, T) of a row, at most `context_length` of each example."""
    parts = []
    for example in row:
        ids = example.ids[: context_length + 1].astype(np.int64)
        targets = np.where(example.loss_mask[1 : context_length + 1], ids[1:], IGNORE)
        parts.append([ids[:-1], targets, np.arange(len(ids) - 1)])
    return np.concatenate(parts, 1)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Best-fit packing of items of these descending lengths: rows of indices, each filled up to `room`."""
    rows: list[list[int]] = []
    spaces: list[int] = []
    open_rows: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        positions = bisect_left(spaces, length)
        if positions < len(spaces):
            space = spaces[positions]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[positions]
        else:
            space, row = room, len(rows)
            rows.append([])
        rows[row].append(i)
        if remaining := space - length:
            if remaining not in open_rows:
                insort(spaces, remaining)
            open_rows.setdefault(remaining, []).append(row)
    return rows
