"""silu(gate) * up. The fused form recomputes silu in the backward pass, and so saves two tensors, not three."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def fused(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of two tensors of equal shape and dtype, in that shape and dtype. https://arxiv.org/abs/2002.05202"""
    if torch.compiler.is_compiling():
        return plain(gate, up)
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    y: Tensor = _Fused.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
