"""Autoregressive decoding with any model that is called as `model(ids, positions=..., cache=..., last=1)`."""

# Shapes: N tokens, V vocabulary.

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.generate.prefix_cache import PrefixCache
from dunes.generate.sampling import Sampler

GREEDY = Sampler()


@dataclass(frozen=True, slots=True)
class Token:
    """An id and its log-probability (nats) under the model, before any processor.

    `alternatives` are the most probable (id, log-probability), as many as the request asks for.
    """

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """Up to `limit` tokens after the prompt, or until one in `stop`, by an adapter of the model; `ids` grow.

    Raises ValueError for an empty prompt.
    """

    prompt: Sequence[int]
    limit: int
    sample: Sampler = GREEDY
    stop: Container[int] = ()
    alternatives: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has no tokens; give it at least the end token")
        self.ids, self._start, self.end = list(self.prompt), 0, len(self.prompt) + self.limit

    def window(self, context_length: int) -> list[int]:
        """The ids that the model attends to, which go on from their last half when there are too many."""
        if len(self.ids) - self._start > context_length:
            grown = len(self.ids) > len(self.prompt)
            self._start = len(self.ids) - (max(1, context_length // 2) if grown else context_length)
        return self.ids[self._start :]

    def append(self, token: Token) -> Token | None:
        """The token as part of the text; None if the text ends instead."""
        if token.id in self.stop:
            self.end = len(self.ids)
            return None
        self.ids.append(token.id)
        return token


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    limit: int,
    context_length: int,
    sample: Sampler = GREEDY,
    stop: Container[int] = (),
    cache: PrefixCache | None = None,
) -> Iterator[Token]:
    """Yield up to `limit` tokens after the prompt, or until one in `stop`, which is not yielded.

    `context_length` is how many tokens the model can attend to; when a text reaches it, generation continues from
    its last half. Without a sampler decoding is greedy. Raises ValueError for an empty prompt.
    """
    request = Request(prompt, limit, sample, stop)
    for row in generate_all(model, [request], context_length=context_length, cache=cache):
        assert row[0] is not None, "generation ends with its only row"
        yield row[0]


def generate_all(
    model: nn.Module,
    requests: Sequence[Request | None],
    *,
    context_length: int,
    cache: PrefixCache | None = None,
) -> Iterator[list[Token | None]]:
    """The same for several requests at once; None where a row has ended. Each row's text is the same as alone.

    Between two tokens the caller may put another request, or None, into a place of `requests`. A `cache` has as
    many rows: what it holds of the beginning of a text is not evaluated, and afterwards it holds the new texts.
    """
    cache = cache or PrefixCache(model, len(requests))
    while active := {i: r for i, r in enumerate(requests) if r is not None and len(r.ids) < r.end}:
        cache.reserve(min(context_length, max(r.end for r in active.values())))
        for i, request in active.items():
            cache.set_adapter(i, request.adapter)
        logits = cache.logits({i: r.window(context_length) for i, r in active.items()})
        tokens = dict(zip(active, _next_tokens(list(active.values()), logits), strict=True))
        if any(tokens.values()):
            yield [tokens.get(i) for i in range(len(requests))]


def prompt_tokens(model: nn.Module, ids: Sequence[int], alternatives: int = 0) -> list[Token]:
    """The ids after the first one, with their log-probabilities after those before them."""
    device = next(model.parameters()).device
    with torch.no_grad(), tree.mode(model, False):
        logits = model(torch.tensor([ids], device=device))[0, :-1]
    return _tokens(logits, torch.tensor(ids[1:], device=device), [alternatives] * len(logits))


def _next_tokens(requests: Sequence[Request], logits: Tensor) -> list[Token | None]:
    """Choose a token for each request by its logits (N, V), and append it."""
    chosen = torch.stack([r.sample(x, r.ids) for r, x in zip(requests, logits, strict=True)])
    tokens = _tokens(logits, chosen, [r.alternatives for r in requests])
    return [r.append(token) for r, token in zip(requests, tokens, strict=True)]


def _tokens(logits: Tensor, ids: Tensor, alternatives: Sequence[int]) -> list[Token]:
    """The ids (N,) chosen from logits (N, V), each with as many alternatives."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(alternatives, default=0), logits.shape[-1]))
    rows = zip(ids.tolist(), own, best.indices.tolist(), best.values.tolist(), alternatives, strict=True)
    return [Token(i, logprob, tuple(zip(top, values, strict=True))[:n]) for i, logprob, top, values, n in rows]
