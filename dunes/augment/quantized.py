"""A linear layer with a quantized weight, and the grid of values that such a weight can take."""

# Shapes: I inputs, O outputs, C columns of a weight, G groups of a row.

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
"""The least divisor: the scale of a group of zeros is zero."""


class Steps(NamedTuple):
    """Scales and zero points of a weight's groups (O, G), or of some columns (O, 1), in float32."""

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class Grid:
    """Values scale * (code - zero), with a scale and a zero point for each `group` of a row's inputs.

    Group 0 is the whole row; the last group of a row may be shorter. Symmetric: the zero point is the middle code,
    and the number of largest magnitude has code 0, so that a scale may be negative (as llama.cpp's Q4_0, which
    uses all codes). Otherwise the range includes zero, which has a code; with `real_zero` a zero point is any
    number, and zero may have none. 8 bits are those of `Int8`: symmetric by row, with float32 scales.

    Scales of groups have the values of bfloat16, two bytes with float32's range: codes are computed with the
    truncated scale, so that it costs next to nothing.
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
        """Inputs of a group in rows of `inputs`."""
        return min(self.group or inputs, inputs)

    def fit(self, columns: Tensor) -> Steps:
        """The steps of one group (O, 1), or of several: columns (..., C) -> (..., 1). The range includes zero."""
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
        """The codes (..., C), as floating point numbers, of columns with steps (..., 1)."""
        codes = columns / torch.where(steps.scale.abs() < TINY, TINY, steps.scale)
        codes = (codes + steps.zero).round() if self.real_zero else codes.round() + steps.zero
        return codes.clamp(self.lowest, self.highest)

    def round(self, columns: Tensor, steps: Steps) -> Tensor:
        """The columns (..., C) at the nearest values of the grid with steps (..., 1)."""
        return (self.codes(columns, steps) - steps.zero) * steps.scale

    def grouped(self, weight: Tensor) -> Tensor:
        """A weight (O, I) as groups (O, G, C), the last one with zeros at its end if it is shorter."""
        inputs, width = weight.shape[1], self.width(weight.shape[1])
        padded = F.pad(weight, (0, -inputs % width)) if inputs % width else weight
        return padded.reshape(len(weight), -1, width)

    def fit_weight(self, weight: Tensor) -> Steps:
        """The steps (O, G) of a weight (O, I)."""
        steps = self.fit(self.grouped(weight))
        return Steps(steps.scale[..., 0], steps.zero[..., 0])

    def weight_codes(self, weight: Tensor, steps: Steps) -> Tensor:
        """The codes (O, I) of a weight with steps (O, G)."""
        codes = self.codes(self.grouped(weight), Steps(steps.scale[..., None], steps.zero[..., None]))
        return codes.flatten(1)[:, : weight.shape[1]]

    def round_weight(self, weight: Tensor, steps: Steps) -> Tensor:
        """The weight (O, I) at the nearest values of the grid with steps (O, G)."""
        wide = Steps(steps.scale[..., None], steps.zero[..., None])
        return self.round(self.grouped(weight), wide).flatten(1)[:, : weight.shape[1]]


def _truncated(scale: Tensor) -> Tensor:
    """The next number of bfloat16 towards zero, as float32: with a smaller step the outermost codes are used, so
    that rounded weights give their own codes again."""
    return (scale.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


def join(parts: Sequence[Steps]) -> Steps:
    """The steps (O, G) of consecutive groups (O, 1)."""
    return Steps(torch.cat([p.scale for p in parts], 1), torch.cat([p.zero for p in parts], 1))


def split(steps: Steps) -> list[Steps]:
    """The inverse of `join`."""
    return [Steps(steps.scale[:, i, None], steps.zero[:, i, None]) for i in range(steps.scale.shape[1])]


ROWS = 4
"""Rows up to which a compiled step multiplies codes, and does not dequantize the matrix first."""


class Quantized(nn.Module, ABC):
    """A linear layer whose forward dequantizes its weight each time, and again in the backward pass.

    In a compiled step it multiplies the codes, if they lie as that needs.
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
        """Quantize this matrix (O, I), with these steps if they are given."""

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
        """The products (..., T, O) in float32 of a few rows x (..., T, I), which Inductor fuses into a loop.

        None: the codes do not lie so that it could read them.
        """
        return None

    def for_step(self) -> "Quantized":
        """The layer that a compiled step has in place of this one: itself, or one with codes that it can read."""
        return self


def row_sums(x: Tensor, weights: Sequence[Tensor], inputs: Inputs, sums: Sums) -> Tensor:
    """Sums (..., T, O) of products of a few rows x (..., T, I), in a loop that reads the weights (O, ...) once.

    `sums(inputs(token), *parts)` are those of one row (..., 1, I) with parts of the weights. Four of their rows
    at a time keep more reads in flight.
    """
    tokens = [inputs(x[..., i : i + 1, :].float()) for i in range(x.shape[-2])]
    rows = ROWS // min(len(tokens), 2)
    rows = rows if len(weights[0]) % rows == 0 else 1
    parts = [*zip(*(torch.unflatten(w, 0, (rows, -1)) for w in weights), strict=True)]
    return torch.stack([torch.cat([sums(token, *part) for part in parts], -1) for token in tokens], -2)


def nibbles(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The inputs (..., I) of the even and the odd codes (..., groups, pairs of a group)."""
    pairs = torch.unflatten(x, -1, (groups, -1, 2))
    return pairs[..., 0], pairs[..., 1]


def contiguous(*tensors: Tensor) -> Sequence[Tensor]:
    """The same in one buffer, so that each is read in vectors."""
    return torch.cat([t[None] for t in tensors]).unbind(0)
