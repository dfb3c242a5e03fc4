"""One token after another, from any model that is called as `model(ids, at=..., cache=..., last=1)`."""

# Shapes: B batch, T prompt tokens, V vocabulary.

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.generate.sampling import Sampler, sampler
from dunes.parts import Cache, cache_for


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen id and its log-probability (nats) under the model, before any sampling filter."""

    id: int
    logprob: float


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    limit: int,
    context: int,
    sample: Sampler | None = None,
    stop: Container[int] = (),
) -> Iterator[Token]:
    """Yield up to `limit` tokens after the prompt, or until one in `stop`, which is not yielded.

    `context` is how many tokens the model can look at; a text that grows longer goes on from its
    last half. Without a sampler the likeliest id is taken. Raises ValueError for an empty prompt.
    """
    for row in generate_all(model, [prompt], limit=limit, context=context, sample=sample, stop=stop):
        token = row[0]
        assert token is not None, "a batch of one ends with its row"
        yield token


def generate_all(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    context: int,
    sample: Sampler | None = None,
    stop: Container[int] = (),
) -> Iterator[list[Token | None]]:
    """The same for several prompts at once, which may differ in length; None where a row has ended.

    Each row's text is what it would be by itself: where it goes on from its last half depends on its own length,
    and a sampler of `sampler` draws for row i as one whose seed is greater by i does for a single row.
    """
    if not prompts or not all(prompts):
        raise ValueError("nothing to go on from: a prompt has no tokens; give it at least the end token")
    sample = sample or sampler(0.0)
    texts = [list(prompt) for prompt in prompts]
    live = [True] * len(texts)
    cache = cache_for(model, len(texts), min(context, max(map(len, texts)) + limit), _device(model))
    unread = [text[-context:] for text in texts]
    for _ in range(limit):
        with torch.no_grad(), tree.mode(model, False):
            _drop_first_halves(model, texts, live, cache, context)
            logits = _forward(model, unread, cache)
            chosen = sample(logits, texts)
            logprobs = logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        row: list[Token | None] = []
        for i, (id, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
            live[i] = live[i] and id not in stop
            texts[i] += [id] if live[i] else []
            row.append(Token(id, logprob) if live[i] else None)
        if not any(live):
            return
        unread = [[text[-1]] if alive else [] for text, alive in zip(texts, live, strict=True)]
        yield row


def _drop_first_halves(
    model: nn.Module, texts: Sequence[Sequence[int]], live: Sequence[bool], cache: Cache, context: int
) -> None:
    """Read rows that fill the context again from their last half, all but the newest id. Other rows stay."""
    lengths = cache.length.tolist()
    full = [i for i, length in enumerate(lengths) if live[i] and length == context]
    if not full:
        return
    half, rows = max(1, context // 2), torch.tensor(full, device=cache.length.device)
    part = cache.take(rows)
    part.keep(torch.zeros_like(rows))
    if half > 1:
        _forward(model, [texts[i][-half:-1] for i in full], part)
    cache.write_rows(rows, part)


def _forward(model: nn.Module, unread: Sequence[Sequence[int]], cache: Cache) -> Tensor:
    """Logits (B, V) after the unread ids, which are padded on the left to a rectangle."""
    width, device = max(map(len, unread)), _device(model)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in unread], device=device)
    real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in unread], device=device)
    logits: Tensor = model(ids, at=cache.start(real), cache=cache, last=1)
    return logits[:, -1]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
