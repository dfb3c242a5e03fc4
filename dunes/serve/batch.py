"""Continuous batching: `Batch.advance` generates one token of every text and prefills one piece of one waiting
prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from dunes.augment import row_adapters
from dunes.checkpoint import LoadedModel
from dunes.generate import PrefixCache, Request, Sampler, Token, generate_all, limit_vocab, prompt_tokens, sampler
from dunes.generate.decode_graph import CompiledStep
from dunes.generate.prefix_cache import PieceReader, common_length
from dunes.generate.sampling import greedy
from dunes.serve.fields import Refused
from dunes.serve.requests import Answer, Event, TextRequest, TokenText
from dunes.text import DecodeStream, Tokenizer
from dunes.units import plural

EXCEEDS = "the request exceeds the available context size"
"""Message of llama-server for a prompt that is too long."""
TOO_LONG = "exceed_context_size_error"
"""Error type of llama-server for a prompt that is too long."""
ROWS = 16
"""Maximum number of texts in a batch; further texts wait."""


@dataclass(eq=False)
class Row:
    """A text in progress. `emit` receives the parts of the text, and finally the complete answer."""

    text_request: TextRequest
    request: Request
    tokenizer: Tokenizer
    emit: Callable[[Event], None]
    is_cancelled: Callable[[], bool]
    errors: Sequence[Exception] = ()
    """Errors raised by the sampler of this text."""
    pieces: Iterator[None] | None = None
    ready: bool = False
    """True once the cache contains the prompt except its last piece."""

    def __post_init__(self) -> None:
        self.start, self.answer = perf_counter(), Answer(prompt_tokens=len(self.request.prompt))
        self._decode, self._pending, self._length = DecodeStream(self.tokenizer), "", 0

    def push(self, token: Token) -> None:
        """Add a token and emit its text, but withhold a suffix that may become a stop string."""
        if not self.answer.new_tokens:
            self.answer.prompt_seconds = perf_counter() - self.start
        self.answer.new_tokens += 1
        offset, piece = self._length, self._decode.step(token.id)
        self._length += len(piece)
        tokens = [token_text(self.tokenizer, token, offset)] if self.text_request.logprobs is not None else []
        self.answer.tokens += tokens
        self.answer.ids.append(token.id)
        text = self._pending + piece
        places = [(text.find(stop), stop) for stop in self.text_request.stop if stop in text]
        if places:
            place, self.answer.stopped_at = min(places)
            self.emit_text(text[:place], tokens, token.id)
            self._pending, self.request.end = "", len(self.request.ids)
        else:
            overlap = max((_overlap(text, stop) for stop in self.text_request.stop), default=0)
            self._pending = text[len(text) - overlap :]
            self.emit_text(text[: len(text) - overlap], tokens, token.id)

    def finish(self) -> None:
        """Emit the withheld text, then the complete answer."""
        self.emit_text(self._pending)
        answer, is_complete = self.answer, self.answer.new_tokens < self.text_request.max_tokens
        answer.reason = "word" if answer.stopped_at else "stop" if is_complete else "length"
        answer.seconds = perf_counter() - self.start
        self.emit(answer)

    def emit_text(self, text: str, tokens: Sequence[TokenText] = (), *ids: int) -> None:
        """Append text to the answer, and emit the text, tokens and ids as a part unless all are empty."""
        self.answer.text += text
        if text or tokens or ids:
            self.emit(Answer(text, tokens=[*tokens], ids=[*ids]))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _collect_errors(choose: Sampler, errors: list[Exception]) -> Sampler:
    """Wrap a sampler. If the sampler raises an error, the wrapper adds the error to `errors`, and returns the most
    probable id."""
    if choose.choose is greedy:
        return choose  # `greedy` cannot fail, and compiled decoding tests for `greedy`

    def pick(logits: Tensor) -> Tensor:
        try:
            return choose.choose(logits)
        except Exception as error:
            errors.append(error)
            return logits.argmax(-1)

    return Sampler(choose.processors, pick)


def token_text(tokenizer: Tokenizer, token: Token, offset: int) -> TokenText:
    """A token at a character offset, with its bytes and alternatives. For a special token, the bytes encode the
    token's name."""

    def data(id: int) -> bytes:
        piece = tokenizer.token_bytes[id] if id < len(tokenizer.token_bytes) else b""
        return piece or (tokenizer.inner.id_to_token(id) or "").encode()

    top = [(id, data(id), logprob) for id, logprob in token.alternatives]
    return TokenText(token.id, data(token.id), token.logprob, top, offset)


class Batch:
    """Texts that a model generates in one batch. Each text is the same as if it were generated alone.

    `adapters` maps names in requests to adapters; other names select the adapter `default`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        find_step: Callable[[], CompiledStep | None] = lambda: None,
        adapters: Mapping[str, str | None] | None = None,
        default: str | None = None,
    ) -> None:
        self.loaded, self.tokenizer = loaded, loaded.require_tokenizer()
        self.rows: list[Row | None] = [None]
        self.find_step, self._adapters, self._default = find_step, adapters or {}, default
        self._requests: list[Request | None] = [None]
        self._cache = self._make_cache(1)
        self._tokens: Iterator[list[Token | None]] = iter(())
        self._reader = PieceReader()

    @property
    def active(self) -> bool:
        """True while the batch has a text."""
        return any(self.rows)

    @property
    def is_full(self) -> bool:
        """True if the batch has no room for another text."""
        return sum(row is not None for row in self.rows) >= ROWS

    def prompt_ids(self, text: TextRequest) -> Sequence[int]:
        """The ids of a prompt. Raises Refused for a prompt that is empty, too long or has unknown ids."""
        vocab, room, prompt = self.tokenizer.vocab, self.loaded.context_length, text.prompt
        longest = max(map(len, self.tokenizer.token_bytes))
        if isinstance(prompt, str) and len(prompt.encode()) > longest * room:
            raise Refused(400, f"{EXCEEDS}: {len(prompt)} characters; at most {room} tokens", TOO_LONG)
        ids = self.tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt
        if invalid := [i for i in ids if not 0 <= i < vocab]:
            raise Refused(400, f"Field 'prompt': token {invalid[0]}; the model has tokens 0 to {vocab - 1}")
        if not ids:
            raise Refused(400, "Field 'prompt': no tokens; expected at least one")
        if len(ids) > room:
            raise Refused(400, f"{EXCEEDS}: {plural(len(ids), 'token')} in a prompt; at most {room}", TOO_LONG)
        return ids

    def add(self, text: TextRequest, emit: Callable[[Event], None], is_cancelled: Callable[[], bool]) -> None:
        """Add a text to generate. Raises Refused for a prompt that is empty, too long or has unknown ids."""
        ids = self.prompt_ids(text)
        choose = sampler(seed=text.seed, **text.sampling).after(partial(limit_vocab, self.tokenizer.vocab))
        tops = text.logprobs or 0
        adapter = self._adapters.get(text.model, self._default)
        stops = {*self.tokenizer.stops, *text.stop_ids}
        errors: list[Exception] = []
        request = Request(ids, text.max_tokens, _collect_errors(choose, errors), stops, tops, adapter)
        row = Row(text, request, self.tokenizer, emit, is_cancelled, errors)
        if text.echo:
            self._echo(row, ids, tops)
        if not text.max_tokens:
            row.finish()
            return
        if None not in self.rows:
            self._resize(2 * len(self.rows))
        self.rows[self.rows.index(None)] = row

    def _echo(self, row: Row, ids: Sequence[int], tops: int) -> None:
        """Emit the prompt. If log-probabilities were requested, also emit the prompt's tokens; the first token has
        no log-probability."""
        tokens: list[TokenText] = []
        prompt, stream, length = row.text_request.prompt, DecodeStream(self.tokenizer), 0
        if row.text_request.logprobs is not None:
            for token in (Token(ids[0], 0.0), *prompt_tokens(self.loaded.model, ids, tops)):
                tokens.append(token_text(self.tokenizer, token, length))
                length += len(stream.step(token.id))
            tokens[0] = tokens[0]._replace(logprob=None)
        row.emit_text(prompt if isinstance(prompt, str) else self.tokenizer.decode(ids), tokens)
        row.answer.tokens, row._length = tokens, len(row.answer.text)

    def advance(self) -> None:
        """Prefill a piece of one prompt, and generate the next token of each text whose prompt is in the cache."""
        self.rows = [None if row is None or row.is_cancelled() else row for row in self.rows]
        waiting = [place for place, row in enumerate(self.rows) if row is not None and not row.ready]
        try:
            if waiting:
                self._read_piece(waiting[0])
            # The list of requests is changed in place, since the iterator of tokens refers to it.
            self._requests[:] = [row.request if row is not None and row.ready else None for row in self.rows]
            if any(self._requests):
                self._next_tokens()
        except Exception as error:
            self.fail(error)
        if not self.active and len(self.rows) > 1:
            self._resize(1)

    def fail(self, error: Exception) -> None:
        """End all texts with an error, and clear the cache."""
        self._tokens = iter(())
        self._cache = self._make_cache(len(self.rows))
        rows, self.rows = self.rows, [None] * len(self.rows)
        for row in filter(None, rows):
            row.emit(error)

    def _next_tokens(self) -> None:
        self._cache.step = self.find_step()
        tokens = next(self._tokens, None)
        if tokens is None:
            model, room = self.loaded.model, self.loaded.context_length
            self._tokens = generate_all(model, self._requests, context_length=room, cache=self._cache)
            tokens = next(self._tokens, None)
        for place, token in enumerate(tokens or ()):
            current = self.rows[place]
            if current is not None and token is not None and not current.errors:
                current.push(token)
        for place, current in enumerate(self.rows):
            if current is not None and current.errors:
                current.emit(current.errors[0])
                self.rows[place] = None
            elif current is not None and current.ready and not current.request.unfinished:
                current.finish()
                self.rows[place] = None

    def _read_piece(self, place: int) -> None:
        """Prefill the next piece of a prompt."""
        row, cache = self.rows[place], self._cache
        assert row is not None, "it waits"
        ids = list(row.request.prompt)
        ends = [r.request.end for r in self.rows if r is not None]
        cache.reserve(min(self.loaded.context_length, max(ends)))
        cache.set_adapter(place, row.request.adapter)
        if row.pieces is None:
            row.answer.cached_tokens = common_length(cache.ids[place], ids, 1)
            row.pieces = self._reader.read(cache, place, ids)
        row.ready = next(row.pieces, "read") is not None

    def _resize(self, count: int) -> None:
        """Change the number of rows; the first rows keep their KV cache."""
        old, self._cache = self._cache, self._make_cache(count)
        for row in filter(None, self.rows):
            row.pieces = None  # prefill continues after the ids that the new cache contains
        common = min(count, len(old.ids))
        if old.cache is not None:
            device = old.cache.length.device
            index = torch.tensor([*range(common), *[0] * (count - common)], dtype=torch.long, device=device)
            self._cache.cache, self._cache.vocab = old.cache.select_rows(index), old.vocab
        self._cache.ids[:common], self._cache.adapters[:common] = old.ids[:common], old.adapters[:common]
        self.rows, self._requests = [*self.rows[:common], *[None] * (count - common)], [None] * count
        self._tokens = iter(())

    def _make_cache(self, rows: int) -> PrefixCache:
        model = self.loaded.model
        return PrefixCache(model, rows, partial(row_adapters, model) if self._adapters else None)
