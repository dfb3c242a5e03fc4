"""Rotary position embedding (RoPE): https://arxiv.org/abs/2104.09864

In the half-split layout dimension i pairs with i + D/2; in the adjacent layout 2i pairs with 2i + 1. The fused
version allocates only its result; its backward pass rotates the gradient by the negative angles. The plain version
makes four full copies in the forward pass and four in the backward pass.
"""

# Shapes: B batch, T tokens, H heads, D head dim.

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from dunes.ops.operation import operation


@wrap_torch_function(lambda x, *args: (x,))  # lets a TorchFunctionMode replace the function
def plain(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    a, b = _pairs(x, adjacent)
    rotated = a * cos - b * sin, b * cos + a * sin
    return torch.stack(rotated, -1).flatten(-2) if adjacent else torch.cat(rotated, -1)


def _backward(grad: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> tuple[Tensor, None, None]:
    return _rotate(grad, cos, sin, -1, adjacent), None, None


@operation("dunes::rotary", reference=plain, backward=_backward, compiled="reference")
def fused(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """Rotate x (B, H, T, D); `cos` and `sin` of the angles are (B or 1, 1, T, D/2) in x's dtype."""
    return _rotate(x, cos, sin, 1, adjacent)


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    """Views (..., D/2) of the first and of the second dimension of each pair."""
    if adjacent:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, adjacent: bool) -> Tensor:
    # In inference, keep x's layout (tokens before heads): attention's output then has it, and `out` reads it.
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if torch.is_grad_enabled() else torch.empty_like(x)
    (a, b), (first, second) = _pairs(x, adjacent), _pairs(y, adjacent)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=sign)
    return y
