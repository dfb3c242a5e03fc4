"""Product of few bfloat16 rows with a matrix of 4-bit codes in groups, by torch's packed kernel for CPUs.

The kernel reads half a byte for each weight, where dequantizing makes a dense matrix first: 2048 x 2048, one
thread, 1 / 4 / 16 rows: 0.20 / 0.37 / 1.6 ms; a bfloat16 product takes 0.56, dequantizing 3. It sums in float32
with offsets in bfloat16; like a bfloat16 product it has an error of about 0.2 %, from rounding outputs. Its layout
is private to torch and specific to the CPU, so that it is made from the codes on first use and not saved.
"""

# Shapes: I inputs, O outputs, G groups of a row.

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16
"""Maximum rows of the packed product; with 32 it takes as long as dequantizing."""

WIDTHS, OUTPUTS = (32, 64, 128, 256), 16  # group sizes, and the divisor of outputs, that the kernel supports
MIDDLE = 8  # the kernel's code of zero


class PackedInt4(NamedTuple):
    """A matrix in the kernel's layout: packed codes, and scales and offsets `steps` (G, O, 2) in bfloat16."""

    codes: Tensor
    steps: Tensor
    width: int


def fits(x: Tensor, outputs: int, width: int) -> bool:
    """True if the kernel supports rows x (..., I) and codes (O, I) in groups of this width."""
    supported = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    has_few_rows = 0 < x.numel() <= ROWS * x.shape[-1]
    return supported and has_few_rows and x.shape[-1] % width == 0 and width in WIDTHS and outputs % OUTPUTS == 0


def pack(codes: Tensor, scale: Tensor, zero: Tensor) -> PackedInt4:
    """Pack the matrix scale * (code - zero) of codes (O, I) below 16, with scale and zero (O, G) in float32."""
    steps = torch.stack([scale, (MIDDLE - zero) * scale], -1).to(torch.bfloat16)
    matrix = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return PackedInt4(matrix, steps.transpose(0, 1).contiguous(), codes.shape[1] // scale.shape[1])


def int4_linear(x: Tensor, matrix: PackedInt4) -> Tensor:
    """x (..., I) in bfloat16 -> (..., O) in bfloat16; no gradient."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = torch._weight_int4pack_mm_for_cpu(flat, matrix.codes, matrix.width, matrix.steps)
    return y.view(*x.shape[:-1], y.shape[-1])
