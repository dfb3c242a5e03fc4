"""Root mean square norm (RMSNorm): https://arxiv.org/abs/1910.07467

The mean is computed in float32. The result has the dtype of the next matrix product, so the layers that read the
result need no cast. For the backward pass, the fused version stores its inputs and one number per row.
"""

# Shapes: D width; ... stands for any dimensions.

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from dunes.ops.operation import autocast_dtype, once_differentiable


@wrap_torch_function(lambda x, *args: (x,))  # lets a TorchFunctionMode replace the function
def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(autocast_dtype(x))


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: (..., D) -> (..., D), in autocast's dtype or x's own."""
    if torch.compiler.is_compiling():
        return plain(x, weight, eps)
    if not torch.is_grad_enabled() and x.dtype == weight.dtype == autocast_dtype(x):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    y: Tensor = _Fused.apply(x, weight, eps, autocast_dtype(x))  # type: ignore[no-untyped-call]
    return y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        inverse = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, weight, inverse)
        y: Tensor = (wide * inverse).mul_(weight.float()).to(dtype)
        return y

    @staticmethod
    @partial(once_differentiable, "rms_norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide = x.float()
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (grad.float() * wide).mul_(inverse).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad.float() * weight.float()
        radial = (grad_normed * wide).sum(-1, keepdim=True).mul_(inverse.square()).div_(-x.shape[-1])
        dx = grad_normed.addcmul_(wide, radial).mul_(inverse)
        return dx.to(x.dtype), dw, None, None
