"""Whether two folders hold one model: logits on fixed prompts, one module's weights in memory at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dunes.checkpoint import native
from dunes.checkpoint.differences import compare
from dunes.checkpoint.source import Source
from dunes.checkpoint.stored import Weights, counted
from dunes.models.outline import outline
from dunes.parts import Attention, Decoder

Tick = Callable[[int], None]

PROMPTS, TOKENS = 2, 16
EXACT = 1e-4
"""Of the logits' size: what other orders of the same float32 operations differ by, with room to spare."""
ROUNDED = 32
"""Times the relative step of a narrower dtype: rounding every weight moves the logits less than that."""


@dataclass(frozen=True)
class Verified:
    """Logits of the source and of the result, in float32: `size` is the source's root mean square.

    `agree` is the share of positions whose likeliest token is the same.
    """

    largest_difference: float
    size: float
    agree: float
    tolerance: float
    tokens: int = PROMPTS * TOKENS

    @property
    def relative(self) -> float:
        return self.largest_difference / self.size if self.size else self.largest_difference

    def card(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens} tokens differ by {self.largest_difference:.1e} at most, {self.relative:.1e} "
            f"of their size (allowed: {self.tolerance:.1e}); the likeliest token agrees at {self.agree:.0%}"
        )


def verify(
    source: Source, result: Source, dtype: torch.dtype | None = None, tick: Tick = lambda size: None
) -> Verified:
    """Compare two models, whose weights were rounded to `dtype` on the way if that is given.

    `tick` is told the bytes of each tensor that was used. Raises ValueError if they differ by more than that
    explains.
    """
    if result.config != source.config:
        raise ValueError(f"{source.folder}: the result's config reads {result.config}, not {source.config}")
    before, after = logits(source, tick), logits(result, tick)
    tolerance = EXACT if dtype is None else max(EXACT, ROUNDED * torch.finfo(dtype).eps)
    difference = float((after - before).abs().max())
    agree = float((after.argmax(-1) == before.argmax(-1)).float().mean())
    found = Verified(difference, float(before.square().mean().sqrt()), agree, tolerance)
    if not found.relative <= tolerance:  # also where it is not a number
        raise ValueError(f"{source.folder}: the result is another model: {found}; nothing was written")
    return found


def logits(source: Source, tick: Tick = lambda size: None) -> Tensor:
    """Logits (PROMPTS, TOKENS, V) of the fixed prompts.

    A native model runs as its own code runs it: weights as they lie, rotary positions on adjacent pairs.
    """
    model = outline(source.family, source.config).eval()
    names = source.names
    if source.form == "native":
        names = native.names(source.words, permuted=False)
        for module in model.modules():
            if isinstance(module, Attention) and module.position is not None:
                module.position = replace(module.position, adjacent=True)
    weights, _ = compare(source.expected, source.files, names, source.ignored)
    vocab, context = source.config.vocab, source.config.context
    ids = torch.randint(vocab, (PROMPTS, min(TOKENS, context)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), _streamed(model, counted(weights, tick)):
        result: Tensor = model(ids)
    return result


@contextmanager
def _streamed(model: Decoder, weights: Weights) -> Iterator[None]:
    """Inside, each module's own weights are brought when it is called, as float32, and let go afterwards."""
    hooks = []
    for place, module in model.named_modules():
        own = {name: f"{place}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if own:
            hooks.append(module.register_forward_pre_hook(_bring(own, weights)))
        if own and not (model.head is None and module is model.embed.token):  # that one is the head, too
            hooks.append(module.register_forward_hook(_drop(own, weights)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _bring(own: dict[str, str], weights: Weights) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        for name, key in own.items():
            module._parameters[name] = nn.Parameter(weights[key].read().float(), requires_grad=False)

    return hook


def _drop(own: dict[str, str], weights: Weights) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        for name, key in own.items():
            module._parameters[name] = nn.Parameter(
                torch.empty(weights[key].shape, device="meta"), requires_grad=False
            )
            weights[key].forget()

    return hook
