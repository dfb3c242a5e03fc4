"""Turning pairs of dimensions by angles: https://arxiv.org/abs/2104.09864

Half-split: dimension i pairs with i + D/2. The fused form writes each half once and turns the gradient
back by the same angles, where the plain form makes four whole copies each way.
"""

# Shapes: B batch, T tokens, H heads, D head dim.

from typing import Any

import torch
from torch import Tensor


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) turned by angles whose cosines and sines (B or 1, 1, T, D/2) are given in x's dtype."""
    if x.requires_grad:
        y: Tensor = _Fused.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return y
    return _turned(x, cos, sin, 1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    (a, b), y = x.chunk(2, -1), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = y.chunk(2, -1)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=sign)
    return y
