"""Index of all contexts of a text, sorted, to look up what followed a context earlier in the text.

A context is the text before a position, read backwards. In the sorted order, contexts with the same last n items
are adjacent: their positions form a range, which contains the range for one more item. The order is a suffix array
of the reversed text, limited to some depth and built by prefix doubling.
https://doi.org/10.1137/0222058
"""

# Shapes: N items in the index.

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dunes.generate.prefix_cache import common_length

DEPTH = 32
"""Default maximum number of items of a context that are compared."""
Text = TypeVar("Text", str, bytes)


class Match(NamedTuple):
    """Positions `order[first:last]` of an index, whose contexts end with the same `length` items."""

    length: int
    first: int
    last: int


class ContextIndex:
    """Index of the contexts of all positions in `items` (N,), unsigned integers below 2^32 - 1.

    `order` (N,), int32, is the sorted order of the positions, computed if not given. The index takes 8 bytes per
    item in addition to the items.
    """

    def __init__(self, items: NDArray[Any], order: NDArray[np.int32] | None = None, depth: int = DEPTH) -> None:
        self.items, self.depth = items, depth
        # The padding is zero, which no context of a query contains.
        padded = np.zeros(depth + len(items), np.uint32)
        padded[depth:] = items
        padded[depth:] += 1
        self.order = sorted_contexts(padded, depth) if order is None else order
        # A memoryview returns Python's integers, which are faster here than NumPy's.
        self._padded, self._positions = padded.data, self.order.data

    def __len__(self) -> int:
        return len(self.items)

    def matches(self, context: Sequence[int]) -> Iterator[Match]:
        """Yield the match of the last item of the context, then of its last two, and so on, until none is left."""
        match = Match(0, 0, len(self.order))
        for item in reversed(context[-self.depth :]):
            match = self._narrow(match, item + 1)
            if match.first == match.last:
                return
            yield match

    def longest(self, context: bytes, text: bytes) -> Match:
        """The last of `matches` for a context, by binary search in `text`, the bytes of the items."""
        key = context[-self.depth :][::-1]
        place = self._place(text, key)
        neighbours = self._positions[max(0, place - 1) : place + 1]
        equal = (common_length(text[max(0, p - self.depth) : p][::-1], key, 0) for p in neighbours)
        length = max(equal, default=0)
        if not length:
            return Match(0, 0, 0)
        return Match(length, self._place(text, key[:length]), self._place(text, key[:length], bisect_right))

    def without(self, ranges: Sequence[tuple[int, int]]) -> "ContextIndex":
        """A copy of the index without the positions in these ranges; items are shared."""
        mask = np.ones(len(self), bool)
        for first, stop in ranges:
            mask[first:stop] = False
        index = copy(self)
        index.order = self.order[mask[self.order]]
        index._positions = index.order.data
        return index

    def positions(self, match: Match, most: int | None = None) -> NDArray[np.int32]:
        """Positions of a match, which are the indices of the items that followed it.

        At most about `most` of them are returned, spread evenly over their order.
        """
        step = 1 if most is None else max(1, (match.last - match.first) // most)
        return self.order[match.first : match.last : step]

    def _place(self, text: bytes, prefix: bytes, bisect: Callable[..., int] = bisect_left) -> int:
        """Insertion point in the order for contexts that, read backwards, start with `prefix`."""
        most = len(prefix)
        return bisect(self._positions, prefix, key=lambda p: text[max(0, p - most) : p][::-1])

    def _narrow(self, match: Match, item: int) -> Match:
        padded, back = self._padded, self.depth - match.length - 1
        key = lambda position: padded[position + back]
        first = bisect_left(self._positions, item, match.first, match.last, key=key)
        return Match(match.length + 1, first, bisect_right(self._positions, item, first, match.last, key=key))


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


def sorted_contexts(padded: NDArray[np.uint32], depth: int) -> NDArray[np.int32]:
    """Positions (N,), int32, of a text, sorted by the `depth` items before each, the nearest item first.

    `padded` (depth + N,) has `depth` zeros, then the items, none of them zero.
    """
    count = len(padded) - depth
    width = min(63 // max(1, int(padded.max(initial=0)).bit_length()), depth)
    key = np.zeros(count, np.int64)
    for back in range(1, width + 1):
        key = (key << int(padded.max(initial=0)).bit_length()) | padded[depth - back : depth - back + count]
    order = np.argsort(key, kind="stable")
    while width < depth:
        ranks = np.zeros(count, np.int64)
        ranks[order] = np.cumsum(np.diff(key[order], prepend=key[order[:1]]) != 0)
        further = np.zeros(count, np.int64)
        further[width:] = ranks[:-width] if width < count else further[width:]
        key = (ranks << 32) | further
        order, width = np.argsort(key, kind="stable"), 2 * width
    return order.astype(np.int32)
