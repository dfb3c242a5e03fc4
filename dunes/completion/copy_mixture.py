"""The next-id distribution at a cursor: a mixture of model and copies, limited to ids that fit the typed text.

Logits and mixtures after a text are cached for the next request, since most texts stay the same after a keystroke.
"""

# Shapes: V vocabulary.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from dunes.completion import Cancelled
from dunes.completion.text import FileTokenizer
from dunes.generate.copying import Copies, Gate, Sources
from dunes.generate.prefix_cache import PADDED, PieceReader, PrefixCache, common_length

PROPOSED = 16
"""Maximum number of copied ids that one forward evaluates."""
ROOM = 128
"""Capacities of KV caches are multiples of ROOM ids, since enlarging a cache copies all its keys and values."""
PIECE = 256
"""Minimum number of prompt tokens evaluated between two checks for cancellation. With 135M parameters, a token
took 1.5 times (float32) to 2.5 times (bfloat16) as long in pieces of 32 tokens as in longer pieces."""
FEW = 32
"""A request may have been cancelled if it used fewer than FEW texts, and fewer than the previous request. The next
request then drops no cache entries."""


@dataclass
class Entry:
    """The logits (V,) after a text, and the newest mixture (V,) computed from them, with the number of the last
    request that used the mixture and the mixture's inputs."""

    logits: Tensor
    mixed: Tensor | None = None
    request: int = 0
    inputs: tuple[object, ...] = ()


class RememberedLogits:
    """Cached logits (V,) after texts. If the model's weights change, the cached logits are wrong.

    Up to `width` texts are evaluated in one batch, which is fast if they have a long common prefix. A single text
    is evaluated with `cache`, if given. Texts of this request, or of the last request that was not cancelled, are
    not evaluated again. Of any other text, only the ids after the prefix in the KV cache are evaluated.
    """

    def __init__(self, model: nn.Module, width: int, cache: PrefixCache | None = None) -> None:
        self.cache, self.rows = cache or PrefixCache(model), PrefixCache(model, width)
        self._previous = dict[tuple[int, ...], Entry]()
        self._current = dict[tuple[int, ...], Entry]()

    def begin(self, length: int) -> None:
        """Begin a request for texts of up to `length` ids, and drop entries that the previous request did not
        use."""
        if len(self._current) >= min(len(self._previous), FEW):
            self._previous, self._current = self._current, {}
        room = -(-length // ROOM) * ROOM
        self.cache.reserve(room)
        self.rows.reserve(room)

    def get(self, text: Sequence[int]) -> Entry | None:
        """The entry of a text; None if it is not cached."""
        key = tuple(text)
        if key not in self._current and key in self._previous:
            self._current[key] = self._previous[key]
        return self._current.get(key)

    def after(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits after each of these texts."""
        missing = [list(text) for text in texts if self.get(text) is None]
        if len(missing) == 1:
            self.after_one(missing[0])
        elif missing:
            self._evaluate(missing)
        return [self._current[tuple(text)].logits for text in texts]

    def after_one(self, text: Sequence[int], more: Sequence[int] = ()) -> Tensor:
        """The logits after a text; also computes and caches the logits after each id of its continuation `more`.

        For a model without a KV cache, only `text` is evaluated.
        """
        ids = [*text, *(more if self.cache.cache is not None else ())]
        rows = self.cache.logits({0: ids}, {0: len(ids) - len(text) + 1})[0]
        for length, row in zip(range(len(text), len(ids) + 1), rows, strict=True):
            self._put(ids[:length], row)
        return rows[0]

    def _put(self, text: Sequence[int], logits: Tensor) -> None:
        if self.get(text) is None:
            self._current[tuple(text)] = Entry(logits)

    def _evaluate(self, texts: Sequence[list[int]]) -> None:
        """Evaluate texts in one batch. If many ids of a text are missing in its cache row, the common prefix is
        first copied to all rows."""
        rows = assign_rows(self.rows.ids, texts)
        missing = (len(text) - common_length(self.rows.ids[row], text, 1) for row, text in rows.items())
        if self.rows.cache is not None and max(missing) > PADDED:
            rows = self._copy_prefix(texts)
        for row, logits in self.rows.logits(rows).items():
            self._put(rows[row], logits[-1])

    def _copy_prefix(self, texts: Sequence[list[int]]) -> dict[int, list[int]]:
        """Copy the texts' common prefix to all rows, so that most ids are evaluated once; returns texts by row."""
        assert self.cache.cache is not None, "both caches are of the same model"
        start = texts[0][: min(common_length(texts[0], text, 0) for text in texts)]
        if len(start) - common_length(self.cache.ids[0], start, 0) > PADDED:
            self.after_one(start)
        first = torch.zeros(len(self.rows.ids), dtype=torch.long, device=self.cache.cache.length.device)
        self.rows.cache = self.cache.cache.select_rows(first)
        self.rows.ids = [list(self.cache.ids[0]) for _ in self.rows.ids]
        return assign_rows(self.rows.ids, texts)


def assign_rows(cached: Sequence[Sequence[int]], texts: Sequence[list[int]]) -> dict[int, list[int]]:
    """Assign each text a row of the KV cache, if possible one that contains all ids of the text but the last."""
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


class Mixture:
    """Next-id log-probabilities (V,) of the mixture of model and copies, cached as long as gate and sources stay
    the same."""

    def __init__(self, logits: RememberedLogits, files: FileTokenizer) -> None:
        self.logits, self.files = logits, files
        self._reader = PieceReader(least=PIECE)
        self._request = self._version = 0
        self._sources: Sources | None = None
        self.gate: Gate | None = None

    def begin(
        self, copies: Copies, gate: Gate | None, prompt: Sequence[int], room: int, cancelled: Callable[[], bool]
    ) -> None:
        """Begin a request for up to `room` ids after a prompt; `copies` proposes the copied ids.

        Raises Cancelled once `cancelled()` returns True.
        """
        self._request += 1
        if copies.sources is not self._sources or gate is not self.gate:
            self._version += 1  # all mixtures are outdated
        self._sources, self.copies, self.gate, self._cancelled = copies.sources, copies, gate, cancelled
        self.logits.begin(len(prompt) + room)
        if self.logits.get(prompt) is None:
            for _ in self._reader.read(self.logits.cache, 0, prompt):
                self._stop_if_cancelled()

    def after(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Next-id log-probabilities (V,) after each text, -inf for ids that contradict the typed text. Raises
        Cancelled."""
        self._stop_if_cancelled()
        self.logits.after(texts)
        return [self._mixed(text) for text in texts]

    def after_one(self, text: Sequence[int], room: int) -> Tensor:
        """Next-id log-probabilities (V,) after one text. The same forward also evaluates copied ids, at most
        `room`."""
        vocab = self.logits.cache.vocab
        if self.gate and vocab is not None and self.logits.get(text) is None:
            self._stop_if_cancelled()
            proposed = self.copies.propose(text, min(PROPOSED, room))
            self.logits.after_one(text, [*takewhile(lambda id: id < vocab, proposed)])
        return self.after([text])[0]

    def typed_logprob(self, prompt: Sequence[int]) -> float:
        """`log P(typed text | prompt)`. A line's log-probability minus this value is conditional on the typed
        text.

        If an id covers only a part of the typed text, its continuations count only if this request has computed
        their probabilities.
        """
        prob = self._typed_prob(tuple(prompt))
        return math.log(prob) if prob > 0 else 0.0

    def word_end_logprob(self, text: Sequence[int]) -> float:
        """Log-probability that an identifier at the end of this text is complete; 0 if this request has not
        evaluated the text."""
        mixed = self._evaluated(text)
        if mixed is None:
            return 0.0
        return float(mixed.masked_fill(self.files.in_word[: len(mixed)], -math.inf).logsumexp(-1))

    def _typed_prob(self, text: tuple[int, ...]) -> float:
        rest = self.copies.uncovered(text)
        if not rest:
            return 1.0
        if (mixed := self._evaluated(text)) is None:
            return 0.0
        probs = mixed.exp()
        total = float(probs.sum())
        for id in self.files.shorter(rest):
            total -= float(probs[id]) * (1 - self._typed_prob((*text, id)))
        return total

    def _stop_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("a newer request came")

    def _evaluated(self, text: Sequence[int]) -> Tensor | None:
        """The log-probabilities (V,) after a text; None if this request has not evaluated the text."""
        entry = self.logits.get(text)
        return entry.mixed if entry is not None and entry.request == self._request else None

    def _mixed(self, text: Sequence[int]) -> Tensor:
        entry, rest = self.logits.get(text), self.copies.uncovered(text)
        assert entry is not None, "its logits were evaluated"
        inputs = self._version, rest, len(text) == self.copies.start
        if entry.mixed is None or entry.inputs != inputs:
            entry.mixed, entry.inputs = self._mix(text, entry.logits, rest, self.gate), inputs
        entry.request = self._request
        return entry.mixed

    def alone(self, text: Sequence[int]) -> Tensor:
        """Log-probabilities (V,) under the model without copies, after a text whose logits are cached."""
        entry = self.logits.get(text)
        assert entry is not None, "its logits were evaluated"
        return self._mix(text, entry.logits, self.copies.uncovered(text), None)

    def _mix(self, text: Sequence[int], logits: Tensor, rest: bytes, gate: Gate | None) -> Tensor:
        mixed, allowed = self.files.logprobs(logits), self.files.allowed(rest)
        if allowed is not None:
            allowed = allowed[: len(mixed)]
        if gate:
            mixed = gate.mix(self.copies, mixed, text, allowed)
        if allowed is not None:
            mixed = mixed.masked_fill(~allowed, -math.inf)
            # Only the first id's distribution is normalised here; `typed_logprob` accounts for later ids.
            mixed = mixed.log_softmax(-1) if len(text) == self.copies.start else mixed
        return mixed
