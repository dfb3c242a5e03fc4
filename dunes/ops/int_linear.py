"""Linear layers with int8 or int4 codes, by torch's packed kernels for CPUs where there are few rows.

int8 has a scale for each output. The plain form converts the codes, which bfloat16 represents exactly, and scales
the outputs, in 0.3 to 0.6 of the time of scaling the matrix. The packed product reads codes directly and is faster
than a bfloat16 product; from 16 rows on it is slower than the plain form, and in float32 it is not vectorized.

int4 has scales in groups of inputs. The packed product reads half a byte for each weight, where dequantizing makes
a dense matrix first: 2048 x 2048, one thread, 1 / 4 / 16 rows: 0.20 / 0.37 / 1.6 ms; a bfloat16 product takes
0.56, dequantizing 3. It sums in float32 with offsets in bfloat16; like a bfloat16 product it has an error of about
0.2 %, from rounding outputs. Its layout is private to torch and specific to the CPU, so that it is made from the
codes on first use and not saved.
"""

# Shapes: I inputs, O outputs, G groups of a row.

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_ROWS = 4
"""Maximum rows of the packed product: 0.3 to 0.7 of a bfloat16 product's time with 1 row, 0.5 to 0.9 with 4."""
INT8_WIDTH = 32
"""Divisor of the number of inputs for the packed product."""
ALIGNED = 64
"""Alignment in bytes of the vectors that the packed product reads."""

INT4_ROWS = 16
"""Maximum rows of the packed product; with 32 it takes as long as dequantizing."""
WIDTHS, OUTPUTS = (32, 64, 128, 256), 16  # group sizes, and divisor of outputs, that the kernel supports
MIDDLE = 8  # the kernel's code of zero


def is_few(x: Tensor) -> bool:
    """True if x (..., I) has at most `INT8_ROWS` rows. In a graph, an unknown number of rows counts as many."""
    few: Any = x.numel() <= INT8_ROWS * x.shape[-1]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

        few = guard_or_false(few)
    return bool(few)


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (..., I), codes (O, I) int8, scale (O,) float32 -> (..., O) in x's dtype; no gradient."""
    packs = not torch.compiler.is_compiling() and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    # With other widths the packed product reads out of bounds.
    supported = packs and is_few(x) and x.shape[-1] % INT8_WIDTH == 0
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


class PackedInt4(NamedTuple):
    """A matrix in the kernel's layout: packed codes, and scales and offsets `steps` (G, O, 2) in bfloat16."""

    codes: Tensor
    steps: Tensor
    width: int


def fits_int4(x: Tensor, outputs: int, width: int) -> bool:
    """True if the kernel supports rows x (..., I) and codes (O, I) in groups of this width."""
    supported = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    has_few_rows = 0 < x.numel() <= INT4_ROWS * x.shape[-1]
    return supported and has_few_rows and x.shape[-1] % width == 0 and width in WIDTHS and outputs % OUTPUTS == 0


def pack_int4(codes: Tensor, scale: Tensor, zero: Tensor) -> PackedInt4:
    """Pack the matrix scale * (code - zero) of codes (O, I) below 16, with scale and zero (O, G) in float32."""
    steps = torch.stack([scale, (MIDDLE - zero) * scale], -1).to(torch.bfloat16)
    matrix = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return PackedInt4(matrix, steps.transpose(0, 1).contiguous(), codes.shape[1] // scale.shape[1])


def int4_linear(x: Tensor, matrix: PackedInt4) -> Tensor:
    """x (..., I) in bfloat16 -> (..., O) in bfloat16; no gradient."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = torch._weight_int4pack_mm_for_cpu(flat, matrix.codes, matrix.width, matrix.steps)
    return y.view(*x.shape[:-1], y.shape[-1])
