"""Completion of lines: a model that learned the code, and what the code at hand has that can be copied.

Both are one distribution over the next id (`generate/copying.py`). The line is decoded greedily from it: what can be
copied is proposed, and verified by one forward of the model. The last ids of the typed line are generated again,
since a token may go on where the typing ended (token healing).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dunes.checkpoint import LoadedModel
from dunes.generate import PrefixCache, Sampler, force_prefix, generate
from dunes.generate.context_index import ContextIndex
from dunes.generate.copying import Copies, Gate, index_ids
from dunes.generate.step import CompiledStep
from dunes.runs.completion_gate import scored_places
from dunes.runs.completion_protocol import Suggestion, first_word
from dunes.runs.completion_text import FileTokenizer, window
from dunes.runs.write import split_last_tokens

LIMIT = 48
"""Tokens of a suggestion at most."""
SUFFIX = 0.25
"""The part of the context length that the text behind the cursor may take."""


class CompletionEngine:
    """Completes lines with a model, and by copying from the file above the cursor and from `far`.

    `gate` mixes the two; without one, the model is alone. `find_step` is asked for a compiled step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        far: Sequence[ContextIndex] = (),
        gate: Gate | None = None,
        header: bool = False,
        find_step: Callable[[], CompiledStep | None] = lambda: None,
    ) -> None:
        self.loaded, self.far, self.gate, self.header = loaded, far, gate, header
        self.tokenizer = loaded.require_tokenizer()
        self.files = FileTokenizer(self.tokenizer, header)
        self.cache, self._find_step = PrefixCache(loaded.model), find_step
        self._near: tuple[list[int], ContextIndex] | None = None

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        text = self.files.tokenize(before, name)
        above, line = text.ids[: text.starts[-1]], text.ids[text.starts[-1] :]
        kept, healed = split_last_tokens(line, self.files.pieces)
        copies = Copies(self.index_of(above), self.far)
        chosen = Chosen()
        prompt = window([*above, *kept], self.loaded.context_length - LIMIT)
        ids = self._decode(prompt, copies, healed, chosen)
        data = b"".join(self.files.pieces[i] for i in ids)[len(healed) :]
        text_ = data.decode(errors="ignore")
        cut = min((text_.index(end) for end in "\r\n" if end in text_), default=len(text_))
        return self._suggestion(text_[:cut], chosen.logprobs, ids, healed)

    def index_of(self, above: list[int]) -> ContextIndex:
        """The index of the lines above the cursor, which is that of the last call if they are the same."""
        if self._near is None or self._near[0] != above:
            self._near = above, index_ids(above, len(self.files.pieces))
        return self._near[1]

    def _decode(self, prompt: Sequence[int], copies: Copies, healed: bytes, chosen: "Chosen") -> list[int]:
        """The ids from the prompt to the end of the line, which begin with the `healed` bytes."""
        pieces, start = self.files.pieces, len(prompt)
        processors = [partial(self.gate.mix, copies)] if self.gate else []
        sample = Sampler((*processors, partial(force_prefix, pieces, healed, start), chosen), chosen.choose)
        self.cache.step = self._find_step()
        ids: list[int] = []
        for token in generate(
            self.loaded.model,
            prompt,
            limit=LIMIT,
            context_length=self.loaded.context_length,
            sample=sample,
            stop=self.tokenizer.stops,
            cache=self.cache,
            proposer=copies.propose if self.gate else None,
        ):
            ids.append(token.id)
            done = b"".join(pieces[i] for i in ids)[len(healed) :]
            if b"\n" in done or b"\r" in done or not pieces[token.id]:
                break
        return ids

    def _suggestion(self, text: str, logprobs: list[float], ids: list[int], healed: bytes) -> Suggestion:
        end, total, word = len(first_word(text).encode()) + len(healed), 0.0, 0.0
        size = 0
        for id, logprob in zip(ids, logprobs, strict=False):
            word = total + logprob if size < end else word
            total, size = total + logprob, size + len(self.files.pieces[id])
        return Suggestion(text, math.exp(word), math.exp(total))

    def bits(self, text: str, name: str = "") -> float:
        """The information content of a file's text in bits."""
        total = 0.0
        for id, logprobs, candidates in scored_places(self.loaded, self.files.tokenize(text, name), self.far):
            mixed = self.gate.change(candidates, logprobs) if self.gate else logprobs
            total -= float(mixed[id])
        return total / math.log(2)


class Chosen:
    """A processor and a choice that note the log-probability of each id that is chosen."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def __call__(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        return logits.log_softmax(-1)

    def choose(self, logits: Tensor) -> Tensor:
        best = logits.argmax(-1)
        self.logprobs.append(float(logits[best]))
        return best
