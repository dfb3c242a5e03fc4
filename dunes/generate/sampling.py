"""From logits to the next id: processors change the logits, then a choice selects an id."""

# Shapes: V vocabulary.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

LARGEST_TEMPERATURE = 1e37
"""Temperatures are clamped to the range [1 / this, this], so that logits divided by them fit into float32."""
LARGEST_PENALTY = 1e30
"""Penalties are clamped to the range [1 / this, this], so that penalised logits fit into float32."""

Processor = Callable[[Tensor, Sequence[int]], Tensor]
"""(logits (V,), ids so far) -> changed logits of all ids (V,), or of the first ids only; -inf excludes an id."""

Choice = Callable[[Tensor], Tensor]
"""Processed logits (V,) -> id ()."""


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities (..., V) in float32 from a model's logits (..., V)."""
    return logits.float().log_softmax(-1)


def greedy(logits: Tensor) -> Tensor:
    """The most probable id."""
    return logits.argmax(-1)


def draw(seed: int) -> Choice:
    """A choice that samples from the probabilities with its own random generator. Seeds are taken modulo 2^64.

    It looks up one random number in the cumulative probabilities, which takes a quarter of the time of
    `torch.multinomial` for 4,096 ids. The choice raises ValueError if logits are NaN or all ids are excluded.
    """
    generators: list[torch.Generator] = []

    def choose(logits: Tensor) -> Tensor:
        if not generators:
            generators.append(torch.Generator(logits.device).manual_seed(seed % 2**64))
        dtype = torch.float32 if logits.device.type == "mps" else torch.float64  # which MPS does not have
        sums = logits.softmax(-1).cumsum(-1, dtype=dtype)
        if not bool(sums[-1] > 0):
            raise ValueError("sampling: no id can be drawn, since the logits have NaN or exclude all ids")
        point = torch.rand((), generator=generators[0], dtype=dtype, device=logits.device) * sums[-1]
        # A point that is rounded up to the total would be after the last possible id.
        return torch.minimum(torch.searchsorted(sums, point, right=True), torch.searchsorted(sums, sums[-1]))

    return choose


@dataclass(frozen=True)
class Sampler:
    """Applies processors in order, then chooses an id. Each request that samples needs its own sampler."""

    processors: tuple[Processor, ...] = ()
    choose: Choice = greedy

    def __call__(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """The next id () for logits (V,) after `ids`."""
        return self.choose(self.process(logits, ids))

    def process(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """The processed logits (V,), whose softmax is the distribution that is sampled from."""
        logits = logits.float()
        for processor in self.processors:
            logits = processor(logits, ids)
        return logits

    def returns_best(self, best: int) -> bool:
        """True if the next id is certainly `best`, the first id with the highest logit."""
        is_greedy = type(self) is Sampler and self.choose is greedy  # a subclass may process logits otherwise
        return is_greedy and all(_preserves(processor, best) for processor in self.processors)

    def after(self, *processors: Processor) -> "Sampler":
        """The sampler with these processors before its own."""
        return Sampler((*processors, *self.processors), self.choose)


def sampler(
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    penalty: float = 1.0,
    penalty_range: int = -1,
    seed: int = 0,
) -> Sampler:
    """A sampler with processors in this order: penalty, temperature, top-k, top-p, min-p.

    Temperature 0 means greedy decoding; `top_k` 0 or -1 means all ids. The penalty applies to the last
    `penalty_range` ids; -1 means all of them. Raises ValueError for settings out of range.
    """
    checks = {
        "temperature": (temperature, 0 <= temperature < math.inf, "a finite number of at least 0"),
        "top_k": (top_k, top_k is None or top_k >= -1, "a whole number; 0 or -1 for all ids"),
        "top_p": (top_p, top_p is None or 0 < top_p <= 1, "a probability above 0"),
        "min_p": (min_p, min_p is None or 0 <= min_p <= 1, "a probability"),
        "penalty": (penalty, 0 < penalty < math.inf, "a finite number above 0"),
    }
    for name, (value, valid, expected) in checks.items():
        if not valid:
            raise ValueError(f"sampling: {name} is {value}; expected {expected}")
    processors: list[Processor] = [partial(penalise, penalty, penalty_range)] if penalty != 1 else []
    if temperature == 0:
        return Sampler(tuple(processors))
    processors.append(partial(scale_logits, temperature))
    processors += [partial(keep_top_k, top_k)] if top_k and top_k > 0 else []
    processors += [partial(keep_top_p, top_p)] if top_p else []
    processors += [partial(keep_min_p, min_p)] if min_p else []
    return Sampler(tuple(processors), draw(seed))


def limit_vocab(count: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the logits of ids below `count`: an embedding may have more rows than the tokenizer has ids."""
    return logits[:count]


def _preserves(processor: Processor, id: int) -> bool:
    """True if the processor preserves the order of the ids, and keeps this one."""
    return isinstance(processor, partial) and processor.func is limit_vocab and id < processor.args[0]


def penalise(penalty: float, last: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """For the `last` ids (-1: all ids), divide positive logits by the penalty and multiply negative logits by it.

    https://arxiv.org/abs/1909.05858
    """
    penalty = min(max(penalty, 1 / LARGEST_PENALTY), LARGEST_PENALTY)
    occurred = torch.zeros_like(logits, dtype=torch.bool)
    occurred[list(ids[max(0, len(ids) - last) if last >= 0 else 0 :])] = True
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(occurred, penalised, logits)


def scale_logits(temperature: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Subtract the largest logit, then divide by the temperature: the largest becomes 0 at any temperature."""
    return (logits - logits.amax()) / min(max(temperature, 1 / LARGEST_TEMPERATURE), LARGEST_TEMPERATURE)


def keep_top_k(k: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the `k` most probable ids."""
    least = logits.topk(min(k, len(logits))).values[-1]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(p: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the fewest ids that reach the cumulative probability `p`."""
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    surplus = probs.cumsum(-1) - probs >= p  # the ids before it already reach p
    surplus[0] = False  # in case p rounds to 0 in float32
    return logits.masked_fill(surplus.scatter(-1, order, surplus), -torch.inf)


def keep_min_p(p: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep ids with at least `p` times the largest probability."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(), -torch.inf)
