"""Logits after texts, cached from one request to the next: after a keystroke most texts are the same."""

# Shapes: V vocabulary.

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from dunes.generate.prefix_cache import PADDED, PrefixCache, common_length
from dunes.generate.step import CompiledStep

ROOM = 128
"""Capacities are multiples of this, since growing copies all keys and values."""

FEW = 32
"""Requests with fewer values than this, and than the previous request, may have been cancelled."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Cache of the values used by this request and by the previous one that was not cancelled."""

    def __init__(self) -> None:
        self._previous: dict[Key, Value] = {}
        self._current: dict[Key, Value] = {}

    def begin(self) -> None:
        """Begin a request, and drop values that the last one did not use, unless it may have been cancelled."""
        if len(self._current) >= min(len(self._previous), FEW):
            self._previous, self._current = self._current, {}

    def get(self, key: Key) -> Value | None:
        """The value of a key; None if it is not cached."""
        value = self._current.get(key)
        if value is None and (value := self._previous.get(key)) is not None:
            self._current[key] = value
        return value

    def put(self, key: Key, value: Value) -> None:
        """Cache a value."""
        self._current[key] = value


class RememberedLogits:
    """Cached logits (V,) after texts, for a model whose weights must not change.

    Up to `width` texts, which should have a common prefix, are evaluated in one batch, a single text by the
    `step`, if any. Logits that this request or the previous one used are not computed again, nor is the prefix of
    a text that is in the KV cache.
    """

    def __init__(self, model: nn.Module, width: int, step: CompiledStep | None = None) -> None:
        self.cache, self.rows = PrefixCache(model, step=step), PrefixCache(model, width)
        self._logits = Remembered[tuple[int, ...], Tensor]()

    def begin(self, length: int) -> None:
        """Begin a request for texts of up to `length` ids."""
        self._logits.begin()
        room = -(-length // ROOM) * ROOM
        self.cache.reserve(room)
        self.rows.reserve(room)

    def get(self, text: Sequence[int]) -> Tensor | None:
        """The logits after a text; None if they are not cached."""
        return self._logits.get(tuple(text))

    def after(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits after each of these texts."""
        missing = [list(text) for text in texts if self.get(text) is None]
        if len(missing) == 1:
            self.after_one(missing[0])
        elif missing:
            self._evaluate(missing)
        return [self._require(text) for text in texts]

    def after_one(self, text: Sequence[int], more: Sequence[int] = ()) -> Tensor:
        """The logits after a text; also computes and caches the logits after each id of its continuation `more`.

        A model that mixes tokens, which has no KV cache, evaluates the text alone.
        """
        ids = [*text, *(more if self.cache.cache is not None else ())]
        rows = self.cache.logits({0: ids}, {0: len(ids) - len(text) + 1})[0]
        for length, row in zip(range(len(text), len(ids) + 1), rows, strict=True):
            self._logits.put(tuple(ids[:length]), row)
        return rows[0]

    def _require(self, text: Sequence[int]) -> Tensor:
        logits = self.get(text)
        assert logits is not None, "it was evaluated"
        return logits

    def _evaluate(self, texts: Sequence[list[int]]) -> None:
        """Evaluate texts in one batch, in rows with their prefixes if possible, else in new rows."""
        rows = assign_rows(self.rows.ids, texts)
        missing = (len(text) - common_length(self.rows.ids[row], text, 1) for row, text in rows.items())
        if self.rows.cache is not None and max(missing) > PADDED:
            rows = self._copy_prefix(texts)
        for row, logits in self.rows.logits(rows).items():
            self._logits.put(tuple(rows[row]), logits[-1])

    def _copy_prefix(self, texts: Sequence[list[int]]) -> dict[int, list[int]]:
        """Rows for these texts with copies of their common prefix, so that nearly all ids are evaluated once."""
        assert self.cache.cache is not None, "both caches are of the same model"
        start = texts[0][: min(common_length(texts[0], text, 0) for text in texts)]
        if len(start) - common_length(self.cache.ids[0], start, 0) > PADDED:
            self.after_one(start)
        first = torch.zeros(len(self.rows.ids), dtype=torch.long, device=self.cache.cache.length.device)
        self.rows.cache = self.cache.cache.select_rows(first)
        self.rows.ids = [list(self.cache.ids[0]) for _ in self.rows.ids]
        return assign_rows(self.rows.ids, texts)


def assign_rows(cached: Sequence[Sequence[int]], texts: Sequence[list[int]]) -> dict[int, list[int]]:
    """A row for each text; if possible, one that contains all but its last id."""
    free, rows, later = set(range(len(cached))), dict[int, list[int]](), []
    for text in texts:
        row = next((r for r in sorted(free) if list(cached[r]) == text[:-1]), None)
        if row is None:
            later.append(text)
        else:
            rows[row] = text
            free.discard(row)
    for text in later:
        rows[free.pop()] = text
    return dict(sorted(rows.items()))
