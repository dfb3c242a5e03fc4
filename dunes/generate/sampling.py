"""From logits to the next id."""

# Shapes: B batch, V vocabulary.

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COLD, HOT = 1e-37, 1e37
"""Temperatures beyond these choose as these do; dividing by them stays within float32."""

WEAK, STRONG = 1e-30, 1e30
"""And penalties, which leave room for the logits that they act on."""

History = Sequence[Sequence[int]]
Sampler = Callable[[Tensor, History], Tensor]
"""(logits (B, V), the ids of each row so far) -> ids (B,)."""


def sampler(
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    penalty: float = 1.0,
    seed: int = 0,
) -> Sampler:
    """A sampler; temperature 0 takes the likeliest id. Filters apply in this order:

    `penalty` divides positive logits of ids that were there already, and multiplies negative ones
    (https://arxiv.org/abs/1909.05858); temperature; the `top_k` likeliest; the fewest that reach the
    probability `top_p`; those with at least `min_p` of the likeliest's. Each row draws from its own
    generator, so that its text does not depend on the rows beside it. Raises ValueError for
    settings without a meaning. Any whole number is a seed; those that are equal modulo 2^64 draw alike.
    """
    checks = {
        "temperature": 0 <= temperature < math.inf,
        "top_k": top_k is None or top_k >= 1,
        "top_p": top_p is None or 0 < top_p <= 1,
        "min_p": min_p is None or 0 <= min_p <= 1,
        "penalty": 0 < penalty < math.inf,
    }
    if wrong := [name for name, good in checks.items() if not good]:
        raise ValueError(f"sampling: {', '.join(wrong)} out of range")
    penalty = min(max(penalty, WEAK), STRONG)
    generators: list[torch.Generator] = []

    def sample(logits: Tensor, history: History) -> Tensor:
        logits = _penalised(logits.float(), history, penalty)
        if temperature == 0:
            return logits.argmax(-1)
        # The greatest is zero before it is divided: by however little, it stays.
        logits = (logits - logits.amax(-1, keepdim=True)) / min(max(temperature, COLD), HOT)
        logits = logits if top_k is None else _top_k(logits, top_k)
        logits = logits if top_p is None else _top_p(logits, top_p)
        logits = logits if min_p is None else _min_p(logits, min_p)
        while len(generators) < len(logits):
            generators.append(torch.Generator(logits.device).manual_seed((seed + len(generators)) % 2**64))
        probabilities = logits.softmax(-1)
        rows = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=False)]
        return torch.cat(rows)

    return sample


def below(sample: Sampler, count: int) -> Sampler:
    """The sampler, held to ids below `count`: an embedding may have more rows than its tokenizer has ids."""
    return lambda logits, history: sample(logits[:, :count], history)


def begun(sample: Sampler, pieces: Sequence[bytes], start: bytes) -> Sampler:
    """The sampler, held to an id whose bytes begin with `start`, or if none does, to ids that spell it.

    Token healing for one row: text cut inside a word was never tokenised like that in training, so
    its last token is taken back and given again as a `start` that the model must follow.
    """
    left = start

    def held(logits: Tensor, history: History) -> Tensor:
        nonlocal left
        if left:
            fits = [p.startswith(left) for p in pieces]
            if not any(fits):
                fits = [bool(p) and left.startswith(p) for p in pieces]
            fits += [False] * (logits.shape[-1] - len(fits))
            logits = logits.masked_fill(~torch.tensor(fits, device=logits.device), -torch.inf)
        chosen = sample(logits, history)
        left = left[len(pieces[int(chosen[0])]) :] if left else left
        return chosen

    return held


def _penalised(logits: Tensor, history: History, penalty: float) -> Tensor:
    if penalty == 1.0:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in zip(seen, history, strict=True):
        row[list(ids)] = True
    changed = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, changed, logits)


def _top_k(logits: Tensor, k: int) -> Tensor:
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _top_p(logits: Tensor, p: float) -> Tensor:
    falling, order = logits.sort(descending=True, stable=True)
    likely = falling.softmax(-1)
    surplus = likely.cumsum(-1) - likely >= p  # what comes before already reaches p
    surplus[:, 0] = False  # which zero does if p is so small that float32 has no number for it
    return logits.masked_fill(surplus.scatter(-1, order, surplus), -torch.inf)


def _min_p(logits: Tensor, p: float) -> Tensor:
    likely = logits.softmax(-1)
    return logits.masked_fill(likely < p * likely.amax(-1, keepdim=True), -torch.inf)
