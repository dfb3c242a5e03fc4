"""SwiGLU, silu(gate) * up. The fused version stores 2 tensors, not 3, since its backward pass recomputes silu."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.ops.operation import operation


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


@operation("dunes::gated", reference=plain, backward=_backward, compiled="reference")
def fused(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for tensors of equal shape and dtype (SwiGLU). https://arxiv.org/abs/2002.05202"""
    return F.silu(gate).mul_(up)
