"""From logits to the next id: processors change the logits, then a choice selects an id.

A sampling rule is a function and an annotated field of `SamplingOptions`. The command, the servers and the
evaluation read the rules from these fields. Importing this module does not import torch.
"""

# Shapes: V vocabulary.

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_type_hints

import tyro

from dunes.flags import flag

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_TEMPERATURE = 1e37
"""Temperatures are clamped to [1 / LARGEST_TEMPERATURE, LARGEST_TEMPERATURE], so that divided logits fit into
float32."""
LARGEST_PENALTY = 1e30
"""Penalties are clamped to [1 / LARGEST_PENALTY, LARGEST_PENALTY], so that penalised logits fit into float32."""

Processor = Callable[["Tensor", Sequence[int]], "Tensor"]
"""(logits (V,), ids so far) -> changed logits of all ids (V,), or of the first ids only; -inf excludes an id."""

Choice = Callable[["Tensor"], "Tensor"]
"""Processed logits (V,) -> id ()."""


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities (..., V) in float32 from a model's logits (..., V)."""
    return logits.float().log_softmax(-1)


def greedy(logits: Tensor) -> Tensor:
    """The most probable id."""
    return logits.argmax(-1)


def draw(seed: int) -> Choice:
    """A choice that samples from the probabilities with its own random generator. Seeds are taken modulo 2^64.

    The choice looks up one random number in the cumulative probabilities. For 4,096 ids, this takes a quarter of
    the time of `torch.multinomial`. The choice raises ValueError if logits are NaN or all ids are excluded.
    """
    import torch

    generators: list[torch.Generator] = []

    def choose(logits: Tensor) -> Tensor:
        if not generators:
            generators.append(torch.Generator(logits.device).manual_seed(seed % 2**64))
        dtype = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
        sums = logits.softmax(-1).cumsum(-1, dtype=dtype)
        if not bool(sums[-1] > 0):
            raise ValueError("sampling: no id can be drawn, since the logits have NaN or exclude all ids")
        point = torch.rand((), generator=generators[0], dtype=dtype, device=logits.device) * sums[-1]
        # If `point` is rounded up to the total, the first search would return an index after the last possible id.
        return torch.minimum(torch.searchsorted(sums, point, right=True), torch.searchsorted(sums, sums[-1]))

    return choose


@dataclass(frozen=True)
class Sampler:
    """Applies processors in order, then chooses an id. Requests that sample need separate samplers, since each has
    a random generator."""

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
        is_greedy = type(self) is Sampler and self.choose is greedy  # a subclass may process logits in its own way
        return is_greedy and all(_preserves(processor, best) for processor in self.processors)

    def after(self, *processors: Processor) -> Sampler:
        """A sampler that applies these processors first, then the processors of this sampler."""
        return Sampler((*processors, *self.processors), self.choose)


def limit_vocab(count: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the logits of ids below `count`, since an embedding may have more rows than the tokenizer has ids."""
    return logits[:count]


def _preserves(processor: Processor, id: int) -> bool:
    """True if the processor preserves the order of the ids and does not exclude `id`."""
    return isinstance(processor, partial) and processor.func is limit_vocab and id < processor.args[0]


def penalise(penalty: float, last: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """For the `last` ids (-1: all ids), divide positive logits by the penalty and multiply negative logits by it.

    https://arxiv.org/abs/1909.05858
    """
    penalty = min(max(penalty, 1 / LARGEST_PENALTY), LARGEST_PENALTY)
    occurred = list(ids[max(0, len(ids) - last) if last >= 0 else 0 :])
    penalised, own = logits.clone(), logits[occurred]
    penalised[occurred] = (own / penalty).where(own > 0, own * penalty)
    return penalised


def scale_logits(temperature: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Subtract the largest logit, then divide by the temperature, so that the largest result is always 0."""
    return (logits - logits.amax()) / min(max(temperature, 1 / LARGEST_TEMPERATURE), LARGEST_TEMPERATURE)


def keep_top_k(k: int, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the `k` most probable ids; -1 keeps all."""
    if k < 0:
        return logits
    least = logits.topk(min(k, len(logits))).values[-1]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(p: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the most probable ids, as few as reach a total probability of `p` (nucleus sampling)."""
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    surplus = probs.cumsum(-1) - probs >= p  # more probable ids already reach p
    surplus[0] = False  # in case p rounds to 0 in float32
    return logits.masked_fill(surplus.scatter(-1, order, surplus), -math.inf)


def keep_min_p(p: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep ids with at least `p` times the largest probability."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(), -math.inf)


def keep_typical_p(p: float, logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Keep the ids whose negative log-probability is closest to the entropy, as few as reach a total probability
    of `p` (locally typical sampling): https://arxiv.org/abs/2202.00666
    """
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs * logprobs.exp()).nansum(-1)
    distances = (-logprobs - entropy).abs()
    sorted_distances, order = distances.sort()
    sums = logits[order].softmax(-1).cumsum(-1)
    return logits.masked_fill(distances > sorted_distances[(sums < p).sum().clamp(max=len(sums) - 1)], -math.inf)


ABOVE_0, FINITE, COUNT = sys.float_info.min, sys.float_info.max, (-1, 2**31)
"""ABOVE_0 is a minimum that excludes 0: the smallest normal number, since training flushes denormals to 0."""


@dataclass(frozen=True)
class Rule:
    """A sampling setting: its function on logits, its range, and its names in requests to servers."""

    process: Callable[..., Tensor] | None
    """Changes logits; called with this setting, the `further` settings, logits and ids. None for a setting that is
    only an argument of another rule's `process`."""
    neutral: float
    """The value that leaves the logits unchanged."""
    bounds: tuple[float, float]
    """Minimum and maximum."""
    expected: str
    requests: tuple[float, float] = COUNT
    """Minimum and maximum in requests; a value below `bounds` is raised to the minimum of `bounds`."""
    names: tuple[str, ...] = ()
    """Further names of the setting in requests; replies use the first of these names."""
    further: tuple[str, ...] = ()
    """Other settings that are arguments of `process`."""
    raw: bool = False
    """True for a rule that is applied before all others, and also in greedy decoding."""


P = flag("P", "off")
REPETITION = ("repeat_penalty",), ("penalty_range",)
"""Other names and further settings of the repetition penalty."""
Hidden = Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:  # temperature, filters and penalty of sampling, and the token limit
    max_tokens: int = 200
    """Maximum number of new tokens."""
    temperature: Annotated[
        float, Rule(scale_logits, 1.0, (0, FINITE), "a finite number of at least 0", (0, 1e4))
    ] = 0.8
    """Softmax temperature; 0 is greedy decoding."""
    top_k: Annotated[
        int | None, flag("K"), Rule(keep_top_k, 0, (-1, FINITE), "a whole number; 0 or -1 for all ids")
    ] = 50
    """Sample from the K most probable tokens; 0 or -1 means all."""
    top_p: Annotated[float | None, P, Rule(keep_top_p, 1.0, (ABOVE_0, 1), "a probability above 0", (0, 1))] = None
    """Sample from the most probable tokens whose probabilities add up to P."""
    min_p: Annotated[float | None, P, Rule(keep_min_p, 0.0, (0, 1), "a probability", (0, 1))] = None
    """Sample from tokens with at least P times the probability of the most probable token."""
    typical_p: Annotated[
        float | None, P, Rule(keep_typical_p, 1.0, (ABOVE_0, 1), "a probability above 0", (0, 1))
    ] = None
    """Sample from the tokens with log-probabilities closest to their mean, up to a total probability of P."""
    repetition_penalty: Annotated[
        float,
        Rule(penalise, 1.0, (ABOVE_0, FINITE), "a finite number above 0", (1e-3, 1e3), *REPETITION, raw=True),
    ] = 1.0
    """Above 1, tokens that have already occurred become less probable."""
    penalty_range: Annotated[
        Hidden, Rule(None, -1, (-1, FINITE), "a whole number; -1 for all ids", names=("repeat_last_n",))
    ] = -1
    """Number of last ids that the penalty applies to; -1 means all."""
    seed: int = 0
    """Random seed."""

    def sampler(self) -> Sampler:
        """The sampler with these options. Raises ValueError for invalid options."""
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        return sampler(seed=self.seed, **{name: getattr(self, name) for name in RULES})


RULES = {
    name: replace(rule, names=(*rule.names, name))
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
    for rule in getattr(hint, "__metadata__", ())
    if isinstance(rule, Rule)
}
"""The rules by setting. Raw rules are applied first, then the other rules in this order."""


def sampler(temperature: float = 1.0, *, seed: int = 0, **settings: float | None) -> Sampler:
    """A sampler with these settings, named as in `SamplingOptions`. Missing settings and None have no effect.

    Temperature 0 means greedy decoding. Raises KeyError for an unknown setting, ValueError for a value out of
    range.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    values = {name: rule.neutral for name, rule in RULES.items()} | {"temperature": temperature, **given}
    for name, value in values.items():
        low, high = RULES[name].bounds
        if not (value > 0 if low == ABOVE_0 else value >= low) or value > high:
            raise ValueError(f"sampling: {name} is {value}; expected {RULES[name].expected}")
    processors = [
        partial(rule.process, *(values[argument] for argument in (name, *rule.further)))
        for name, rule in sorted(RULES.items(), key=lambda entry: not entry[1].raw)
        if rule.process and values[name] != rule.neutral and (temperature or rule.raw)
    ]
    return Sampler(tuple(processors), draw(seed) if temperature else greedy)
