"""Linear layer with int8 codes and a scale for each output.

The plain form converts the codes, which bfloat16 represents exactly, and scales the outputs, in 0.3 to 0.6 of the
time of scaling the matrix. torch's packed product for few rows reads int8 codes directly and is faster than a
bfloat16 product; from 16 rows on it is slower than the plain form, and in float32 it is not vectorized.
"""

# Shapes: I inputs, O outputs.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4
"""Maximum rows of the packed product: 0.3 to 0.7 of a bfloat16 product's time with 1 row, 0.5 to 0.9 with 4."""

WIDTH = 32
"""Divisor of the number of inputs for the packed product."""

ALIGNED = 64
"""Alignment in bytes of the vectors that the packed product reads."""


def is_few(x: Tensor) -> bool:
    """True if x (..., I) has at most `ROWS` rows. In a graph, an unknown number of rows counts as many."""
    few: Any = x.numel() <= ROWS * x.shape[-1]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

        few = guard_or_false(few)
    return bool(few)


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (..., I), codes (O, I) int8, scale (O,) float32 -> (..., O) in x's dtype; no gradient."""
    packs = not torch.compiler.is_compiling() and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    # With other widths the packed product reads out of bounds.
    supported = packs and is_few(x) and x.shape[-1] % WIDTH == 0
    return packed(x, codes, scale) if supported and _aligned(x, codes) else plain(x, codes, scale)


def _aligned(x: Tensor, codes: Tensor) -> bool:
    """True if the packed product can read these; otherwise, as with codes in a mapped file, it ends the process.

    Codes in complete groups of four outputs need no alignment.
    """
    codes_fit = codes.is_contiguous() and (len(codes) % 4 == 0 or codes.data_ptr() % ALIGNED == 0)
    return codes_fit and x.numel() > 0 and x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def plain(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (F.linear(x, codes.to(x.dtype)) * scale).to(x.dtype)


def packed(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    # Scales passed to the kernel would be rounded to bfloat16, so that few rows would differ from many by 0.2 %.
    sums: Tensor = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), codes, x.new_ones(len(codes)))
    return (sums * scale).to(x.dtype).view(*x.shape[:-1], len(codes))
