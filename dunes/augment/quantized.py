"""The base class of quantized linear layers, and the grid that maps weights to integer codes."""

# Shapes: I inputs, O outputs, C columns of a weight, G groups of a row, T tokens.

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import low_rank
from dunes.ops.operation import autocast_dtype

Inputs = Callable[[Tensor], Sequence[Tensor]]
Sums = Callable[..., Tensor]
TINY = 1e-30
"""Least divisor, as the scale of a group of zeros is zero."""


class Steps(NamedTuple):
    """Scales and zero points in float32, (O, G) for a weight or (O, 1) for one group of columns."""

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class Grid:
    """A quantization grid: values scale * (code - zero_point) for each `group` of a row's inputs.

    A `group` of 0 is a complete row; the last group of a row may be shorter. If `symmetric`, the zero point is the
    middle code and the number of largest magnitude gets code 0, so that scales may be negative (as in llama.cpp's
    Q4_0, which uses all codes). Otherwise zero has a code of its own, except with `real_zero`, where the zero
    point is a real number. With 8 bits the grid is `Int8`'s: symmetric by row, with float32 scales.

    Scales of groups are truncated to bfloat16 before codes are computed, which loses almost no accuracy.
    """

    bits: int
    group: int = 0
    symmetric: bool = False
    real_zero: bool = False

    @property
    def lowest(self) -> int:
        return -127 if self.bits == 8 else 0

    @property
    def highest(self) -> int:
        return 127 if self.bits == 8 else 2**self.bits - 1

    def width(self, inputs: int) -> int:
        """Group size for rows of `inputs`."""
        return min(self.group or inputs, inputs)

    def fit(self, columns: Tensor) -> Steps:
        """Scales and zero points (..., 1) for groups of columns (..., C), with a range that includes zero."""
        if self.symmetric:
            return self._fit_symmetric(columns)
        low, high = columns.amin(-1, keepdim=True).clamp(max=0), columns.amax(-1, keepdim=True).clamp(min=0)
        scale = _truncated((high - low) / self.highest)
        return Steps(scale, (-low / scale.clamp(min=TINY)).round().clamp(0, self.highest))

    def _fit_symmetric(self, columns: Tensor) -> Steps:
        if self.bits == 8:
            scale = columns.abs().amax(-1, keepdim=True) / 127
            return Steps(scale, torch.zeros_like(scale))
        middle = 2 ** (self.bits - 1)
        largest = columns.gather(-1, columns.abs().argmax(-1, keepdim=True))
        return Steps(_truncated(largest / -middle), torch.full_like(largest, middle))

    def codes(self, columns: Tensor, steps: Steps) -> Tensor:
        """Codes (..., C), as floating-point numbers, of columns with scales and zero points (..., 1)."""
        codes = columns / torch.where(steps.scale.abs() < TINY, TINY, steps.scale)
        codes = (codes + steps.zero).round() if self.real_zero else codes.round() + steps.zero
        return codes.clamp(self.lowest, self.highest)

    def round(self, columns: Tensor, steps: Steps) -> Tensor:
        """Columns (..., C) rounded to the grid with scales and zero points (..., 1)."""
        return (self.codes(columns, steps) - steps.zero) * steps.scale

    def grouped(self, weight: Tensor) -> Tensor:
        """A weight (O, I) as groups (O, G, C); a shorter last group is padded with zeros."""
        inputs, width = weight.shape[1], self.width(weight.shape[1])
        padded = F.pad(weight, (0, -inputs % width)) if inputs % width else weight
        return padded.reshape(len(weight), -1, width)

    def fit_weight(self, weight: Tensor) -> Steps:
        """Scales and zero points (O, G) for a weight (O, I)."""
        steps = self.fit(self.grouped(weight))
        return Steps(steps.scale[..., 0], steps.zero[..., 0])

    def weight_codes(self, weight: Tensor, steps: Steps) -> Tensor:
        """Codes (O, I) of a weight with scales and zero points (O, G)."""
        codes = self.codes(self.grouped(weight), Steps(steps.scale[..., None], steps.zero[..., None]))
        return codes.flatten(1)[:, : weight.shape[1]]

    def round_weight(self, weight: Tensor, steps: Steps) -> Tensor:
        """A weight (O, I) rounded to the grid with scales and zero points (O, G)."""
        wide = Steps(steps.scale[..., None], steps.zero[..., None])
        return self.round(self.grouped(weight), wide).flatten(1)[:, : weight.shape[1]]


def _truncated(scale: Tensor) -> Tensor:
    """A scale rounded towards zero to bfloat16, as float32, so that the outermost codes are used, and quantizing
    rounded weights again gives the same codes."""
    return (scale.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


def join(parts: Sequence[Steps]) -> Steps:
    """Scales and zero points (O, G) concatenated from consecutive groups (O, 1)."""
    return Steps(torch.cat([p.scale for p in parts], 1), torch.cat([p.zero for p in parts], 1))


def split(steps: Steps) -> list[Steps]:
    """The inverse of `join`."""
    return [Steps(steps.scale[:, i, None], steps.zero[:, i, None]) for i in range(steps.scale.shape[1])]


ROWS = 4
"""Rows up to which exported graphs multiply codes directly instead of dequantizing the matrix first."""


class Quantized(nn.Module, ABC):
    """A linear layer that dequantizes its weight in each forward, and again in the backward pass.

    Exported graphs multiply the codes of up to `ROWS` rows directly, where their layout permits.
    """

    makes_dense = True  # `dense` returns a new matrix without gradient
    supports_packing = True
    mutable_buffers = ()  # training changes no code and no scale

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.dtype = base.weight.dtype

    @abstractmethod
    def fill(self, weight: Tensor, steps: Steps | None = None) -> None:
        """Quantize this matrix (O, I), with scales and zero points `steps` (O, G) if given."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            y = self.code_products(x) if x.shape[-2] <= ROWS else None
            if y is None:
                return self.product(x)
            return y if self.bias is None else y + self.bias.float()
        trains_bias = self.bias is not None and self.bias.requires_grad
        if not (torch.is_grad_enabled() and (x.requires_grad or trains_bias)):
            with torch.autocast(x.device.type, enabled=False):
                return self.product(x.to(autocast_dtype(x)))
        if torch.compiler.is_compiling() or trains_bias:
            return F.linear(x, self.dense().to(autocast_dtype(x)), self.bias)
        return low_rank.frozen(x, self.dense, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """The output without a gradient, in the dtype of x."""
        return F.linear(x, self.dense().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @abstractmethod
    def dense(self) -> Tensor:
        """The dequantized matrix (O, I) in the original dtype."""

    def code_products(self, x: Tensor) -> Tensor | None:
        """Products (..., T, O) float32 of a few rows x (..., T, I), in operations that Inductor fuses into a loop.

        None if the layout of the codes does not permit it.
        """
        return None

    def for_step(self) -> "Quantized":
        """The layer to export in place of this one: itself, or one whose codes `code_products` can read."""
        return self


def row_sums(x: Tensor, weights: Sequence[Tensor], inputs: Inputs, sums: Sums) -> Tensor:
    """Products (..., T, O) of a few rows x (..., T, I), in a loop that reads the weights (O, ...) once.

    `sums(inputs(token), *parts)` computes one row (..., 1, I) with parts of the weights. Four rows of the weights
    at a time keep more reads in flight.
    """
    tokens = [inputs(x[..., i : i + 1, :].float()) for i in range(x.shape[-2])]
    rows = ROWS // min(len(tokens), 2)
    rows = rows if len(weights[0]) % rows == 0 else 1
    parts = [*zip(*(torch.unflatten(w, 0, (rows, -1)) for w in weights), strict=True)]
    return torch.stack([torch.cat([sums(token, *part) for part in parts], -1) for token in tokens], -2)


def nibbles(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Inputs (..., I) of the even and of the odd codes, each (..., groups, pairs of a group)."""
    pairs = torch.unflatten(x, -1, (groups, -1, 2))
    return pairs[..., 0], pairs[..., 1]


def contiguous(*tensors: Tensor) -> Sequence[Tensor]:
    """Copy the tensors into one buffer, so that each is read in vectors."""
    return torch.cat([t[None] for t in tensors]).unbind(0)
