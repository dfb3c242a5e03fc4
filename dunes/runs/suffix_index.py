# Shapes: N items of a sequence, with `depth` zeros in front of it.
"""The longest match of the end of a text in another text: places sorted by what stands before them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """The places after which the last `length` items of a query stand, as a range of the sorted places."""

    first: int
    last: int
    length: int


class SuffixIndex:
    """An index of integers (N,), positive but for zeros that end a document.

    It is made by prefix doubling (https://doi.org/10.1137/0222058); places are sorted by the `depth` items before.
    """

    def __init__(self, items: np.ndarray, depth: int) -> None:
        self.depth = depth
        padded = np.concatenate([np.zeros(depth, np.int64), items.astype(np.int64)])
        small = np.uint8 if not items.size or items.max() < 256 else np.uint32
        self._items = memoryview(padded.astype(small).data)
        self.places = _sorted_places(padded, depth) + depth
        self._places = memoryview(self.places.data)

    def matches(self, query: Sequence[int]) -> Iterator[Places]:
        """The places after the last item of the query, after its last two, and so on, as long as there are any."""
        places = Places(0, len(self.places), 0)
        for item in reversed(query[-self.depth :]):
            places = self._narrow(places, item)
            if places.first == places.last:
                return
            yield places

    def positions(self, places: Places) -> np.ndarray:
        """Where in the items the places are: each is the position of the item that follows."""
        positions: np.ndarray = self.places[places.first : places.last] - self.depth
        return positions

    def _narrow(self, places: Places, item: int) -> Places:
        items, sorted_places, back = self._items, self._places, places.length + 1
        key = lambda number: items[sorted_places[number] - back]
        numbers = range(places.first, places.last)
        first = places.first + bisect_left(numbers, item, key=key)
        last = places.first + bisect_right(numbers, item, lo=first - places.first, key=key)
        return Places(first, last, back)


def _sorted_places(padded: np.ndarray, depth: int) -> np.ndarray:
    """Places 0 to N by the `depth` items before them, the nearest first; place p is behind item p of the text."""
    bits = max(1, int(padded.max()).bit_length())
    width = min(63 // bits, depth)
    key = np.zeros(len(padded) - depth + 1, np.int64)
    for back in range(1, width + 1):
        key = (key << bits) | padded[depth - back : len(padded) + 1 - back]
    order = np.argsort(key)
    while width < depth:
        ranks = np.empty_like(key)
        ranks[order] = np.concatenate([[0], np.cumsum(np.diff(key[order]) != 0)])
        before = np.concatenate([np.zeros(min(width, len(ranks)), np.int64), ranks[:-width]])
        key = (ranks << 32) | before
        order, width = np.argsort(key), 2 * width
    return order
