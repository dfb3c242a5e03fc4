"""A frozen linear map, alone or with a low-rank change beside it: x W' + scale * (x A') B'.

LoRA https://arxiv.org/abs/2106.09685, QLoRA https://arxiv.org/abs/2305.14314

W comes from a function that makes it, and is made again on the way back: in between nothing of it is held,
neither the dense form of what is kept in few bits nor autocast's copy. The fused form goes over the large
results once where the plain one makes a tensor for the change and one for its sum, and rounds that sum once.
"""

# Shapes: N tokens, I inputs, O outputs, R rank.

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dunes.ops.precision import computing

Dense = Callable[[], Tensor]


def plain(x: Tensor, a: Tensor, b: Tensor, dense: Dense, bias: Tensor | None, scale: float) -> Tensor:
    return F.linear(x, dense(), bias) + F.linear(F.linear(x, a), b) * scale


def fused(x: Tensor, a: Tensor, b: Tensor, dense: Dense, bias: Tensor | None, scale: float) -> Tensor:
    """x (..., I), A (R, I), B (O, R), `dense()` (O, I) -> (..., O) in the dtype of matrix products.

    Neither W nor the bias (O,) gets a gradient.
    """
    y: Tensor = _Fused.apply(x, a, b, dense, bias, scale, computing(x))  # type: ignore[no-untyped-call]
    return y


def frozen(x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
    """The map alone, x (..., I) -> (..., O). Neither W nor the bias gets a gradient."""
    y: Tensor = _Frozen.apply(x, dense, bias, computing(x))  # type: ignore[no-untyped-call]
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
        low = _product(flat, a.T, dtype)
        y = _map(flat, dense, bias, dtype)
        with _exact(x):
            y.addmm_(low, b.T.to(dtype), alpha=scale)
        ctx.save_for_backward(flat, a, b, low)
        ctx.dense, ctx.scale, ctx.like = dense, scale, (x.shape, x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, a, b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        slope = _product(grad, b, grad.dtype).mul_(ctx.scale)
        da, db = slope.T @ flat, (low.T @ grad).mul_(ctx.scale).T  # oneDNN is faster when few rows come first
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ ctx.dense().to(grad.dtype)).addmm_(slope, a.to(grad.dtype))
            dx = dx.view(ctx.like[0]).to(ctx.like[1])
        return dx, da.to(a.dtype), db.to(b.dtype), None, None, None, None


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dense, ctx.dtype = dense, x.dtype
        return _map(x.to(dtype), dense, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (grad @ ctx.dense().to(grad.dtype)).to(ctx.dtype), None, None, None


def _map(x: Tensor, dense: Dense, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with _exact(x):
        return F.linear(x, dense().to(dtype), None if bias is None else bias.to(dtype))


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    with _exact(x):
        return x @ y.to(dtype)


def _exact(x: Tensor) -> torch.autocast:
    """All that is multiplied here has its dtype already."""
    return torch.autocast(x.device.type, enabled=False)
