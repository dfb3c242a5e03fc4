"""Long texts are read in pieces, so that other work can be done, or this one be cancelled, in between."""

from collections.abc import Iterator, Sequence
from time import perf_counter

from dunes.generate.prefix_cache import PrefixCache, common_length

FIRST, LEAST = 128, 32
"""Tokens of the first piece, and of any, at least."""


class PieceReader:
    """Reads texts into a cache in pieces that take about so many seconds each."""

    def __init__(self, seconds: float = 0.03) -> None:
        self.seconds, self._size = seconds, float(FIRST)

    def read(self, cache: PrefixCache, row: int, text: Sequence[int]) -> Iterator[None]:
        """Read a text but for its last piece into a row, and yield before each piece. The cache needs room for it;
        nothing is read for a model that mixes tokens, which has no cache."""
        while cache.cache is not None:
            known = common_length(cache.ids[row], text, 1)
            if len(text) - 1 - known <= self._size:
                return
            yield
            start = perf_counter()
            cache.logits({row: text[: known + int(self._size)]})
            took = perf_counter() - start
            self._size = max(LEAST, min(self._size * self.seconds / took, 2 * self._size))
