"""Linear layers with int8 or int4 codes. On a CPU, torch's packed kernels multiply inputs of a few rows.

int8 codes have one scale per output. The plain implementation casts the codes to x's dtype (bfloat16 represents
them exactly) and scales the outputs. Scaling the outputs takes 0.3 to 0.6 of the time of scaling the matrix. The
packed product reads the codes directly and is faster than a bfloat16 product for a few rows. From 16 rows on, the
packed product is slower than the plain implementation. In float32, the packed product is not vectorized.

int4 codes have one scale and zero point per group of inputs. The packed product reads half a byte per weight. For
2048 x 2048 weights and 1 / 4 / 16 rows, the packed product takes 0.20 / 0.37 / 1.6 ms on one thread; a bfloat16
product takes 0.56 ms, and dequantizing into a dense matrix 3 ms. The packed product sums in float32; its scales
and offsets are bfloat16. Rounding the outputs causes an error of about 0.2 %, as in a bfloat16 product. The packed
layout is private to torch and specific to the CPU. The layout is made from the codes on first use and never saved.
"""

# Shapes: I inputs, O outputs, G groups of a row.

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_ROWS = 4
"""Maximum rows of the int8 packed product. The packed product takes 0.3 to 0.7 of a bfloat16 product's time with 1
row, 0.5 to 0.9 with 4 rows."""
INT8_WIDTH = 32
"""The number of inputs of the int8 packed product must be a multiple of INT8_WIDTH."""
ALIGNED = 64
"""Alignment, in bytes, of the memory that the int8 packed product reads."""

INT4_ROWS = 16
"""Maximum rows of the int4 packed product; with 32 rows, the product takes as long as dequantizing."""
WIDTHS, OUTPUTS = (32, 64, 128, 256), 16  # group sizes of the int4 kernel; divisor of its number of outputs
MIDDLE = 8  # the kernel reads this code as zero


def is_few(x: Tensor) -> bool:
    """True if x (..., I) has at most `INT8_ROWS` rows; False in a compiled graph if the number is unknown."""
    few: Any = x.numel() <= INT8_ROWS * x.shape[-1]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

        few = guard_or_false(few)
    return bool(few)


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (..., I), codes (O, I) int8, scale (O,) float32 -> (..., O) in x's dtype. Not differentiable."""
    packs = not torch.compiler.is_compiling() and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    # With other widths the packed product reads out of bounds.
    supported = packs and is_few(x) and x.shape[-1] % INT8_WIDTH == 0
    return packed(x, codes, scale) if supported and _aligned(x, codes) else plain(x, codes, scale)


def _aligned(x: Tensor, codes: Tensor) -> bool:
    """True if the packed product can read these tensors. Unaligned codes, as in a mapped file, crash the process.

    Codes need no alignment if the number of outputs is a multiple of four.
    """
    codes_fit = codes.is_contiguous() and (len(codes) % 4 == 0 or codes.data_ptr() % ALIGNED == 0)
    return codes_fit and x.numel() > 0 and x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def plain(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (F.linear(x, codes.to(x.dtype)) * scale).to(x.dtype)


def packed(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    # Scales are applied here, since the kernel would round them to bfloat16 (an error of 0.2 %).
    sums: Tensor = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), codes, x.new_ones(len(codes)))
    return (sums * scale).to(x.dtype).view(*x.shape[:-1], len(codes))


class PackedInt4(NamedTuple):
    """A matrix in the int4 kernel's layout; `steps` (G, O, 2) are scales and offsets in bfloat16."""

    codes: Tensor
    steps: Tensor
    width: int


def fits_int4(x: Tensor, outputs: int, width: int) -> bool:
    """True if the int4 kernel supports x (..., I) and codes (O, I) with groups of `width` inputs."""
    supported = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    has_few_rows = 0 < x.numel() <= INT4_ROWS * x.shape[-1]
    return supported and has_few_rows and x.shape[-1] % width == 0 and width in WIDTHS and outputs % OUTPUTS == 0


def pack_int4(codes: Tensor, scale: Tensor, zero: Tensor) -> PackedInt4:
    """Pack the matrix `scale * (codes - zero)`: codes (O, I) are below 16, scale and zero (O, G) are float32."""
    steps = torch.stack([scale, (MIDDLE - zero) * scale], -1).to(torch.bfloat16)
    matrix = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return PackedInt4(matrix, steps.transpose(0, 1).contiguous(), codes.shape[1] // scale.shape[1])


def int4_linear(x: Tensor, matrix: PackedInt4) -> Tensor:
    """x (..., I) -> (..., O), both bfloat16. Not differentiable."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = torch._weight_int4pack_mm_for_cpu(flat, matrix.codes, matrix.width, matrix.steps)
    return y.view(*x.shape[:-1], y.shape[-1])
