"""Batches of windows of ids, of tensor rows, or of examples.

The seed, the epoch and the position in the epoch determine each row of a batch. Therefore, a resumed run needs
only the number of its next batch and reads no earlier batches, and the order of the rows does not depend on the
number of workers or devices.

A row of `Batches` has one padded example, or several packed examples that do not attend to each other. Packing is
best-fit decreasing (https://arxiv.org/abs/2404.10830). The packing depends only on the lengths of the examples, so
every epoch has the same number of rows. Each epoch permutes the examples of equal length.
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
from dunes.progress import each
from dunes.units import plural

ROUNDS = 4
Transform = Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.int64]]
"""Maps a document's ids (N,) and a random generator to new ids (N,)."""


class Arrange(Protocol):
    """Rearranges the ids (N,) of a window; `is_target` returns a mask (N,), True for ids that are targets."""

    def __call__(self, ids: NDArray[np.int64], random: np.random.Generator, /) -> NDArray[np.int64]: ...

    def is_target(self, ids: NDArray[np.int64], /) -> NDArray[np.bool_]: ...


class TokenIds(Protocol):
    """A long sequence of ids: an array or a `TokenFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class PackedText:
    """Ids of documents that do not attend to each other; `starts` are the ascending indices of their first ids.

    A document usually starts with `end`, the token that ends the previous document. That token is the last target
    of the previous document and the first input of the next.

    `Windows` applies `transform`, if any, to each complete document, including its first id. `transform` may
    reorder and replace ids. The random generator for `transform` is seeded by (seed, epoch, document), so all
    windows with parts of a document see the same transformed document.
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
        """The ids of transformed documents at the consecutive indices `index` (N,); `key` is (seed, epoch)."""
        assert self.transform is not None
        first, last = np.searchsorted(self.starts, index[[0, -1]], "right") - 1
        bounds = np.append(self.starts, len(self))[first : last + 2]
        documents = []
        for number, (start, stop) in enumerate(pairwise(bounds.tolist()), int(first)):
            ids = self.tokens[np.arange(start, stop)[None]][0].astype(np.int64)
            documents.append(self.transform(ids, np.random.default_rng(_hash(*key, number))))
            assert len(documents[-1]) == len(ids), f"document {number} changed its length"
        transformed: NDArray[np.int64] = np.concatenate(documents)[index - bounds[0]]
        return transformed

    def batch(self, window: Tensor, index: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, targets and positions (B, T) of windows (B, T + 1); each row of `index` has consecutive indices.

        If a target is the first id of the next document, and is not `end`, it becomes IGNORE.
        """
        document_starts = self.starts[np.searchsorted(self.starts, index, "right") - 1]
        positions = torch.from_numpy(index - np.maximum(document_starts, index[:, :1]))
        targets = window[:, 1:]
        other_document = (positions[:, 1:] == 0) & (targets != self.end)
        return window[:, :-1], targets.masked_fill(other_document, IGNORE), positions[:, :-1]


@dataclass(frozen=True)
class Windows:
    """Batches of windows of `length` + 1 ids; consecutive windows overlap by one id.

    For `PackedText`, batches include positions.

    `arrange`, if any, is applied to each window, with a generator seeded by (seed, epoch, position in the epoch's
    order). Batches with `arrange` have separate targets, which are IGNORE where `arrange.is_target` is False.

    Each epoch has its own offset and order. An epoch omits fewer than 2 * `length` tokens, all at the start and
    the end of the text; epochs with other offsets include them. Raises ValueError if there are fewer tokens than
    one window needs.
    """

    tokens: TokenIds
    length: int
    batch_size: int
    seed: int = 0
    arrange: Arrange | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) < self.length + 1:
            raise ValueError(
                f"{plural(len(self.tokens), 'token')}, and one window needs {self.length + 1}; give more text"
            )

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows in an epoch: one fewer than would fit (at least one), so that the offset can vary."""
        return max(1, (len(self.tokens) - 1) // self.length - 1)

    def starts(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the first token of each window.

        `positions` count windows from the first epoch on; they do not restart at 0 in later epochs.
        """
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
        """Batch `number` (0, 1, ...), int64: ids (B, T + 1); for `PackedText`, ids, targets and positions (B, T).

        With `arrange`, a batch of plain ids becomes ids and targets (B, T). With several ranks, the batch has only
        the rows of this rank.
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
        """Rearrange the windows (B, T + 1); the position of each window seeds its random generator."""
        rows = []
        for window, position in zip(windows, positions.tolist(), strict=True):
            epoch, within = divmod(position, self.windows_per_epoch)
            random = np.random.default_rng(_hash(self.seed, epoch, within, "arrange"))
            rows.append(arrange(window, random))
            assert rows[-1].shape == window.shape
        return np.stack(rows)

    def batches(self, start: int = 0) -> Iterator[Tensor | tuple[Tensor, ...]]:
        """Yield batch `start` and all later batches, without end."""
        return map(self.batch, count(start))


def shuffle_index(index: NDArray[np.int64], size: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Map each index by a pseudorandom permutation of 0..size-1, without storing the permutation.

    A Feistel network permutes the numbers below the next power of four. The network is applied again until the
    result is below `size` (cycle walking). https://en.wikipedia.org/wiki/Format-preserving_encryption
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
    """The ids of all texts, concatenated, and the index at which each text starts."""
    return np.concatenate(texts), np.cumsum([0, *map(len, texts[:-1])])


def tail_start(start: int, stop: int, share: float) -> int:
    """Start index of a text's tail, the last fraction `share` of the tokens from `start` to `stop` (with EOS)."""
    return stop - round((stop - start) * share)


@dataclass(frozen=True)
class Rows:
    """Endless batches of the rows of tensors (N, ...).

    Each epoch contains every row exactly once, in an order shuffled anew for that epoch. A batch may span two
    epochs, so all batches have the same size. Raises ValueError if the tensors differ in length, or have fewer
    rows than a batch.
    """

    tensors: tuple[Tensor, ...]
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        lengths = [len(t) for t in self.tensors]
        if len({*lengths}) != 1:
            raise ValueError(f"tensors of {lengths} rows; expected one or more tensors of the same length")
        if not 1 <= self.batch_size <= lengths[0]:
            raise ValueError(
                f"a batch of {self.batch_size} from {plural(lengths[0], 'row')}; expected 1 to {lengths[0]}"
            )

    def steps(self, epochs: float) -> int:
        """Number of batches in `epochs` epochs, rounded up; `epochs` may be fractional."""
        return -int(-epochs * len(self.tensors[0]) // self.batch_size)

    def indices(self, start: int = 0) -> Iterator[Tensor]:
        """Yield the row indices (B,), int64, of batch `start` and of each later batch."""
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
        """Yield batch `start` and all later batches: the rows (B, ...) of each tensor."""
        for index in self.indices(start):
            yield tuple(t[index.to(t.device)] for t in self.tensors)


Batch = tuple[Tensor, ...]
"""Ids, targets and positions, each (B, T), int64; targets may be IGNORE, and positions are -1 for padding."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of `batch_size` rows of up to `context_length` tokens, from all examples that have a target.

    A preference becomes two unpacked rows: chosen, then rejected. With `reference` log-probabilities
    (examples, 2), a batch has a fourth tensor (rows,) with the log-probability of each row.

    An example of more than `context_length` + 1 ids is truncated; `data_report` counts truncated examples. Raises
    ValueError if no example has a target within `context_length`.
    """

    examples: Sequence[Example] = field(repr=False)
    context_length: int
    batch_size: int
    seed: int = 0
    packed: bool = True
    reference: NDArray[np.float32] | None = field(default=None, repr=False)
    _cache: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
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
    def _packs(self) -> bool:
        return self.packed and all(example.rejected is None for example in self.examples)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([min(len(self.examples[i]) - 1, self.context_length) for i in self._with_target], np.int64)

    @cached_property
    def _layout(self) -> list[list[int]]:
        """The examples of each row, as indices into the examples with a target, sorted by descending length."""
        lengths = np.sort(self._lengths)[::-1].tolist()
        return best_fit(lengths, self.context_length) if self._packs else [[i] for i in range(len(lengths))]

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows in an epoch."""
        return len(self._layout)

    def row(self, position: int) -> list[int]:
        """Indices of the examples in row `position`; rows are numbered consecutively across epochs."""
        epoch, within = divmod(position, self.rows_per_epoch)
        row = self._layout[int(shuffle_index(np.array([within]), self.rows_per_epoch, (self.seed, epoch))[0])]
        return [int(self._with_target[i]) for i in self._ranking(epoch)[row]]

    def _ranking(self, epoch: int) -> NDArray[np.int64]:
        """Indices into `_with_target`, by descending length of the examples; equal lengths are shuffled."""
        if epoch not in self._cache:
            # The epoch in this key is negated, since (seed, epoch) already shuffles the rows.
            size = len(self._with_target)
            order = shuffle_index(np.arange(size), size, (self.seed, -1 - epoch))
            self._cache.clear()
            self._cache[epoch] = np.lexsort((order, -self._lengths))
        return self._cache[epoch]

    def batch(self, number: int) -> Batch:
        """Batch `number` (0, 1, 2, ...); it may span epochs. Packed rows are padded to `context_length`.

        With several ranks, the batch has only the rows of this rank.
        """
        positions = range(number * self.batch_size, (number + 1) * self.batch_size)
        return self._rows(positions[ranks.rows(self.batch_size)])

    def _rows(self, positions: range) -> Batch:
        index = [self.row(position) for position in positions]
        rows = [list(side) for row in index for side in zip(*(self.examples[i].sides for i in row), strict=True)]
        batch = collate(rows, self.context_length, full=self._packs)
        return batch if self.reference is None else (*batch, torch.from_numpy(self.reference[index].flatten()))

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Yield batch `start` and all later batches, without end."""
        return map(self.batch, count(start))

    def one_epoch(self) -> Iterator[Batch]:
        """Yield batches with each row of the first epoch once, for evaluation; the last batch may be smaller."""
        for start in each(range(0, self.rows_per_epoch, self.batch_size)):
            yield self._rows(range(start, min(start + self.batch_size, self.rows_per_epoch)))


def collate(rows: Sequence[Sequence[Example]], context_length: int, full: bool = False) -> Batch:
    """Join rows of examples into a batch, padded to `context_length` if `full`, otherwise to the longest row.

    Targets are the next ids of the same example, never ids of the following example. Padding has position -1, id 0
    and target IGNORE.
    """
    parts = [_row(row, context_length) for row in rows]
    width = context_length if full else max(part.shape[1] for part in parts)
    batch = np.tile(np.array([0, IGNORE, -1], np.int64)[:, None, None], (1, len(rows), width))
    for i, part in enumerate(parts):
        batch[:, i, : part.shape[1]] = part
    ids, targets, positions = map(torch.from_numpy, batch)
    return ids, targets, positions


def _row(row: Sequence[Example], context_length: int) -> NDArray[np.int64]:
    """Ids, targets and positions (3, T) of a row, with at most `context_length` tokens of each example."""
    parts = []
    for example in row:
        ids = example.ids[: context_length + 1].astype(np.int64)
        targets = np.where(example.loss_mask[1 : context_length + 1], ids[1:], IGNORE)
        parts.append([ids[:-1], targets, np.arange(len(ids) - 1)])
    return np.concatenate(parts, 1)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items into rows by best fit; `lengths` must be in descending order.

    Returns the item indices of each row; a row's total length is at most `room`.
    """
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
