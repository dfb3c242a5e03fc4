"""Cross entropy of a linear head, without ever holding all logits.

The plain form writes (N, V) logits, their log-softmax and both gradients to memory: for 4,096 tokens
and as many words that is 64 MB a time. The fused form goes through the tokens in chunks that fit the
cache, and computes the gradients while the chunk's probabilities are at hand, since the gradient of
a sum of losses needs nothing from above but one factor.
"""

# Shapes: N tokens, D width, V vocabulary.

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dunes.ops.precision import computing

IGNORE = -100
CHUNK = {"cpu": 1 << 21}  # logits in flight: what the cache holds
WIDE = 1 << 28  # and where launching a kernel costs more than its memory


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    x = x.masked_fill((targets == IGNORE)[:, None], 0.0)
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORE, reduction="sum")


def fused(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed loss (nats, float32) of states x (N, D) under the head (V, D) for targets (N,).

    Targets equal to IGNORE count nothing, and their states are not looked at: they may be inf or NaN.
    """
    if torch.compiler.is_compiling():
        learns = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
        return cast(Tensor, whole(x, weight, targets, computing(x), *learns)[0])
    loss: Tensor = _Fused.apply(x, weight, targets, computing(x))  # type: ignore[no-untyped-call]
    return loss


# A compiled graph would hold every chunk by itself, and be another one for each number of tokens.
@torch.library.custom_op("dunes::linear_cross_entropy", mutates_args=())
def whole(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, states: bool, head: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients with respect to states and head, empty where they are not asked for."""
    loss, *slopes = _sum(x, weight, targets, dtype, (states, head))
    dx, dw = (loss.new_empty(0) if slope is None else slope for slope in slopes)
    return loss, dx, dw


@whole.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, states: bool, head: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.float32)
    dx, dw = (loss.new_empty(t.shape if asked else 0) for t, asked in ((x, states), (weight, head)))
    return loss, dx, dw


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtypes, ctx.asked = (inputs[0].dtype, inputs[1].dtype), inputs[4:]
    ctx.save_for_backward(*output[1:])


def _back(ctx: Any, grad: Tensor, *of_slopes: Tensor) -> tuple[Tensor | None, ...]:
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.asked, strict=True)
    return *((slope * grad).to(dtype) if asked else None for slope, dtype, asked in saved), *[None] * 4


whole.register_autograd(_back, setup_context=_remember)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        loss, dx, dw = _sum(x, weight, targets, dtype, ctx.needs_input_grad[:2])
        ctx.save_for_backward(dx, dw)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dx, dw = (
            None if slope is None else (slope * grad).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return dx, dw, None, None


def _sum(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients in float32 with respect to x and weight where they are wanted."""
    loss = x.new_zeros((), dtype=torch.float32)
    # Of a frozen head, and a head is the largest matrix, there is none.
    dx, dw = (
        torch.zeros_like(t, dtype=torch.float32) if w else None for t, w in zip((x, weight), wanted, strict=True)
    )
    head = weight.to(dtype)
    size = max(1, CHUNK.get(x.device.type, WIDE) // len(weight))
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            counted = targets[rows] != IGNORE
            # Infinity times zero is NaN: what is ignored is taken out before any product, not after.
            states = x[rows].to(dtype).masked_fill(~counted[:, None], 0.0)
            part, slope = _chunk(states, head, targets[rows], counted, any(wanted))
            loss += part
            if dx is not None and slope is not None:
                dx[rows] = slope @ head * counted[:, None]
            if dw is not None and slope is not None:
                dw += slope.T @ states
    return loss, dx, dw


def _chunk(
    x: Tensor, head: Tensor, targets: Tensor, counted: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of the counted tokens, and each token's gradient with respect to its logits."""
    logits = (x @ head.T).float()
    likely = logits.softmax(-1)
    index = targets.where(counted, 0)[:, None]
    # The likeliest word's probability never underflows, so log(sum(exp)) follows from it exactly.
    whole = logits.amax(-1, keepdim=True) - likely.amax(-1, keepdim=True).log()
    loss = ((whole - logits.gather(1, index))[:, 0] * counted).sum()
    if not wanted:
        return loss, None
    likely.scatter_add_(1, index, torch.full_like(whole, -1.0))
    return loss, likely.to(x.dtype)
