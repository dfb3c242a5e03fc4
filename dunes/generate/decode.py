"""Autoregressive decoding with any model that is called as `model(ids, positions=..., cache=..., last=1)`."""

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
    """A sampled id and its log-probability (nats) under the model, before any filter."""

    id: int
    logprob: float


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    limit: int,
    context_length: int,
    sample: Sampler | None = None,
    stop: Container[int] = (),
) -> Iterator[Token]:
    """Yield up to `limit` tokens after the prompt, or until one in `stop`, which is not yielded.

    `context_length` is how many tokens the model can attend to; when a text reaches it, generation continues from
    its last half. Without a sampler decoding is greedy. Raises ValueError for an empty prompt.
    """
    for row in generate_all(model, [prompt], limit=limit, context_length=context_length, sample=sample, stop=stop):
        token = row[0]
        assert token is not None, "generation ends with its only row"
        yield token


def generate_all(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    context_length: int,
    sample: Sampler | None = None,
    stop: Container[int] = (),
) -> Iterator[list[Token | None]]:
    """The same for several prompts at once, which may differ in length; None where a row has ended.

    Each row's text is the same as alone: when it continues from its last half depends only on its own length, and
    a sampler from `sampler` draws for row i as one with a seed greater by i does for a single row.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens; give it at least the end token")
    sample = sample or sampler(0.0)
    texts = [list(prompt) for prompt in prompts]
    active = [True] * len(texts)
    cache = cache_for(model, len(texts), min(context_length, max(map(len, texts)) + limit), _device(model))
    pending = [text[-context_length:] for text in texts]
    for _ in range(limit):
        with torch.no_grad(), tree.mode(model, False):
            _drop_first_halves(model, texts, active, cache, context_length)
            logits = _forward(model, pending, cache)
            chosen = sample(logits, texts)
            logprobs = logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        row: list[Token | None] = []
        for i, (id, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
            active[i] = active[i] and id not in stop
            texts[i] += [id] if active[i] else []
            row.append(Token(id, logprob) if active[i] else None)
        if not any(active):
            return
        pending = [[text[-1]] if running else [] for text, running in zip(texts, active, strict=True)]
        yield row


def _drop_first_halves(
    model: nn.Module, texts: Sequence[Sequence[int]], active: Sequence[bool], cache: Cache, context_length: int
) -> None:
    """Prefill rows that are full again with their last half but the newest id; other rows do not change."""
    lengths = cache.length.tolist()
    full = [i for i, length in enumerate(lengths) if active[i] and length == context_length]
    if not full:
        return
    half, rows = max(1, context_length // 2), torch.tensor(full, device=cache.length.device)
    part = cache.select_rows(rows)
    part.truncate(torch.zeros_like(rows))
    if half > 1:
        _forward(model, [texts[i][-half:-1] for i in full], part)
    cache.write_rows(rows, part)


def _forward(model: nn.Module, pending: Sequence[Sequence[int]], cache: Cache) -> Tensor:
    """Logits (B, V) after the pending ids, which are padded on the left."""
    width, device = max(map(len, pending)), _device(model)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in pending], device=device)
    real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in pending], device=device)
    logits: Tensor = model(ids, positions=cache.start(real), cache=cache, last=1)
    return logits[:, -1]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
