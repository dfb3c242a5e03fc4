"""Linear layers in int3 and int4 by group, bit-packed: two 4-bit codes in one byte, eight 3-bit codes in three.

Rows are packed separately, lowest bit first (4 bits: the bytes of compressed-tensors' `pack-quantized`).
"""

# Shapes: I inputs, O outputs, G groups of a row.

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dunes.augment.quantized import Grid, Quantized, Steps, contiguous, nibbles, row_sums
from dunes.ops import int_linear

PAIR_OFFSET = 128
"""Offset of codes that are assembled as bfloat16 bit patterns."""
DENSE_ROWS = 128  # fit the CPU's cache


class _Cached(NamedTuple):
    """A cached matrix, ids and versions of its source tensors, and references to these, except the codes."""

    matrix: int_linear.PackedInt4
    state: list[tuple[int, int]]
    parts: list[Tensor]


PACKED: MutableMapping[Tensor, _Cached] = WeakTensorKeyDictionary()
"""Cache of kernel matrices by codes, freed with them, and neither copied nor saved with a model."""


class GroupInt(Quantized):
    """A linear layer in int3 or int4 with weights scale * (code - zero) on a `Grid`.

    `codes` (O, bytes of a row) uint8; `scale` (O, G) bfloat16; `zero` packed like `codes`, or (O, G) float16 if
    zero points are real, or None if all are the middle code. Layers from `for_step` have unpacked zero points.
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

    def product(self, x: Tensor) -> Tensor:
        width = self.grid.width(self.in_features)
        if self.codes.is_inference() or not int_linear.fits_int4(x, self.out_features, width):
            return super().product(x)
        y = int_linear.int4_linear(x, self._packed())
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _packed(self) -> int_linear.PackedInt4:
        """The matrix packed for the kernel for few rows, cached while the codes live; it doubles their memory."""
        parts = [t for t in (self.codes, self.scale, self.zero) if t is not None]
        state = [(id(t), t._version) for t in parts]
        entry = PACKED.get(self.codes)
        if entry is None or entry.state != state:
            bits, (scale, zero) = self.grid.bits, self.steps()
            middle = int_linear.MIDDLE - 2 ** (bits - 1)  # codes near the middle have the least rounding error
            codes = unpack(self.codes, bits, self.in_features) + middle
            entry = _Cached(int_linear.pack_int4(codes, scale, zero + middle), state, parts[1:])
            PACKED[self.codes] = entry
        return entry.matrix

    def _has_pairs(self) -> bool:
        """True if all groups have the same, even number of codes."""
        width = self.grid.width(self.in_features)
        return width % 2 == 0 and self.in_features % width == 0

    def code_products(self, x: Tensor) -> Tensor | None:
        if self.grid.bits != 4 or not self._has_pairs():
            return None
        scale, zero = self.steps()
        groups = scale.shape[1]

        def inputs(token: Tensor) -> Sequence[Tensor]:
            even, odd = nibbles(token, groups)
            return [*contiguous(odd / 16, even - odd / 16), (even + odd).sum(-1)]

        def sums(x: Sequence[Tensor], codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            # A byte is even code + 16 * odd code, so that the odd one needs no shift.
            codes = torch.unflatten(codes, 1, (groups, -1))
            products = codes.float() * x[0] + (codes & 15).float() * x[1]
            return (products * scale[..., None]).sum((-1, -2)) - (scale * zero * x[2]).sum(-1)

        return row_sums(x, (self.codes, scale, zero), inputs, sums)

    def for_step(self) -> Quantized:
        if not self._has_pairs() or (self.grid.bits == 4 and (self.zero is None or self.grid.real_zero)):
            return self
        with torch.device(self.codes.device):
            layer = GroupInt(nn.Linear(self.in_features, self.out_features, False), replace(self.grid, bits=4))
        layer.bias, layer.dtype, layer.scale, layer.codes = self.bias, self.dtype, self.scale, self.codes
        if self.grid.bits == 3:
            middle = 4 if self.zero is None else 0  # the middle code is 4 in 3 bits, 8 in 4 bits
            layer.codes = pack(unpack(self.codes, 3, self.in_features) + middle, 4)
        if self.zero is not None:  # unpacked, since unpacking takes a tenth of a product's time
            layer.zero = (
                self.zero if self.grid.real_zero else unpack(self.zero, self.grid.bits, len(self.scale[0]))
            )
        return layer.train(self.training)

    def steps(self) -> Steps:
        """Scales and zero points (O, G) in float32."""
        scale, bits = self.scale.float(), self.grid.bits
        if self.zero is None:
            return Steps(scale, torch.full_like(scale, 2 ** (bits - 1)))
        packed = self.zero.shape != scale.shape  # unpacked in layers from `for_step`
        return Steps(scale, (unpack(self.zero, bits, scale.shape[1]) if packed else self.zero).float())

    def dense(self) -> Tensor:
        # code - zero is exact in bfloat16, and so is its product with the scale but for the final rounding.
        exact = self.dtype == torch.bfloat16 and not self.grid.real_zero
        eager = self.codes.device.type == "cpu" and not torch.compiler.is_compiling()
        if eager and exact and self.grid.bits == 4 and self._has_pairs():
            return self._dense_by_pairs()
        dtype = torch.bfloat16 if exact else torch.float32
        scale, zero = (s.to(dtype)[..., None] for s in self.steps())
        codes = self.grid.grouped(unpack(self.codes, self.grid.bits, self.in_features).to(dtype))
        return codes.sub_(zero).mul_(scale).flatten(1)[:, : self.in_features].to(self.dtype)

    def _dense_by_pairs(self) -> Tensor:
        """The dense bfloat16 matrix (O, I) of 4-bit codes, dequantized `DENSE_ROWS` rows at a time."""
        scale, zero = (s.to(torch.bfloat16)[..., None] for s in self.steps())
        zero = zero + PAIR_OFFSET
        dense = scale.new_empty(*scale.shape[:2], self.in_features // scale.shape[1])
        for i in range(0, self.out_features, DENSE_ROWS):
            rows = slice(i, i + DENSE_ROWS)
            codes = _pairs(self.codes[rows]).view_as(dense[rows])
            torch.mul(codes.sub_(zero[rows]), scale[rows], out=dense[rows])
        return dense.flatten(1)


def _pairs(codes: Tensor) -> Tensor:
    """Bytes of two 4-bit codes (O, N) -> codes + `PAIR_OFFSET` (O, 2 N) in bfloat16.

    The bit pattern of 128 in bfloat16 is 0x4300; adding a code to 128 sets its last four bits to the code.
    """
    words = codes.to(torch.int32)
    return words.mul_(1 + 2**12).bitwise_and_(0x000F000F).bitwise_or_(0x43004300).view(torch.bfloat16)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of `count` packed codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (O, I) below 2**bits -> (O, packed_bytes(I, bits)) uint8."""
    count, size = _unit(bits)
    units = _units(codes.to(torch.int32), count)
    word = (units << _shifts(count, bits, codes.device)).sum(-1, keepdim=True)
    parts = (word >> _shifts(size, 8, codes.device)) & 255
    return parts.to(torch.uint8).flatten(1)[:, : packed_bytes(codes.shape[1], bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: (O, bytes) -> codes (O, count) uint8."""
    codes, size = _unit(bits)
    parts = _units(packed, size).unbind(-1)
    return torch.stack([_code(parts, bits * i, bits) for i in range(codes)], -1).flatten(1)[:, :count]


def _code(parts: Sequence[Tensor], first: int, bits: int) -> Tensor:
    """The code of `bits` bits that starts at bit `first` of a group of bytes."""
    byte, bit = divmod(first, 8)
    code: Tensor = parts[byte] >> bit
    if bit + bits > 8:
        code = code | (parts[byte + 1] << (8 - bit))
    return code.bitwise_and(2**bits - 1)


def _unit(bits: int) -> tuple[int, int]:
    """The smallest number of codes that fills complete bytes, and the number of these bytes."""
    return 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)


def _units(rows: Tensor, width: int) -> Tensor:
    """Rows (O, N) split into pieces (O, pieces, width), padded with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % width)).view(len(rows), -1, width)


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=device)


def _bytes(rows: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(rows, size, dtype=torch.uint8, device=device)
