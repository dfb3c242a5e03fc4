"""Linear layers in 3 or 4 bits by group, packed to the bit: two 4-bit codes in a byte, eight 3-bit codes in three.

Each row is packed by itself, from the lowest bit of its first byte up (4 bits: the bytes of compressed-tensors'
`pack-quantized`), and takes the least whole number of bytes.
"""

# Shapes: I inputs, O outputs, G groups of a row.

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.augment.quantized import Grid, Quantized, Steps

ROWS = 4
"""Rows up to which a compiled step multiplies codes, and does not dequantize the matrix first."""


class GroupInt(Quantized):
    """Values scale * (code - zero) of a `Grid` of 3 or 4 bits.

    `codes` (O, bytes of a row) uint8; `scale` (O, G) bfloat16; `zero`, packed like codes, (O, G) float16 if zero
    points are real, or None if they are all the middle code.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    supports_packing = True

    def __init__(self, base: nn.Linear, grid: Grid) -> None:
        super().__init__(base)
        self.grid = grid
        device, groups = base.weight.device, -(-base.in_features // grid.width(base.in_features))
        rows = base.out_features
        self.register_buffer("codes", _bytes(rows, packed_bytes(base.in_features, grid.bits), device))
        self.register_buffer("scale", torch.empty(rows, groups, dtype=torch.bfloat16, device=device))
        zero = None
        if grid.real_zero:
            zero = torch.empty(rows, groups, dtype=torch.float16, device=device)
        elif not grid.symmetric:
            zero = _bytes(rows, packed_bytes(groups, grid.bits), device)
        self.register_buffer("zero", zero)

    def fill(self, weight: Tensor, steps: Steps | None = None) -> None:
        weight = weight.float()
        steps = steps or self.grid.fit_weight(weight)
        self.codes.copy_(pack(self.grid.weight_codes(weight, steps), self.grid.bits))
        self.scale.copy_(steps.scale)
        if self.zero is not None:
            self.zero.copy_(steps.zero if self.grid.real_zero else pack(steps.zero, self.grid.bits))

    def forward(self, x: Tensor) -> Tensor:
        width = self.grid.width(self.in_features)
        pairs = self.grid.bits == 4 and width % 2 == 0 and self.in_features % width == 0
        if pairs and torch.compiler.is_exporting() and x.shape[-2] <= ROWS:
            return self._products(x)
        return super().forward(x)

    def _products(self, x: Tensor) -> Tensor:
        """The output for a few rows x (..., T, I), as one sum over the bytes of each row, which Inductor fuses."""
        scale, zero = (s[..., None] for s in self.steps())
        codes = torch.unflatten(self.codes, 1, (scale.shape[1], -1))
        low, high = (((c.float() - zero) * scale) for c in (codes & 15, codes >> 4))
        pairs = torch.unflatten(x.float(), -1, (scale.shape[1], -1, 2))
        even, odd = torch.cat([pairs[None, ..., 0], pairs[None, ..., 1]]).unbind(0)  # contiguous, to be vectorized
        tokens = zip(even.unbind(-3), odd.unbind(-3), strict=True)
        y = torch.stack(
            [(low * a[..., None, :, :] + high * b[..., None, :, :]).sum((-1, -2)) for a, b in tokens], -2
        )
        return y if self.bias is None else y + self.bias.float()

    def steps(self) -> Steps:
        """Scales and zero points (O, G) in float32."""
        scale, bits = self.scale.float(), self.grid.bits
        if self.zero is None:
            return Steps(scale, torch.full_like(scale, 2 ** (bits - 1)))
        return Steps(
            scale, self.zero.float() if self.grid.real_zero else unpack(self.zero, bits, scale.shape[1]).float()
        )

    def dense(self) -> Tensor:
        scale, zero = self.steps()
        codes = self.grid.grouped(unpack(self.codes, self.grid.bits, self.in_features).float())
        weight = (codes - zero[..., None]) * scale[..., None]
        return weight.flatten(1)[:, : self.in_features].to(self.dtype)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (O, I) below 2**bits -> (O, packed_bytes(I, bits)) uint8."""
    count, size = _unit(bits)
    units = _units(codes.to(torch.int32), count)
    word = (units << _shifts(count, bits, codes.device)).sum(-1, keepdim=True)
    parts = (word >> _shifts(size, 8, codes.device)) & 255
    return parts.to(torch.uint8).flatten(1)[:, : packed_bytes(codes.shape[1], bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: (O, bytes) -> the codes (O, count) int32."""
    codes, size = _unit(bits)
    parts = _units(packed, size).to(torch.int32)
    word = (parts << _shifts(size, 8, packed.device)).sum(-1, keepdim=True, dtype=torch.int32)
    units: Tensor = (word >> _shifts(codes, bits, packed.device)) & (2**bits - 1)
    return units.flatten(1)[:, :count]


def _unit(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and those bytes."""
    return 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)


def _units(rows: Tensor, width: int) -> Tensor:
    """Rows (O, N) in pieces (O, pieces, width), with zeros at the end."""
    return F.pad(rows, (0, -rows.shape[1] % width)).view(len(rows), -1, width)


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=device)


def _bytes(rows: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(rows, size, dtype=torch.uint8, device=device)
