"""Autoregressive decoding with any model that is called as `model(ids, positions=..., cache=..., last=n)`."""

# Shapes: N tokens, V vocabulary.

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.generate.decode_graph import Scores
from dunes.generate.prefix_cache import PrefixCache, check_ids
from dunes.generate.sampling import Sampler, log_probs
from dunes.generate.speculate import Proposal, Proposer, check_rewinds, choose
from dunes.parts import Decoder, vocabulary_size
from dunes.parts.quantized_cache import SLACK

GREEDY = Sampler()
BLOCK = 64
"""Number of positions whose logits are computed together (13 MB for a vocabulary of 50,000)."""


@dataclass(frozen=True, slots=True)
class Token:
    """An id and its log-probability (nats) under the model, before any processor.

    `alternatives` are the most probable (id, log-probability) pairs, as many as the request asks for.
    """

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """A text to generate: up to `max_tokens` tokens after the prompt, or until an id in `stop`.

    `ids` are the ids of the prompt and of the text so far. `adapter` is the name of an adapter of the model. One
    forward verifies all ids that `proposer` proposes; the distribution of the text stays the same. Raises
    ValueError for an empty prompt.
    """

    prompt: Sequence[int]
    max_tokens: int
    sample: Sampler = GREEDY
    stop: Container[int] = ()
    alternatives: int = 0
    adapter: str | None = None
    proposer: Proposer | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has no tokens; give it at least the end token")
        self.ids, self._start, self.end = list(self.prompt), 0, len(self.prompt) + self.max_tokens

    @property
    def unfinished(self) -> bool:
        """True until the text has `max_tokens` new tokens or ends with an id in `stop`."""
        return len(self.ids) < self.end

    def window(self, context_length: int) -> list[int]:
        """The ids that the model attends to. A prompt longer than the context length is cut to its last ids. If
        the text outgrows the context length, the window restarts with the last `context_length` // 2 ids."""
        if len(self.ids) - self._start > context_length:
            has_new = len(self.ids) > len(self.prompt)
            self._start = len(self.ids) - (max(1, context_length // 2) if has_new else context_length)
        return self.ids[self._start :] if self._start else self.ids

    def append(self, token: Token) -> Token | None:
        """Append the token and return it, or return None if the token is in `stop` and ends the text."""
        if token.id in self.stop:
            self.end = len(self.ids)
            return None
        self.ids.append(token.id)
        return token


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    context_length: int,
    sample: Sampler = GREEDY,
    stop: Container[int] = (),
    cache: PrefixCache | None = None,
    proposer: Proposer | None = None,
) -> Iterator[Token]:
    """Yield up to `max_tokens` tokens after the prompt, or until an id in `stop`, which is not yielded.

    `context_length` is the number of tokens that the model can attend to; a text that exceeds this number is
    continued from its last `context_length` // 2 tokens. By default, decoding is greedy. A `proposer` saves
    forwards and leaves the distribution of the text unchanged. Raises ValueError for an empty prompt, and for a
    proposal with unknown ids.
    """
    request = Request(prompt, max_tokens, sample, stop, proposer=proposer)
    for row in generate_all(model, [request], context_length=context_length, cache=cache):
        assert row[0] is not None, "generation ends with its only row"
        yield row[0]


def generate_all(
    model: nn.Module, requests: Sequence[Request | None], *, context_length: int, cache: PrefixCache | None = None
) -> Iterator[list[Token | None]]:
    """Yield each request's next token; None if its text has ended, or waits while other rows accept proposals.

    Each text is the same as if it were generated alone. Between two tokens the caller may replace an entry of
    `requests` by another request or None. A `cache` needs one row per request. Prefixes that `cache` contains are
    not evaluated again, and the new texts are cached.
    """
    if any(r is not None and r.proposer for r in requests):
        check_rewinds(model)
    cache = cache or PrefixCache(model, len(requests))
    while active := {i: r for i, r in enumerate(requests) if r is not None and r.unfinished}:
        cache.reserve(min(context_length, max(r.end for r in active.values())))
        for i, request in active.items():
            cache.set_adapter(i, request.adapter)
        texts = {i: r.window(context_length) for i, r in active.items()}
        if tokens := _step_tokens(active, texts, cache):
            row = [active[i].append(tokens[i]) if i in tokens else None for i in range(len(requests))]
            if any(row):
                yield row
            continue
        proposals = {i: _propose(r, context_length - len(texts[i]), cache) for i, r in active.items()}
        last = {i: len(proposal.ids) + 1 for i, proposal in proposals.items()}
        logits = cache.logits({i: [*ids, *proposals[i].ids] for i, ids in texts.items()}, last)
        yield from _accept(requests, active, proposals, logits)


def _step_tokens(
    requests: Mapping[int, Request], texts: Mapping[int, list[int]], cache: PrefixCache
) -> dict[int, Token]:
    """The next token of each text, computed with the compiled step. Empty if no compiled step can be used, or if a
    request has a proposer or asks for alternatives."""
    if any(r.proposer is not None or r.alternatives for r in requests.values()):
        return {}
    if len(cache.ids) == 1:
        scores = dict(zip(texts, cache.scores(texts[0]) or (), strict=False))
    else:
        scores = cache.row_scores(texts) or {}
    return {i: _choose_token(requests[i], each) for i, each in scores.items()}


def _choose_token(request: Request, scores: Scores) -> Token:
    best = request.sample.returns_best(scores.best)
    id = scores.best if best else int(request.sample(scores.logits, request.ids))
    return Token(id, scores.logprob(id))


def _propose(request: Request, room: int, cache: PrefixCache) -> Proposal:
    """A proposal that fits into the `room` left in the context and into the request's `max_tokens`.

    The proposal is empty for a model without a KV cache, whose logits may depend on all ids of a forward. With a
    quantized cache, the proposal has at most SLACK ids, since `truncate` is exact only for up to SLACK tokens.
    """
    room = min(room, request.end - len(request.ids) - 1, room if cache.format is None else SLACK)
    if request.proposer is None or room < 1 or cache.cache is None or cache.vocab is None:
        return Proposal()
    proposal = request.proposer(request.ids, room, request.sample)
    return Proposal(proposal.ids[:room], proposal.probs[:room])


def _accept(
    requests: Sequence[Request | None],
    active: Mapping[int, Request],
    proposals: Mapping[int, Proposal],
    logits: Mapping[int, Tensor],
) -> Iterator[list[Token | None]]:
    """Yield the next token of each active row, and further tokens of rows whose proposal is accepted."""
    index = 0
    while active:
        rows = [logits[i][index] for i in active]
        tokens = dict(zip(active, _next_tokens(active, rows, proposals, index), strict=True))
        if any(tokens.values()):
            yield [tokens.get(i) for i in range(len(requests))]
        accepted = [i for i, r in active.items() if r.ids[-1:] == [*proposals[i].ids[index : index + 1]]]
        active = {i: active[i] for i in accepted if requests[i] is active[i] and active[i].unfinished}
        index += 1


def _next_tokens(
    requests: Mapping[int, Request], logits: Sequence[Tensor], proposals: Mapping[int, Proposal], index: int
) -> list[Token | None]:
    """Choose a token for each request from its logits (V,), and append it."""
    rows = zip(requests.items(), logits, strict=True)
    ids = _stack([choose(r.sample, x, r.ids, proposals[i], index) for (i, r), x in rows])
    tokens = _tokens(log_probs(_stack(logits)), ids, [r.alternatives for r in requests.values()])
    return [r.append(token) for r, token in zip(requests.values(), tokens, strict=True)]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]) if len(tensors) > 1 else tensors[0][None]  # a view for a single row


def prompt_tokens(model: nn.Module, ids: Sequence[int], alternatives: int = 0) -> list[Token]:
    """A token for each id after the first, with its log-probability given the ids before it.

    Raises ValueError for an id that the model does not have.
    """
    check_ids(vocabulary_size(model), [ids])
    if len(ids) < 2:
        return []
    logprobs = torch.stack([*text_logprobs(model, ids, len(ids))])
    return _tokens(logprobs, torch.tensor(ids[1:]), [alternatives] * len(logprobs))


def text_logprobs(
    model: nn.Module, ids: Sequence[int], context_length: int, first: int = 1, stop: int | None = None
) -> Iterator[Tensor]:
    """Yield log-probabilities (V,), on the CPU, of the id at each index from `first` (>= 1) up to `stop` (default:
    all).

    The text is evaluated in windows that overlap by half. Every id after the first window thus has at least half
    of the context length before it. With a `Decoder`, only the logits of BLOCK positions are in memory at a time.
    """
    half, position = max(1, context_length // 2), first - 1
    data = torch.tensor(ids[:stop][:-1], device=next(model.parameters()).device)
    while position < len(data):
        start = max(0, position - half)
        window = data[None, start : start + context_length]
        last = window.shape[1] - (position - start)
        with torch.no_grad(), tree.mode(model, False):
            states, head = _before_head(model, window, last)
        for part in torch.split(states, BLOCK, 1):
            with torch.no_grad(), tree.mode(model, False):
                block = log_probs(head(part)[0]).cpu()
            yield from block
        position += last


def _before_head(model: nn.Module, ids: Tensor, last: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The result of `Decoder.before_head`; for other models, the logits, and an identity function instead of the
    head."""
    return model.before_head(ids, last) if isinstance(model, Decoder) else (model(ids, last=last), lambda x: x)


def _tokens(logprobs: Tensor, ids: Tensor, alternatives: Sequence[int]) -> list[Token]:
    """Tokens for ids (N,) from log-probabilities (N, V); `alternatives` (N,) are the numbers of alternatives per
    token."""
    own = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    if not any(alternatives):
        return [Token(i, logprob) for i, logprob in zip(ids.tolist(), own, strict=True)]
    best = logprobs.topk(min(max(alternatives), logprobs.shape[-1]))
    rows = zip(ids.tolist(), own, best.indices.tolist(), best.values.tolist(), alternatives, strict=True)
    return [Token(i, logprob, tuple(zip(top, values, strict=True))[:n]) for i, logprob, top, values, n in rows]
