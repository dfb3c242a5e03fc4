"""Samplers: from logits to the next id."""

# Shapes: B batch, V vocabulary.

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-37, 1e37
"""Temperatures are clamped to these, so that dividing by them stays within float32."""

MIN_PENALTY, MAX_PENALTY = 1e-30, 1e30
"""Penalties are clamped to these, which leaves room for the logits."""

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
    """A sampler; temperature 0 is greedy. Filters apply in this order:

    `penalty` divides positive logits of ids that occurred before and multiplies negative ones
    (https://arxiv.org/abs/1909.05858); temperature; the `top_k` most probable; the fewest that reach the
    cumulative probability `top_p`; those with at least `min_p` times the largest probability. Each row has its own
    generator, so its text does not depend on other rows. Raises ValueError for settings out of range. Seeds are
    taken modulo 2^64.
    """
    checks = {
        "temperature": (temperature, 0 <= temperature < math.inf, "a finite number of at least 0"),
        "top_k": (top_k, top_k is None or top_k >= 1, "a whole number of at least 1"),
        "top_p": (top_p, top_p is None or 0 < top_p <= 1, "a probability above 0"),
        "min_p": (min_p, min_p is None or 0 <= min_p <= 1, "a probability"),
        "penalty": (penalty, 0 < penalty < math.inf, "a finite number above 0"),
    }
    for name, (value, valid, expected) in checks.items():
        if not valid:
            raise ValueError(f"sampling: {name} is {value}; expected {expected}")
    penalty = min(max(penalty, MIN_PENALTY), MAX_PENALTY)
    generators: list[torch.Generator] = []

    def sample(logits: Tensor, history: History) -> Tensor:
        logits = _penalise(logits.float(), history, penalty)
        if temperature == 0:
            return logits.argmax(-1)
        # The largest logit is 0 before the division and stays 0 for any temperature.
        logits = (logits - logits.amax(-1, keepdim=True)) / min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
        logits = logits if top_k is None else _top_k(logits, top_k)
        logits = logits if top_p is None else _top_p(logits, top_p)
        logits = logits if min_p is None else _min_p(logits, min_p)
        while len(generators) < len(logits):
            generators.append(torch.Generator(logits.device).manual_seed((seed + len(generators)) % 2**64))
        probabilities = logits.softmax(-1)
        rows = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=False)]
        return torch.cat(rows)

    return sample


def limit_vocab(sample: Sampler, count: int) -> Sampler:
    """The sampler restricted to ids below `count`: an embedding may have more rows than its tokenizer has ids."""
    return lambda logits, history: sample(logits[:, :count], history)


def force_prefix(sample: Sampler, pieces: Sequence[bytes], prefix: bytes) -> Sampler:
    """The sampler restricted to ids whose bytes begin with `prefix`, or if there are none, to ids that spell it.

    Token healing for one row: text that ends inside a word is tokenized as it never was in training, so its last
    token is removed and its bytes are given as a `prefix` that the model must generate again.
    """
    remaining = prefix

    def restricted(logits: Tensor, history: History) -> Tensor:
        nonlocal remaining
        if remaining:
            fits = [p.startswith(remaining) for p in pieces]
            if not any(fits):
                fits = [bool(p) and remaining.startswith(p) for p in pieces]
            fits += [False] * (logits.shape[-1] - len(fits))
            logits = logits.masked_fill(~torch.tensor(fits, device=logits.device), -torch.inf)
        chosen = sample(logits, history)
        remaining = remaining[len(pieces[int(chosen[0])]) :] if remaining else remaining
        return chosen

    return restricted


def _penalise(logits: Tensor, history: History, penalty: float) -> Tensor:
    if penalty == 1.0:
        return logits
    occurred = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in zip(occurred, history, strict=True):
        row[list(ids)] = True
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(occurred, penalised, logits)


def _top_k(logits: Tensor, k: int) -> Tensor:
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _top_p(logits: Tensor, p: float) -> Tensor:
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    surplus = probs.cumsum(-1) - probs >= p  # those before it already reach p
    surplus[:, 0] = False  # in case p rounds to 0 in float32
    return logits.masked_fill(surplus.scatter(-1, order, surplus), -torch.inf)


def _min_p(logits: Tensor, p: float) -> Tensor:
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf)
