"""A linear layer in int8 whose inputs are rounded to int8 when it is computed, each token's by its own scale.

ZeroQuant https://arxiv.org/abs/2206.01861, LLM.int8 https://arxiv.org/abs/2208.07339

Sums of products of two codes are integers. The fast form computes them as such, exactly; the plain one in
float32, which is exact up to 1,040 inputs. Both agree to float32's rounding, and then to that of x's dtype. With
AMX and one thread, rounding and scaling included, the fast form of a layer 2,048 x 2,048 takes 0.16 to 0.5 of the
time of float32's product of dense weights, and 0.6 to 1.0 of bfloat16's; of one 384 x 384, 0.4 to 3 and 1 to 2.8.
"""

# Shapes: I inputs, O outputs.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
TINY = 1e-30
"""The least divisor: the scale of a token of zeros is zero."""
HAS_VNNI = torch.cpu._is_vnni_supported()
"""Whether this processor has instructions for the product, which torch otherwise computes in nested loops."""
INPUTS = 2**31 // LARGEST**2
"""Inputs whose sum of products may exceed int32."""


def dynamic_int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (..., I), codes (O, I) int8, scale (O,) float32 -> (..., O) in x's dtype.

    The gradient of x is that of the product with the weights, as if its rounding were the identity
    (straight-through, https://arxiv.org/abs/1308.3432); codes and scale get none. A token with a number that is
    not finite gives NaN.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _StraightThrough.apply(x, codes, scale)  # type: ignore[no-untyped-call]
        return y
    return _product(x, codes, scale)


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., I) -> the codes (..., I), whole numbers in float32, and the scales (..., 1) in float32."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest / LARGEST
    codes = (x / scale.clamp(min=TINY)).round_()
    return codes, scale.where(largest.isfinite(), torch.nan)


def plain(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    rounded, steps = round_tokens(x)
    return _scaled(F.linear(rounded, codes.float()), steps, scale, x.dtype)


def integer(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    rounded, steps = round_tokens(x)
    sums = torch._int_mm(rounded.reshape(-1, x.shape[-1]).to(torch.int8), codes.T)
    return _scaled(sums.view(*x.shape[:-1], len(codes)).float(), steps, scale, x.dtype)


def _scaled(sums: Tensor, steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (..., O), which are overwritten, times the scales of the tokens (..., 1) and of the weights (O,)."""
    return sums.mul_(steps).mul_(scale).to(dtype)


def _product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (integer if has_integers(x) else plain)(x, codes, scale)


def has_integers(x: Tensor) -> bool:
    """Whether torch's integer product is fast, and right: of one input it is not.

    On a GPU it has conditions of shape, and was not measured.
    """
    return HAS_VNNI and x.device.type == "cpu" and 1 < x.shape[-1] < INPUTS


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.dtype = x.dtype
        return _product(x, codes, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        scaled = (grad * scale).to(grad.dtype)
        return (scaled @ codes.to(grad.dtype)).to(ctx.dtype), None, None
