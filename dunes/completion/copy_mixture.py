"""Distribution of the next id at a cursor: the mixture of model and copies, restricted to what is typed."""

# Shapes: V vocabulary.

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from torch import Tensor

from dunes.completion.protocol import Cancelled
from dunes.completion.text import FileTokenizer
from dunes.generate.copying import Copies, Gate, Sources
from dunes.generate.prefix_cache import PieceReader
from dunes.generate.remembered import Remembered, RememberedLogits

PROPOSED = 16
"""Maximum number of ids of a copy that are evaluated in one forward."""


class Mixture:
    """Next-id log-probabilities (V,) after texts, cached for the last request while its sources stay the same."""

    def __init__(self, logits: RememberedLogits, files: FileTokenizer) -> None:
        self.logits, self.files = logits, files
        self._cache = Remembered[tuple[tuple[int, ...], bytes, bool], Tensor]()
        self._reader = PieceReader()
        self._mixed_from: tuple[Sources | None, Gate | None] = None, None

    def begin(
        self, copies: Copies, gate: Gate | None, prompt: Sequence[int], room: int, cancelled: Callable[[], bool]
    ) -> None:
        """Begin a request for up to `room` ids after a prompt, with the copies in it and a check for cancellation.

        Raises Cancelled.
        """
        if self._mixed_from[0] is not copies.sources or self._mixed_from[1] is not gate:
            self._cache = Remembered()
        self._cache.begin()
        self._request_logprobs: dict[tuple[int, ...], Tensor] = {}
        self._mixed_from, self.copies, self.gate, self._cancelled = (copies.sources, gate), copies, gate, cancelled
        self.logits.begin(len(prompt) + room)
        if self.logits.get(prompt) is None:
            for _ in self._reader.read(self.logits.cache, 0, prompt):
                self._stop_if_cancelled()

    def after(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Next-id log-probabilities (V,) after each text, -inf for ids that contradict the typed text. Raises
        Cancelled."""
        self._stop_if_cancelled()
        rows = self.logits.after(texts)
        return [self._logprobs(text, logits) for text, logits in zip(texts, rows, strict=True)]

    def after_one(self, text: Sequence[int], room: int) -> Tensor:
        """The same for one text. A forward also evaluates up to `room` ids that copies propose."""
        vocab = self.logits.cache.vocab
        if self.gate and vocab is not None and self.logits.get(text) is None:
            self._stop_if_cancelled()
            proposed = self.copies.propose(text, min(PROPOSED, room))
            self.logits.after_one(text, [*takewhile(lambda id: id < vocab, proposed)])
        return self.after([text])[0]

    def typed_logprob(self, prompt: Sequence[int]) -> float:
        """log P(typed text | prompt); subtract it to condition a line on what is typed.

        Ids that are only a part of the typed text count once this request has evaluated their continuation.
        """
        prob = self._typed_prob(tuple(prompt))
        return math.log(prob) if prob > 0 else 0.0

    def word_end_logprob(self, text: Sequence[int]) -> float:
        """Log-probability that an identifier at the end of this text is complete; 0 if not evaluated."""
        mixed = self._request_logprobs.get(tuple(text))
        return 0.0 if mixed is None else float(mixed[self.files.ends_word[: len(mixed)]].logsumexp(-1))

    def _typed_prob(self, text: tuple[int, ...]) -> float:
        rest = self.copies.uncovered(text)
        if not rest:
            return 1.0
        if (mixed := self._request_logprobs.get(text)) is None:
            return 0.0
        probs = mixed.exp()
        total = float(probs.sum())
        for id in self.files.shorter(rest):
            total -= float(probs[id]) * (1 - self._typed_prob((*text, id)))
        return total

    def _stop_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("a newer request came")

    def _logprobs(self, text: Sequence[int], logits: Tensor) -> Tensor:
        rest, first = self.copies.uncovered(text), len(text) == self.copies.start
        key = tuple(text), rest, first
        if (mixed := self._cache.get(key)) is None:
            mixed = self._mix(text, logits, self.files.allowed(rest), first)
            self._cache.put(key, mixed)
        self._request_logprobs[key[0]] = mixed
        return mixed

    def _mix(self, text: Sequence[int], logits: Tensor, allowed: Tensor | None, first: bool) -> Tensor:
        mixed = logits[: len(self.files.pieces)].float().cpu().log_softmax(-1)  # the gate is on the CPU
        if allowed is not None:
            allowed = allowed[: len(mixed)]
        if self.gate:
            mixed = self.gate.mix(self.copies, mixed, text, allowed)
        if allowed is not None:
            mixed = mixed.masked_fill(~allowed, -math.inf)
            # Condition on what is typed. An id that is a part of it is weighed by its continuation, so later ids
            # are not.
            mixed = mixed.log_softmax(-1) if first else mixed
        return mixed
