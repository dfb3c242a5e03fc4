"""A frozen linear layer, alone or with a low-rank update: x W' + scale * (x A') B', where ' is the transpose.

LoRA https://arxiv.org/abs/2106.09685, QLoRA https://arxiv.org/abs/2305.14314

The function `dense` computes W in the forward pass and again in the backward pass, so that no dense copy of a
quantized weight and no autocast copy stays in memory. The fused version adds the update into the layer's output;
the plain version allocates the update and the sum.
"""

# Shapes: N tokens, I inputs, O outputs, R rank.

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.ops.operation import autocast_dtype, once_differentiable, without_autocast

Dense = Callable[[], Tensor]


def plain(x: Tensor, a: Tensor, b: Tensor, dense: Dense, bias: Tensor | None, scale: float) -> Tensor:
    return F.linear(x, dense(), bias) + F.linear(F.linear(x, a), b) * scale


def fused(x: Tensor, a: Tensor, b: Tensor, dense: Dense, bias: Tensor | None, scale: float) -> Tensor:
    """x (..., I), `a` (R, I), `b` (O, R), weight `dense()` (O, I) -> (..., O) in autocast's dtype or x's.

    Neither the weight nor the bias (O,) gets a gradient.
    """
    y: Tensor = _Fused.apply(x, a, b, dense, bias, scale, autocast_dtype(x))  # type: ignore[no-untyped-call]
    return y


def frozen(x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
    """The frozen linear layer alone: x (..., I) -> (..., O). Neither weight nor bias gets a gradient."""
    y: Tensor = _Frozen.apply(x, dense, bias, autocast_dtype(x))  # type: ignore[no-untyped-call]
    return y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        dense: Dense,
        bias: Tensor | None,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        with without_autocast(x):
            low = flat @ a.T.to(dtype)
            y = _linear(flat, dense, bias, dtype)
            y.addmm_(low, b.T.to(dtype), alpha=scale)
        ctx.save_for_backward(flat, a, b, low)
        ctx.dense, ctx.scale, ctx.input_shape_dtype = dense, scale, (x.shape, x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @partial(once_differentiable, "low_rank")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, a, b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        with without_autocast(grad):
            grad_low = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        da, db = grad_low.T @ flat, (low.T @ grad).mul_(ctx.scale).T  # oneDNN is faster with few rows on the left
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ ctx.dense().to(grad.dtype)).addmm_(grad_low, a.to(grad.dtype))
            dx = dx.view(ctx.input_shape_dtype[0]).to(ctx.input_shape_dtype[1])
        return dx, da.to(a.dtype), db.to(b.dtype), None, None, None, None


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dense, ctx.dtype = dense, x.dtype
        return _linear(x.to(dtype), dense, bias, dtype)

    @staticmethod
    @partial(once_differentiable, "frozen")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (grad @ ctx.dense().to(grad.dtype)).to(ctx.dtype), None, None, None


def _linear(x: Tensor, dense: Dense, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with without_autocast(x):
        return F.linear(x, dense().to(dtype), None if bias is None else bias.to(dtype))
