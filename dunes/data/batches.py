"""Batches in an order that is a pure function of (seed, epoch, position): of windows of ids, rows, and examples.

So a run's data cursor is one integer, a resumed run starts at once, and the order is independent of the number of
workers or devices.

Examples are one per row with padding, or packed in rows of several, each attending only to itself. Packing is
best-fit decreasing (https://arxiv.org/abs/2404.10830): the lengths alone determine the layout, so every epoch has
the same number of rows; examples of equal length are permuted in each epoch.
"""

# Shapes: B batch, T tokens, N rows.

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import count, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dunes.data.examples import Example
from dunes.measure import ranks
from dunes.ops.cross_entropy import IGNORE
from dunes.units import plural

ROUNDS = 4
Transform = Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.int64]]
"""Maps a document's ids (N,) and a random generator to new ids (N,)."""


class Arrange(Protocol):
    """Rearranges the ids (N,) of a window, and returns a mask of ids that are targets."""

    def __call__(self, ids: NDArray[np.int64], random: np.random.Generator, /) -> NDArray[np.int64]: ...

    def is_target(self, ids: NDArray[np.int64], /) -> NDArray[np.bool_]: ...


class TokenIds(Protocol):
    """A long sequence of ids: an array or a `TokenFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class PackedText:
    """Ids of documents that do not attend to each other, and the ascending indices at which they start, from 0.

    A document usually starts with the `end` token of the previous one, as a prompt does: that token is the last
    target of the previous document and the first input of the next.

    `transform`, if any, is applied to each complete document, including its first id, as `Windows` read it. It may
    reorder and replace ids; its generator is keyed by (seed, epoch, document), so all windows with a part of a
    document agree on it.
    """

    tokens: TokenIds
    starts: NDArray[np.int64]
    end: int
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[Any]:
        return self.tokens[index]

    def transformed(self, index: NDArray[np.int64], key: tuple[int, int]) -> NDArray[np.int64]:
        """The ids at consecutive indices (N,) of the documents transformed under (seed, epoch).

        Raises ValueError for a transformation that changes a document's length.
        """
        assert self.transform is not None
        first, last = np.searchsorted(self.starts, index[[0, -1]], "right") - 1
        bounds = np.append(self.starts, len(self))[first : last + 2]
        documents = []
        for number, (start, stop) in enumerate(pairwise(bounds.tolist()), int(first)):
            ids = self.tokens[np.arange(start, stop)[None]][0].astype(np.int64)
            documents.append(self.transform(ids, np.random.default_rng(_hash(*key, number))))
            if len(documents[-1]) != len(ids):
                raise ValueError(
                    f"document {number}: transformed to {plural(len(documents[-1]), 'id')}, expected {len(ids)}"
                )
        transformed: NDArray[np.int64] = np.concatenate(documents)[index - bounds[0]]
        return transformed

    def batch(self, window: Tensor, index: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, targets and positions (B, T) of windows (B, T + 1) from consecutive indices.

        Targets in another document are ignored, unless they are `end`.
        """
        document_starts = self.starts[np.searchsorted(self.starts, index, "right") - 1]
        positions = torch.from_numpy(index - np.maximum(document_starts, index[:, :1]))
        targets = window[:, 1:]
        other_document = (positions[:, 1:] == 0) & (targets != self.end)
        return window[:, :-1], targets.masked_fill(other_document, IGNORE), positions[:, :-1]


@dataclass(frozen=True)
class Windows:
    """Windows of `length` + 1 ids that overlap by one; each epoch has every token once.

    For `PackedText`, batches include positions.

    `arrange`, if any, is applied to each window; its generator is keyed by (seed, epoch, position in the epoch's
    order). A batch then has separate targets, with IGNORE where `arrange.is_target` is False.

    Each epoch has another offset and order. It omits less than two windows at the ends, which are part of other
    epochs. Raises ValueError if there are fewer tokens than one window needs, and for `arrange` on transformed
    documents, which it cannot cut.
    """

    tokens: TokenIds
    length: int
    batch_size: int
    seed: int = 0
    arrange: Arrange | None = None

    def __post_init__(self) -> None:
        if self.arrange is not None and isinstance(self.tokens, PackedText) and self.tokens.transform is not None:
            raise ValueError(
                "windows of transformed documents cannot be rearranged for completion; omit the transformation, "
                "or --complete"
            )
        if len(self.tokens) < self.length + 1:
            raise ValueError(
                f"{plural(len(self.tokens), 'token')}, and one window needs {self.length + 1}; give more text"
            )

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows in an epoch. The offset changes from epoch to epoch, which costs up to one window."""
        return max(1, (len(self.tokens) - 1) // self.length - 1)

    def starts(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Start indices of the windows at these positions of the endless order."""
        epochs, within = np.divmod(positions, self.windows_per_epoch)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            slack = len(self.tokens) - 1 - self.windows_per_epoch * self.length
            offset = _hash(self.seed, int(epoch), 0) % (slack + 1)
            starts[mask] = offset + self.length * shuffle_index(
                within[mask], self.windows_per_epoch, (self.seed, int(epoch))
            )
        return starts

    def batch(self, number: int) -> Tensor | tuple[Tensor, ...]:
        """Batch `number` (0, 1, ...): ids (B, T + 1), int64; or ids, targets and maybe positions (B, T).

        With several ranks, the rows of this one.
        """
        positions = np.arange(number * self.batch_size, (number + 1) * self.batch_size, dtype=np.int64)
        positions = positions[ranks.rows(self.batch_size)]
        index = self.starts(positions)[:, None] + np.arange(self.length + 1)
        text = self.tokens
        if isinstance(text, PackedText) and text.transform is not None:
            keys = [(self.seed, epoch) for epoch in (positions // self.windows_per_epoch).tolist()]
            window = np.stack([text.transformed(*row) for row in zip(index, keys, strict=True)])
        else:
            window = text[index]
        window = window.astype(np.int64)
        if self.arrange is not None:
            window = self._rearrange(window, positions, self.arrange)
        ids = torch.from_numpy(window)
        batch: Tensor | tuple[Tensor, ...] = text.batch(ids, index) if isinstance(text, PackedText) else ids
        if self.arrange is None:
            return batch
        ids, targets, *rest = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
        is_target = torch.from_numpy(self.arrange.is_target(targets.numpy()))
        return ids, targets.masked_fill(~is_target, IGNORE), *rest

    def _rearrange(
        self, windows: NDArray[np.int64], positions: NDArray[np.int64], arrange: Arrange
    ) -> NDArray[np.int64]:
        """The windows (B, T + 1) at these positions of the endless order, each rearranged."""
        rows = []
        for window, position in zip(windows, positions.tolist(), strict=True):
            epoch, within = divmod(position, self.windows_per_epoch)
            random = np.random.default_rng(_hash(self.seed, epoch, within, "arrange"))
            rows.append(arrange(window, random))
            if rows[-1].shape != window.shape:
                raise ValueError(f"a window of {plural(len(window), 'id')}: rearranged to {len(rows[-1])}")
        return np.stack(rows)

    def batches(self, start: int = 0) -> Iterator[Tensor | tuple[Tensor, ...]]:
        """Endless batches from number `start` on."""
        return map(self.batch, count(start))


def shuffle_index(index: NDArray[np.int64], size: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """The images of these indices under a permutation of 0..size-1, without materialising it.

    A Feistel network over the next power of four, repeated until the result is below `size` (cycle walking).
    https://en.wikipedia.org/wiki/Format-preserving_encryption
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(_hash(*key, 1 + r)) for r in range(ROUNDS)]
    x = index.astype(np.uint64)
    outside = np.ones(len(x), bool)
    while outside.any():
        left, right = x[outside] >> np.uint64(half), x[outside] & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        x[outside] = (left << np.uint64(half)) | right
        outside = x >= size
    return x.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*numbers: int | str) -> int:
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=7).digest())


Side = tuple[TokenIds, NDArray[np.int64]]
"""Token ids, and the indices at which documents start."""


def join_texts(texts: Sequence[NDArray[Any]]) -> Side:
    """The ids of all texts, and the index at which each starts."""
    return np.concatenate(texts), np.cumsum([0, *map(len, texts[:-1])])


def tail_start(start: int, stop: int, share: float) -> int:
    """The index at which the tail of a text starts, given its token range `start` to `stop`, EOS included."""
    return stop - round((stop - start) * share)


@dataclass(frozen=True)
class Rows:
    """Endless batches of the rows of tensors (N, ...), each row once per epoch, every epoch in another order.

    A batch may span two epochs, so all have the same size. Raises ValueError for tensors of different lengths, or
    with fewer rows than a batch.
    """

    tensors: tuple[Tensor, ...]
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        lengths = [len(t) for t in self.tensors]
        if len({*lengths}) != 1:
            raise ValueError(f"tensors of {lengths} rows; expected at least one, and all of the same length")
        if not 1 <= self.batch_size <= lengths[0]:
            raise ValueError(
                f"a batch of {self.batch_size} from {plural(lengths[0], 'row')}; expected 1 to that many"
            )

    def steps(self, epochs: float) -> int:
        """Number of batches in these epochs, rounded up."""
        return -int(-epochs * len(self.tensors[0]) // self.batch_size)

    def indices(self, start: int = 0) -> Iterator[Tensor]:
        """The indices (B,), int64, of each batch from number `start` on."""
        epoch, within = divmod(start * self.batch_size, len(self.tensors[0]))
        order = self._order(epoch)[within:]
        while True:
            while len(order) < self.batch_size:
                epoch += 1
                order = torch.cat([order, self._order(epoch)])
            yield order[: self.batch_size]
            order = order[self.batch_size :]

    def _order(self, epoch: int) -> Tensor:
        size = len(self.tensors[0])
        return torch.from_numpy(shuffle_index(np.arange(size), size, (self.seed, epoch)))

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches from number `start` on."""
        for index in self.indices(start):
            yield tuple(t[index.to(t.device)] for t in self.tensors)


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
        row = self._layout[int(shuffle_index(np.array([within]), self.rows_per_epoch, (self.seed, epoch))[0])]
        return [int(self._with_target[i]) for i in self._ranking(epoch)[row]]

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
        """Batch `number` (0, 1, 2, ...), which may span epochs; packed rows are padded to `context_length`.

        With several ranks, the rows of this one.
        """
        positions = range(number * self.batch_size, (number + 1) * self.batch_size)
        return self._rows(positions[ranks.rows(self.batch_size)])

    def _rows(self, positions: range) -> Batch:
        rows = [[self.examples[i] for i in self.row(position)] for position in positions]
        return collate(rows, self.context_length, full=self.packed)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Endless batches from number `start` on."""
        return map(self.batch, count(start))

    def one_epoch(self) -> Iterator[Batch]:
        """Each row of the first epoch once, for evaluation; the last batch may be smaller."""
        for start in range(0, self.rows_per_epoch, self.batch_size):
            yield self._rows(range(start, min(start + self.batch_size, self.rows_per_epoch)))


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
