"""Where a text has occurred before: the contexts of all positions of a text, sorted, and what followed each.

A context is what stands before a position, read backwards. Contexts that end alike lie side by side in their
sorted order, so the positions whose contexts end with the same n items are a range, and the range for one more
item lies within it. The order is a suffix array of the reversed text up to some depth, made by prefix doubling.
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
"""Items of a context that are compared, unless it is said otherwise."""
Text = TypeVar("Text", str, bytes)


class Match(NamedTuple):
    """The positions `order[first:last]` of an index, whose contexts end with the same `length` items."""

    length: int
    first: int
    last: int


class ContextIndex:
    """The contexts of all positions of `items` (N,), unsigned integers below 2^32 - 1.

    `order` (N,), int32, is the sorted order of the positions, if it is known. Besides the items, 8 bytes for each.
    """

    def __init__(self, items: NDArray[Any], order: NDArray[np.int32] | None = None, depth: int = DEPTH) -> None:
        self.items, self.depth = items, depth
        # Zeros stand before the text, which no context of a query has.
        padded = np.zeros(depth + len(items), np.uint32)
        padded[depth:] = items
        padded[depth:] += 1
        self.order = sorted_contexts(padded, depth) if order is None else order
        # Items of a memoryview are Python's integers, which are faster here than numpy's.
        self._padded, self._positions = padded.data, self.order.data

    def __len__(self) -> int:
        return len(self.items)

    def matches(self, context: Sequence[int]) -> Iterator[Match]:
        """The positions after the last item of the context, after its last two, and so on, while there are any."""
        match = Match(0, 0, len(self.order))
        for item in reversed(context[-self.depth :]):
            match = self._narrow(match, item + 1)
            if match.first == match.last:
                return
            yield match

    def longest(self, context: bytes, text: bytes) -> Match:
        """The last one of `matches` of a context, found at once, where the items are these bytes."""
        key = context[-self.depth :][::-1]
        place = self._place(text, key)
        neighbours = self._positions[max(0, place - 1) : place + 1]
        equal = (common_length(text[max(0, p - self.depth) : p][::-1], key, 0) for p in neighbours)
        length = max(equal, default=0)
        if not length:
            return Match(0, 0, 0)
        return Match(length, self._place(text, key[:length]), self._place(text, key[:length], bisect_right))

    def without(self, ranges: Sequence[tuple[int, int]]) -> "ContextIndex":
        """The same index without the positions in these ranges; items are shared."""
        mask = np.ones(len(self), bool)
        for first, stop in ranges:
            mask[first:stop] = False
        index = copy(self)
        index.order = self.order[mask[self.order]]
        index._positions = index.order.data
        return index

    def positions(self, match: Match, most: int | None = None) -> NDArray[np.int32]:
        """The positions of a match: the indices of the items that followed. At most about so many of them, spread
        evenly over their order."""
        step = 1 if most is None else max(1, (match.last - match.first) // most)
        return self.order[match.first : match.last : step]

    def _place(self, text: bytes, prefix: bytes, bisect: Callable[..., int] = bisect_left) -> int:
        """Where contexts that begin, read backwards, with these bytes are in the order, or would be."""
        most = len(prefix)
        return bisect(self._positions, prefix, key=lambda p: text[max(0, p - most) : p][::-1])

    def _narrow(self, match: Match, item: int) -> Match:
        padded, back = self._padded, self.depth - match.length - 1
        key = lambda position: padded[position + back]
        first = bisect_left(self._positions, item, match.first, match.last, key=key)
        return Match(match.length + 1, first, bisect_right(self._positions, item, first, match.last, key=key))


def last_match(text: Text, context: Text) -> tuple[int, int]:
    """The length of the longest match in `text` of the end of `context`, and the last position behind one.

    The end of the text is no match: nothing follows it.
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
    """The positions (N,), int32, of a text by the `depth` items before each, the nearest first.

    `padded` (depth + N,) are the items, none of them zero, after as many zeros.
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
