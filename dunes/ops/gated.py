"""SwiGLU, silu(gate) * up. The fused form recomputes silu in the backward pass, to save two tensors, not three."""

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
    """SwiGLU of two tensors of equal shape and dtype, in that shape and dtype. https://arxiv.org/abs/2002.05202"""
    return F.silu(gate).mul_(up)
