"""A sorted index of all contexts of a text, to look up which items followed a context earlier in the text.

A context is the text before a position, read backwards. In the sorted order, contexts with the same last n items
are adjacent, so their positions form a range. The range of contexts with the same last n + 1 items lies inside the
range for n. The order is a suffix array of the reversed text, limited to `depth` items and built by prefix
doubling. https://doi.org/10.1137/0222058
"""

# Shapes: N items in the index.

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dunes.generate.prefix_cache import common_length

DEPTH = 32
"""Default maximum number of items that are compared per context."""
Text = TypeVar("Text", str, bytes)


class Match(NamedTuple):
    """The positions `order[first:last]` of an index. The contexts before them end with the same `length` items."""

    length: int
    first: int
    last: int


class ContextIndex:
    """Sorted index of the contexts of all positions in `items` (N,). Items are unsigned integers below 2^32 - 1.

    `order` (N,), int32, is the sorted order of the positions, computed if not given. The index takes 4 bytes per
    item, in addition to the items and a reversed copy of their bytes. During sorting, `progress` is called with
    each completed fraction of the work.
    """

    def __init__(
        self,
        items: NDArray[Any],
        order: NDArray[np.int32] | None = None,
        depth: int = DEPTH,
        progress: Callable[[float], object] = lambda part: None,
    ) -> None:
        self.items, self.depth = items, depth
        self._backwards = _backwards(items)
        self.order = sorted_contexts(items, depth, progress) if order is None else order
        # A memoryview returns Python's integers, which are faster here than NumPy's.
        self._positions = self.order.data

    def __len__(self) -> int:
        return len(self.items)

    def matches(self, context: Sequence[int], lengths: Sequence[int] = ()) -> list[Match]:
        """Matches of a context's suffixes; the last match belongs to the longest suffix that occurs in `items`.

        The other matches belong to the shorter suffixes whose lengths are in `lengths` (ascending). At most the
        last `depth` items of the context are compared. The list is empty if no suffix occurs.
        """
        context, size = context[-self.depth :], self.items.itemsize
        key = context[::-1] if isinstance(context, bytes) else _backwards(np.array(context, self.items.dtype))
        before = self._reader(len(key))
        place = bisect_left(self._positions, key, key=before)
        neighbours = map(before, self._positions[max(0, place - 1) : place + 1])
        longest = max((common_length(key, neighbour, 0) for neighbour in neighbours), default=0) // size
        match, matches = Match(0, 0, len(self.order)), []
        for length in [*(n for n in lengths if n < longest), *([longest] if longest else ())]:
            match = self._narrow(match, length, key[: length * size])
            matches.append(match)
        return matches

    def without(self, ranges: Sequence[tuple[int, int]]) -> "ContextIndex":
        """A copy of the index without the positions in these ranges; the copy shares `items`."""
        mask = np.ones(len(self), bool)
        for first, stop in ranges:
            mask[first:stop] = False
        index = copy(self)
        index.order = self.order[mask[self.order]]
        index._positions = index.order.data
        return index

    def positions(self, match: Match, most: int | None = None) -> NDArray[np.int32]:
        """Positions of a match: for each occurrence, the index in `items` of the item after it.

        With `most`, returns about `most` positions, evenly spaced in the sorted order.
        """
        step = 1 if most is None else max(1, (match.last - match.first) // most)
        return self.order[match.first : match.last : step]

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """A function that returns up to `size` bytes before a position, last item first."""
        backwards, end, step = self._backwards, len(self._backwards), self.items.itemsize

        def before(position: int) -> bytes:
            start = end - position * step
            return backwards[start : start + size]

        return before

    def _narrow(self, match: Match, length: int, key: bytes) -> Match:
        before = self._reader(len(key))
        first = bisect_left(self._positions, key, match.first, match.last, key=before)
        return Match(length, first, bisect_right(self._positions, key, first, match.last, key=before))


def _backwards(items: NDArray[Any]) -> bytes:
    """The bytes of the items, last item first; each item is big-endian, so that bytes sort like items."""
    return items[::-1].astype(items.dtype.newbyteorder(">")).tobytes()


def last_match(text: Text, context: Text) -> tuple[int, int]:
    """Length of the longest suffix of `context` that occurs in `text`, and the position after its last occurrence.

    An occurrence at the end of the text does not count, since nothing follows it.
    """
    longest, position, low, high = 0, 0, 1, len(context)
    while low <= high:
        middle = (low + high) // 2 if longest else low
        start = text.rfind(context[len(context) - middle :], 0, len(text) - 1)
        if start >= 0:
            longest, position, low = middle, start + middle, middle + 1
        elif longest:
            high = middle - 1
        else:
            break
    return longest, position


def sorted_contexts(
    items: NDArray[Any], depth: int, progress: Callable[[float], object] = lambda part: None
) -> NDArray[np.int32]:
    """Positions (N,), int32, of a text, sorted by the `depth` items before each position, nearest item first."""
    count, bits = len(items), (int(items.max(initial=0)) + 1).bit_length()
    padded = np.zeros(depth + count, np.int64)  # 0 stands for missing items before the first item
    padded[depth:] = items
    padded[depth:] += 1
    width = min(63 // bits, depth)
    key = np.zeros(count, np.int64)
    for back in range(1, width + 1):
        key = (key << bits) | padded[depth - back : depth - back + count]
    order, passes = np.argsort(key, kind="stable"), 1 + math.ceil(math.log2(depth / width))
    progress(1 / passes)
    while width < depth:
        ranks = np.zeros(count, np.int64)
        ranks[order] = np.cumsum(np.diff(key[order], prepend=key[order[:1]]) != 0)
        further = np.zeros(count, np.int64)
        further[width:] = ranks[:-width] if width < count else further[width:]
        key = (ranks << 32) | further
        order, width = np.argsort(key, kind="stable"), 2 * width
        progress(1 / passes)
    return order.astype(np.int32)
