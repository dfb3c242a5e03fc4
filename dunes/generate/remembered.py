"""The logits after texts, remembered from one request to the next: after a keystroke most texts are the same."""

# Shapes: V vocabulary.

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from dunes.generate.prefix_cache import PADDED, PrefixCache, common_length
from dunes.generate.step import CompiledStep

ROOM = 128
"""Room for ids is made in multiples of this, since all keys and values are copied for it."""

FEW = 32
"""A request that asked for less, and for less than those before it, may have been cancelled."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """What this request and the last one that was not cut short have asked for."""

    def __init__(self) -> None:
        self._before: dict[Key, Value] = {}
        self._now: dict[Key, Value] = {}

    def begin(self) -> None:
        """Begin a request: what was not asked for since the last time is forgotten, but not for one cut short."""
        if len(self._now) >= min(len(self._before), FEW):
            self._before, self._now = self._now, {}

    def get(self, key: Key) -> Value | None:
        """What is known of a key."""
        value = self._now.get(key)
        if value is None and (value := self._before.get(key)) is not None:
            self._now[key] = value
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember a value."""
        self._now[key] = value


class RememberedLogits:
    """The logits (V,) of a model, whose weights must not change meanwhile, after texts.

    Up to `width` texts, which should begin alike, are evaluated side by side; single ones by the `step`, if there
    is one. A text that this request or the last one asked for is not evaluated again; of another one, what the
    cache has of its beginning is not.
    """

    def __init__(self, model: nn.Module, width: int, step: CompiledStep | None = None) -> None:
        self.cache, self.rows = PrefixCache(model, step=step), PrefixCache(model, width)
        self._known = Remembered[tuple[int, ...], Tensor]()

    def begin(self, length: int) -> None:
        """Begin a request for texts of up to `length` ids."""
        self._known.begin()
        room = -(-length // ROOM) * ROOM
        self.cache.reserve(room)
        self.rows.reserve(room)

    def get(self, text: Sequence[int]) -> Tensor | None:
        """The logits after a text, if they are remembered."""
        return self._known.get(tuple(text))

    def after(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits after each of these texts."""
        missing = [list(text) for text in texts if self.get(text) is None]
        if len(missing) == 1:
            self.along(missing[0])
        elif missing:
            self._evaluate(missing)
        return [self._known_logits(text) for text in texts]

    def along(self, text: Sequence[int], more: Sequence[int] = ()) -> Tensor:
        """The logits after a text; those after each of the ids that may follow are remembered.

        A model that mixes tokens, which has no cache, gets the text alone.
        """
        ids = [*text, *(more if self.cache.cache is not None else ())]
        rows = self.cache.logits({0: ids}, {0: len(ids) - len(text) + 1})[0]
        for length, row in zip(range(len(text), len(ids) + 1), rows, strict=True):
            self._known.put(tuple(ids[:length]), row)
        return rows[0]

    def _known_logits(self, text: Sequence[int]) -> Tensor:
        logits = self.get(text)
        assert logits is not None, "it was evaluated"
        return logits

    def _evaluate(self, texts: Sequence[list[int]]) -> None:
        """Evaluate texts side by side, where possible in rows that have their beginnings; else in new rows."""
        rows = assigned(self.rows.ids, texts)
        missing = (len(text) - common_length(self.rows.ids[row], text, 1) for row, text in rows.items())
        if self.rows.cache is not None and max(missing) > PADDED:
            rows = self._copied(texts)
        for row, logits in self.rows.logits(rows).items():
            self._known.put(tuple(rows[row]), logits[-1])

    def _copied(self, texts: Sequence[list[int]]) -> dict[int, list[int]]:
        """Rows for these texts, which begin as the texts do; all but a few ids are evaluated once."""
        assert self.cache.cache is not None, "both caches are of the same model"
        start = texts[0][: min(common_length(texts[0], text, 0) for text in texts)]
        if len(start) - common_length(self.cache.ids[0], start, 0) > PADDED:
            self.along(start)
        first = torch.zeros(len(self.rows.ids), dtype=torch.long, device=self.cache.cache.length.device)
        self.rows.cache = self.cache.cache.select_rows(first)
        self.rows.ids = [list(self.cache.ids[0]) for _ in self.rows.ids]
        return assigned(self.rows.ids, texts)


def assigned(held: Sequence[Sequence[int]], texts: Sequence[list[int]]) -> dict[int, list[int]]:
    """A row for each text, where possible one that holds all of it but the last id."""
    free, rows, later = set(range(len(held))), dict[int, list[int]](), []
    for text in texts:
        row = next((r for r in sorted(free) if list(held[r]) == text[:-1]), None)
        if row is None:
            later.append(text)
        else:
            rows[row] = text
            free.discard(row)
    for text in later:
        rows[free.pop()] = text
    return dict(sorted(rows.items()))
