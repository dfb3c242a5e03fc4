"""Text generation: a prompt is encoded to ids, and new ids are decoded to text, up to a limit or a stop."""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import inf
from time import monotonic
from typing import Any

from dunes.checkpoint import LoadedModel
from dunes.generate import (
    DraftModel,
    PrefixCache,
    Proposer,
    Request,
    Sampler,
    Token,
    first_proposal,
    generate_all,
    limit_vocab,
    look_up,
    prompt_tokens,
    sampler,
)
from dunes.generate.decode_graph import CompiledStep
from dunes.measure import ranks
from dunes.parts import CacheFormat, cache_for
from dunes.progress import raise_if_asked
from dunes.text import DecodeStream
from dunes.units import format_bytes, format_count, plural


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, and the text that it completes; the text is empty while a character is incomplete."""

    text: str
    token: Token


class TextGenerator:
    """Generates text with a model whose weights do not change. Raises ValueError for a model without a tokenizer,
    and for a `format` if the model has recurrent states.

    The KV cache of the last text is kept. If the next text has the same prefix, like the next turn of a
    conversation, only the ids after the prefix are evaluated. A prompt is a text or its ids. Before each token,
    `find_step()` is called to get a compiled step; with a cache `format`, no step is used.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        find_step: Callable[[], CompiledStep | None] = lambda: None,
        format: CacheFormat | None = None,
    ) -> None:
        self.model, self.context_length = loaded.model, loaded.context_length
        self.tokenizer = loaded.require_tokenizer()
        self.cache: PrefixCache | None = None
        self._find_step, self.format = find_step, format
        if format is not None:
            cache_for(self.model, 1, 1, format=format)  # raises ValueError for an unsupported format

    def __repr__(self) -> str:
        return f"TextGenerator({self.tokenizer}, context length {self.context_length}, {self.cache})"

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        sample: Sampler | None = None,
        until: Sequence[str] = (),
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Yield a piece per token of one request (`options` as for `request`); closing the generator stops it."""
        stream = DecodeStream(self.tokenizer)
        for (token,) in self.tokens([self.request(prompt, max_tokens, sample, **options)], until):
            assert token is not None, "generation ends with its only row"
            yield Piece(stream.step(token.id), token)

    def text(self, prompt: str | Sequence[int], max_tokens: int, sample: Sampler | None = None) -> str:
        """The text that `stream` yields."""
        return "".join(piece.text for piece in self.stream(prompt, max_tokens, sample))

    def request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        sample: Sampler | None = None,
        *,
        stop: Container[int] | None = None,
        alternatives: int = 0,
        proposer: Proposer | None = None,
    ) -> Request:
        """A request limited to the tokenizer's ids; by default, it is greedy and ends at the tokenizer's stops."""
        sample = (sample or Sampler()).after(partial(limit_vocab, self.tokenizer.vocab))
        if ranks.count() > 1:
            sample = sample.after(lambda logits, ids: ranks.broadcast_tensor(logits))
        stop = self.tokenizer.stops if stop is None else stop
        return Request(self._ids(prompt), max_tokens, sample, stop, alternatives, proposer=proposer)

    def tokens(
        self, requests: Sequence[Request | None], until: Sequence[str] = ()
    ) -> Iterator[list[Token | None]]:
        """Yield the rows of `generate_all` for these requests; a cache with the same number of rows is reused.

        Each text also ends with the token that completes one of the strings in `until`; empty strings are ignored.
        """
        until = [stop for stop in until if stop]
        if self.cache is None or len(self.cache.ids) != len(requests):
            self.cache = PrefixCache(self.model, len(requests), format=self.format)
        self._use_step(self.cache, requests)
        for row in generate_all(self.model, requests, context_length=self.context_length, cache=self.cache):
            for request, token in zip(requests, row, strict=True) if until else ():
                if request and token and any(stop.encode() in self._bytes(request) for stop in until):
                    request.end = len(request.ids)
            yield row
            raise_if_asked()
            self._use_step(self.cache, requests)

    def _use_step(self, cache: PrefixCache, requests: Sequence[Request | None]) -> None:
        if cache.format is None:
            step, proposes = self._find_step(), any(r and r.proposer for r in requests)
            # A step's logits differ slightly from the model's, so a proposer needs a step that verifies proposals.
            verifies = step and cache.cache and step.most(cache.cache, 0) > 1
            cache.step = step if verifies or not proposes else None

    def proposer(self, lookup: bool, draft: LoadedModel | None) -> Proposer | None:
        """A proposer for one text at a time: prompt lookup or, if it proposes nothing, the draft model. None if
        neither is given.

        Raises ValueError for a draft with another vocabulary.
        """
        proposers: list[Proposer] = [look_up] if lookup else []
        if draft is not None:
            own, its = (t.inner.get_vocab().items() for t in (self.tokenizer, draft.require_tokenizer()))
            if own != its:
                raise ValueError("the draft's vocabulary is not the model's; use a draft with the same tokenizer")
            proposers.append(DraftModel(draft.model, draft.context_length))
        return first_proposal(*proposers) if proposers else None

    def describe_forwards(self, tokens: int) -> str:
        """The number of forward passes in which `tokens` tokens were generated, and tokens per pass."""
        assert self.cache is not None, "tokens come first"
        return f"{plural(self.cache.forwards, 'forward')}, {tokens / self.cache.forwards:.2f} tokens per forward"

    def prompt_tokens(self, prompt: str | Sequence[int], alternatives: int = 0) -> list[Token]:
        """The prompt's tokens after the first, with log-probabilities; a long prompt is truncated on the left."""
        return prompt_tokens(self.model, self._ids(prompt)[-self.context_length :], alternatives)

    def _bytes(self, request: Request) -> bytes:
        """Bytes generated for the request so far, including special tokens."""
        return self.tokenizer.inner.decode(request.ids[len(request.prompt) :], skip_special_tokens=False).encode()

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return self.tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string; stops are applied one after the other, as in lm-evaluation-harness."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text


def sample_text(loaded: LoadedModel, seed: int = 0, max_tokens: int = 120, seconds: float = inf) -> str:
    """A sample generated without a prompt; after `seconds`, no further token is generated."""
    end = monotonic() + seconds
    pieces = TextGenerator(loaded).stream("", max_tokens, sampler(0.8, top_k=50, seed=seed))
    return "".join(piece.text for piece in takewhile(lambda piece: monotonic() < end, pieces)).strip("\n")


def describe_generation(
    generator: TextGenerator, prompt: int, times: Sequence[float], max_tokens: int | None
) -> Iterator[str]:
    """Yield lines about the generation after a prompt of `prompt` tokens.

    `times` has the start time, then the time of each token, in seconds. `max_tokens` is the maximum number of new
    tokens; None if the text was interrupted.
    """
    count, cache = len(times) - 1, generator.cache
    if count:
        form = ""
        if cache and cache.format and cache.cache:
            form = f", int{cache.format.bits} cache of {format_bytes(cache.cache.nbytes)}"
        elif cache and cache.step:
            form = f", compiled with {str(cache.step.dtype).removeprefix('torch.')} weights"
        yield describe_rates(min(prompt, generator.context_length), times) + form
    if max_tokens is not None and count < max_tokens:
        yield f"the model ended the text after {count} of {plural(max_tokens, 'token')}"


def describe_rates(prompt: int, times: Sequence[float]) -> str:
    """Tokens/s of prefill (`prompt` tokens) and of decoding; `times` is as for `describe_generation`."""
    start, first, last = times[0], times[1], times[-1]
    text = f"prompt: {plural(prompt, 'token')}, {format_count(prompt / (first - start))} tokens/s"
    if len(times) == 2:
        return text
    rate = format_count((len(times) - 2) / (last - first))
    return f"{text}; generated: {plural(len(times) - 1, 'token')}, {rate} tokens/s"
