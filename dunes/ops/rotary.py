"""Turning pairs of dimensions by angles: https://arxiv.org/abs/2104.09864

Half-split: dimension i pairs with i + D/2; adjacent: dimension 2i pairs with 2i + 1. The fused form writes
each half once and turns the gradient back by the same angles, where the plain form makes four whole copies
each way.
"""

# Shapes: B batch, T tokens, H heads, D head dim.

from typing import Any

import torch
from torch import Tensor


def plain(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    a, b = _pairs(x, adjacent)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)


def fused(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """x (B, H, T, D) turned by angles whose cosines and sines (B or 1, 1, T, D/2) are given in x's dtype."""
    if torch.compiler.is_compiling():
        return plain(x, cos, sin, adjacent)
    if x.requires_grad:
        y: Tensor = _Fused.apply(x, cos, sin, adjacent)  # type: ignore[no-untyped-call]
        return y
    return _turned(x, cos, sin, 1, adjacent)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.adjacent = adjacent
        return _turned(x, cos, sin, 1, adjacent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1, ctx.adjacent), None, None, None


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    """Views (..., D/2) of the first and of the second of each pair."""
    if adjacent:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int, adjacent: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (first, second) = _pairs(x, adjacent), _pairs(y, adjacent)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=sign)
    return y
