"""Quantized linear layers (int8 by row, NF4 in blocks of 64, int4 and int3 by group), and quantization grids.

QLoRA https://arxiv.org/abs/2305.14314, LLM.int8 https://arxiv.org/abs/2208.07339
"""

# Shapes: I inputs, O outputs, C columns of a weight, G groups of a row, N blocks, T tokens.

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dunes.ops import int_linear, low_rank
from dunes.ops.int_linear import int8_linear, is_few
from dunes.ops.operation import autocast_dtype, without_autocast

Inputs = Callable[[Tensor], Sequence[Tensor]]
Sums = Callable[..., Tensor]
TINY = 1e-30
"""Minimum for a divisor, since the scale of a group of zeros is zero."""
BLOCK = 64
OUTER = 256
"""Number of blocks whose scales share one second-level scale in double quantization."""
PAIR_OFFSET = 128
"""Offset of the codes that `_pairs` returns: the last four bits of 128 in bfloat16 are zero, free for a code."""
DENSE_ROWS = 128  # fit the CPU's cache


class QuantParams(NamedTuple):
    """Scales and zero points in float32: (O, G) for a weight, (O, 1) for one group of columns."""

    scale: Tensor
    zero: Tensor

    def by_column(self) -> "QuantParams":
        """The same parameters with a last dimension of 1, (O, G, 1), to be used with columns (O, G, C)."""
        return QuantParams(self.scale[..., None], self.zero[..., None])


@dataclass(frozen=True)
class Grid:
    """A quantization grid: scale * (code - zero point), with one scale and zero point per group of a row's inputs.

    `group` is the number of inputs in a group; 0 makes a group of a complete row. The last group of a row may be
    shorter. If `symmetric`, the zero point is the middle code, and the weight of largest magnitude gets code 0.
    The scale is negative if this weight is positive (as in llama.cpp's Q4_0). Without `symmetric`, zero is
    represented exactly. `Int8` uses 8 bits: symmetric, by row, with float32 scales.

    Scales of groups are truncated to bfloat16 before codes are computed; this loses almost no accuracy.
    """

    bits: int
    group: int = 0
    symmetric: bool = False

    @property
    def highest(self) -> int:
        """The highest code: 127 for 8 bits, 2^bits - 1 for fewer."""
        return 127 if self.bits == 8 else 2**self.bits - 1

    def width(self, inputs: int) -> int:
        """The group size for rows of this many inputs."""
        return min(self.group or inputs, inputs)

    def fit(self, columns: Tensor) -> QuantParams:
        """Fit a scale and zero point (..., 1) to each group of columns (..., C); the range includes zero."""
        if self.symmetric:
            return self._fit_symmetric(columns)
        low, high = columns.amin(-1, keepdim=True).clamp(max=0), columns.amax(-1, keepdim=True).clamp(min=0)
        scale = _truncated((high - low) / self.highest)
        return QuantParams(scale, (-low / scale.clamp(min=TINY)).round().clamp(0, self.highest))

    def _fit_symmetric(self, columns: Tensor) -> QuantParams:
        if self.bits == 8:
            scale = columns.abs().amax(-1, keepdim=True) / 127
            return QuantParams(scale, torch.zeros_like(scale))
        middle = 2 ** (self.bits - 1)
        largest = columns.gather(-1, columns.abs().argmax(-1, keepdim=True))
        return QuantParams(_truncated(largest / -middle), torch.full_like(largest, middle))

    def codes(self, columns: Tensor, qparams: QuantParams) -> Tensor:
        """The codes (..., C), as floating-point numbers, of columns (..., C) for the given `qparams` (..., 1)."""
        codes = columns / torch.where(qparams.scale.abs() < TINY, TINY, qparams.scale)
        return (codes.round() + qparams.zero).clamp(-self.highest if self.bits == 8 else 0, self.highest)

    def round(self, columns: Tensor, qparams: QuantParams) -> Tensor:
        """Round columns (..., C) to the grid with the given `qparams` (..., 1)."""
        return (self.codes(columns, qparams) - qparams.zero) * qparams.scale

    def grouped(self, weight: Tensor) -> Tensor:
        """Reshape a weight (O, I) to groups (O, G, C); a shorter last group is padded with zeros."""
        inputs, width = weight.shape[1], self.width(weight.shape[1])
        padded = F.pad(weight, (0, -inputs % width)) if inputs % width else weight
        return padded.reshape(len(weight), -1, width)

    def fit_weight(self, weight: Tensor) -> QuantParams:
        """Fit scales and zero points (O, G) to a weight (O, I)."""
        qparams = self.fit(self.grouped(weight))
        return QuantParams(qparams.scale[..., 0], qparams.zero[..., 0])

    def weight_codes(self, weight: Tensor, qparams: QuantParams) -> Tensor:
        """The codes (O, I), as floating-point numbers, of a weight (O, I) for the given `qparams` (O, G)."""
        return self.codes(self.grouped(weight), qparams.by_column()).flatten(1)[:, : weight.shape[1]]

    def round_weight(self, weight: Tensor, qparams: QuantParams) -> Tensor:
        """Round a weight (O, I) to the grid with the given `qparams` (O, G)."""
        return self.round(self.grouped(weight), qparams.by_column()).flatten(1)[:, : weight.shape[1]]


def _truncated(scale: Tensor) -> Tensor:
    """Round a scale towards zero to bfloat16; return it as float32.

    Rounding towards zero keeps the outermost codes in use, so that quantizing the rounded weights again gives the
    same codes.
    """
    return (scale.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


ROWS = 4
"""Maximum number of input rows that exported graphs multiply by the codes without dequantizing the matrix."""


class Quantized(nn.Module, ABC):
    """A linear layer that dequantizes its weight in each forward, and again in the backward pass.

    Exported graphs multiply up to `ROWS` rows by the codes directly, if the layout of the codes permits.
    """

    makes_dense = True  # `dense` returns a new matrix without gradient
    supports_packing = True
    mutable_buffers = ()  # training changes neither codes nor scales

    def __init__(self, base: nn.Linear, **buffers: tuple[Sequence[int], torch.dtype] | None) -> None:
        """`buffers` maps each buffer's name to (shape, dtype), or to None if this layer lacks the buffer."""
        super().__init__()
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.dtype = base.weight.dtype
        for name, spec in buffers.items():
            empty = None if spec is None else torch.empty(spec[0], dtype=spec[1], device=base.weight.device)
            self.register_buffer(name, empty)

    @abstractmethod
    def fill(self, weight: Tensor, qparams: QuantParams | None = None) -> None:
        """Quantize `weight` (O, I) into the buffers, with the scales and zero points `qparams` (O, G) if given."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            y = self.code_products(x) if x.shape[-2] <= ROWS else None
            if y is None:
                return self.product(x)
            return y if self.bias is None else y + self.bias.float()
        trains_bias = self.bias is not None and self.bias.requires_grad
        if not (torch.is_grad_enabled() and (x.requires_grad or trains_bias)):
            with without_autocast(x):
                return self.product(x.to(autocast_dtype(x)))
        if torch.compiler.is_compiling() or trains_bias:
            return F.linear(x, self.dense().to(autocast_dtype(x)), self.bias)
        return low_rank.frozen(x, self.dense, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """The layer's output, in the dtype of x, for a forward that needs no gradient."""
        return F.linear(x, self.dense().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @abstractmethod
    def dense(self) -> Tensor:
        """The dequantized matrix (O, I) in the original dtype."""

    def code_products(self, x: Tensor) -> Tensor | None:
        """Multiply a few rows x (..., T, I) by the codes, in operations that Inductor fuses into one loop.

        Returns (..., T, O) in float32, without bias, or None if the layout of the codes does not permit this.
        """
        return None

    def for_step(self) -> "Quantized":
        """The layer to export: this layer, or a copy with a layout that suits `code_products` better."""
        return self


def row_sums(x: Tensor, weights: Sequence[Tensor], inputs: Inputs, sums: Sums) -> Tensor:
    """Multiply a few rows x (..., T, I) by a matrix, in a loop that reads the tensors `weights` (O, ...) once.

    Returns (..., T, O). `sums(inputs(row), *parts)` computes the outputs for one row (..., 1, I) and a part of
    each tensor in `weights`. Each iteration reads up to `ROWS` rows of `weights`, to have more reads in flight.
    """
    tokens = [inputs(x[..., i : i + 1, :].float()) for i in range(x.shape[-2])]
    rows = ROWS // min(len(tokens), 2)
    rows = rows if len(weights[0]) % rows == 0 else 1
    parts = [*zip(*(torch.unflatten(w, 0, (rows, -1)) for w in weights), strict=True)]
    return torch.stack([torch.cat([sums(token, *part) for part in parts], -1) for token in tokens], -2)


def nibbles(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Split inputs (..., I) by even and odd index: two tensors (..., groups, pairs in a group)."""
    pairs = torch.unflatten(x, -1, (groups, -1, 2))
    return pairs[..., 0], pairs[..., 1]


def contiguous(*tensors: Tensor) -> Sequence[Tensor]:
    """Copies of the tensors in one contiguous buffer, so that compiled code uses vector loads."""
    return torch.cat([t[None] for t in tensors]).unbind(0)


class Int8(Quantized):
    """Symmetric int8: `codes` (O, I) int8 times `scale` (O, 1) float32 (a row's largest absolute value / 127)."""

    codes: Tensor
    scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(
            base, codes=(base.weight.shape, torch.int8), scale=((base.out_features, 1), torch.float32)
        )

    def fill(self, weight: Tensor, qparams: QuantParams | None = None) -> None:
        weight, grid = weight.float(), Grid(8, symmetric=True)
        qparams = qparams or grid.fit(weight)
        self.scale.copy_(qparams.scale)
        self.codes.copy_(grid.codes(weight, qparams))

    def dense(self) -> Tensor:
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        # In bfloat16, scaling the sums is more exact than rounding the dequantized matrix. In float32, only a few
        # rows are multiplied by codes; more rows use the dense product, as in training. float16 sums may overflow.
        if not (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and is_few(x))):
            return super().product(x)
        y = int8_linear(x, self.codes, self.scale[:, 0])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def code_products(self, x: Tensor) -> Tensor:
        sums: Sums = lambda x, codes: (codes.float() * x[0]).sum(-1)
        return row_sums(x, [self.codes], lambda token: [token], sums) * self.scale[:, 0]


class NF4(Quantized):
    """NF4 (QLoRA): a weight is one of 16 levels (normal quantiles) times its block's largest absolute value.

    With `double`, the scales (N,) minus their mean `middle` are quantized to int8; `outer` has one second-level
    scale for each 256 scales.
    """

    codes: Tensor
    scale: Tensor
    outer: Tensor | None
    middle: Tensor | None

    def __init__(self, base: nn.Linear, double: bool = False) -> None:
        size = base.weight.numel()
        blocks = -(-size // BLOCK)
        super().__init__(
            base,
            codes=((-(-size // 2),), torch.uint8),
            scale=((blocks,), torch.int8 if double else torch.float32),
            outer=((-(-blocks // OUTER), 1), torch.float32) if double else None,
            middle=((), torch.float32) if double else None,
        )
        self.double_quantized = double

    def fill(self, weight: Tensor, qparams: QuantParams | None = None) -> None:
        assert qparams is None, "its levels are fixed"
        codes, scale = encode(weight)
        if len(codes) % 2:
            codes = F.pad(codes, (0, 1), value=7)  # the code of zero
        self.codes.copy_(codes[0::2] << 4 | codes[1::2])
        if self.outer is None or self.middle is None:
            self.scale.copy_(scale)
            return
        # A float32 mean would depend on the number of threads.
        self.middle.copy_(scale.double().mean())
        rows = _rows(scale - self.middle, OUTER)
        self.outer.copy_(rows.abs().amax(1, keepdim=True) / 127)
        self.scale.copy_((rows / self.outer.clamp(min=1e-30)).round().flatten()[: len(scale)])

    def scales(self) -> Tensor:
        """The scale (N,) of each block: its largest absolute value, rounded in double quantization."""
        if self.outer is None or self.middle is None:
            return self.scale
        rows = _rows(self.scale.float(), OUTER) * self.outer
        return rows.flatten()[: len(self.scale)] + self.middle

    def dense(self) -> Tensor:
        size = self.out_features * self.in_features
        weight = _rows(self._levels()[:size], BLOCK) * self.scales()[:, None]
        return weight.flatten()[:size].view(self.out_features, self.in_features).to(self.dtype)

    def _levels(self) -> Tensor:
        """The level of each code (I * O,), and one more level of padding if I * O is odd."""
        levels = codebook(self.codes.device)
        if torch.compiler.is_compiling():
            return levels[torch.stack([self.codes >> 4, self.codes & 15], 1).flatten().int()]
        # Looking up two levels at once, as one number of 8 bytes, takes a third of the time of two look-ups.
        pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int64)[:, 0]
        return pairs.index_select(0, self.codes.int()).view(torch.float32)

    def code_products(self, x: Tensor) -> Tensor | None:
        groups, rest = divmod(self.in_features, BLOCK)
        if rest:
            return None

        def sums(x: Sequence[Tensor], codes: Tensor, scale: Tensor) -> Tensor:
            codes = torch.unflatten(codes, 1, (groups, -1)).int()
            return ((_level(codes >> 4) * x[0] + _level(codes & 15) * x[1]) * scale[..., None]).sum((-1, -2))

        inputs: Inputs = lambda token: contiguous(*nibbles(token, groups))
        weights = (t.view(self.out_features, -1) for t in (self.codes, self.scales()))
        return row_sums(x, [*weights], inputs, sums)


LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The levels of NF4 as in bitsandbytes: quantiles of the normal distribution, 7 negative, zero, and 8 positive."""


def _level(codes: Tensor) -> Tensor:
    """The level of each code, selected bit by bit, since Inductor vectorizes `where` but not table look-ups."""
    levels: Sequence[Any] = LEVELS
    for bit in (1, 2, 4, 8):
        is_set = (codes & bit) != 0
        levels = [torch.where(is_set, b, a) for a, b in zip(levels[::2], levels[1::2], strict=True)]
    (level,) = levels
    return torch.as_tensor(level)


def codebook(device: torch.device | str = "cpu") -> Tensor:
    """NF4's levels (16,) float32. The tensor is not cached: made under a fake tensor mode, it would lack data."""
    if torch.compiler.is_exporting():  # native code cannot read an exported graph's constants
        return torch.cat([torch.full((1,), level, device=device) for level in LEVELS])
    return torch.tensor(LEVELS, device=device)


INVERSE = 1.0000000649e38
"""Maximum for the reciprocal of a scale, since bitsandbytes uses scales of at least 1e-38."""


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight to NF4: codes (I * O,) uint8 and scales (N,) float32, equal to bitsandbytes' bit for bit.

    As in bitsandbytes, complete blocks are multiplied by the reciprocal of the scale, and an incomplete last block
    is divided by the scale. Multiplying and dividing give different codes for values halfway between two levels.
    """
    rows = _rows(weight.float().flatten(), BLOCK)
    scale = rows.abs().amax(1)
    normalised = rows * (1 / scale).clamp(max=INVERSE)[:, None]
    if weight.numel() % BLOCK:
        scale[-1].clamp_(min=1e-38)
        normalised[-1] = rows[-1] / scale[-1]
    levels = codebook(weight.device)
    codes = torch.bucketize(normalised, (levels[1:] + levels[:-1]) / 2)
    return codes.flatten()[: weight.numel()].to(torch.uint8), scale


def _rows(flat: Tensor, length: int) -> Tensor:
    return F.pad(flat, (0, -len(flat) % length)).view(-1, length)


class _Cached(NamedTuple):
    """A packed matrix, and the state of its source tensors when it was packed."""

    matrix: int_linear.PackedInt4
    state: list[tuple[int, int]]
    """(`id(t)`, `t._version`) of each source tensor `t`; a different state means that the matrix is outdated."""
    parts: list[Tensor]
    """The source tensors except the codes. They stay in memory, so that no new tensor gets the same `id`."""


PACKED: MutableMapping[Tensor, _Cached] = WeakTensorKeyDictionary()
"""Cache of matrices in the layout of the kernel `int4_linear`. The keys are weak references to tensors of codes,
so an entry is freed together with its codes. The cache is neither copied nor saved with a model."""


class GroupInt(Quantized):
    """int4 or int3 by group, bit-packed: the weight is scale * (code - zero) on a `Grid`.

    One byte contains two 4-bit codes; three bytes contain eight 3-bit codes. Each row is packed separately, lowest
    bit first (with 4 bits, the bytes equal compressed-tensors' `pack-quantized`).

    `codes` is (O, bytes of a row) uint8, and `scale` is (O, G) bfloat16. `zero` is packed like `codes`, or is None
    if all zero points are the middle code. Layers from `for_step` have unpacked zero points.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, base: nn.Linear, grid: Grid) -> None:
        rows, inputs = base.out_features, base.in_features
        groups = -(-inputs // grid.width(inputs))
        super().__init__(
            base,
            codes=((rows, packed_bytes(inputs, grid.bits)), torch.uint8),
            scale=((rows, groups), torch.bfloat16),
            zero=None if grid.symmetric else ((rows, packed_bytes(groups, grid.bits)), torch.uint8),
        )
        self.grid = grid

    def fill(self, weight: Tensor, qparams: QuantParams | None = None) -> None:
        weight = weight.float()
        qparams = qparams or self.grid.fit_weight(weight)
        self.codes.copy_(pack(self.grid.weight_codes(weight, qparams), self.grid.bits))
        self.scale.copy_(qparams.scale)
        if self.zero is not None:
            self.zero.copy_(pack(qparams.zero, self.grid.bits))

    def product(self, x: Tensor) -> Tensor:
        if self.codes.is_inference() or not int_linear.fits_int4(
            x, self.out_features, self.grid.width(self.in_features)
        ):
            return super().product(x)
        y = int_linear.int4_linear(x, self._packed())
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _packed(self) -> int_linear.PackedInt4:
        """The matrix in the layout of the kernel `int4_linear`, cached as long as the codes exist.

        The codes stay in memory, too; the packed matrix adds 4 bits per weight.
        """
        parts = [t for t in (self.codes, self.scale, self.zero) if t is not None]
        state = [(id(t), t._version) for t in parts]
        entry = PACKED.get(self.codes)
        if entry is None or entry.state != state:
            bits, (scale, zero) = self.grid.bits, self.qparams()
            middle = int_linear.MIDDLE - 2 ** (bits - 1)  # rounding errors are least near the middle
            codes = unpack(self.codes, bits, self.in_features) + middle
            entry = _Cached(int_linear.pack_int4(codes, scale, zero + middle), state, parts[1:])
            PACKED[self.codes] = entry
        return entry.matrix

    def _has_pairs(self) -> bool:
        """True if all groups have the same number of codes, and this number is even."""
        width = self.grid.width(self.in_features)
        return width % 2 == 0 and self.in_features % width == 0

    def code_products(self, x: Tensor) -> Tensor | None:
        if self.grid.bits != 4 or not self._has_pairs():
            return None
        scale, zero = self.qparams()
        groups = scale.shape[1]

        def inputs(token: Tensor) -> Sequence[Tensor]:
            even, odd = nibbles(token, groups)
            return [*contiguous(odd / 16, even - odd / 16), (even + odd).sum(-1)]

        def sums(x: Sequence[Tensor], codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            # A byte is even code + 16 * odd code, so the odd code needs no shift.
            codes = torch.unflatten(codes, 1, (groups, -1))
            products = codes.float() * x[0] + (codes & 15).float() * x[1]
            return (products * scale[..., None]).sum((-1, -2)) - (scale * zero * x[2]).sum(-1)

        return row_sums(x, (self.codes, scale, zero), inputs, sums)

    def for_step(self) -> Quantized:
        if not self._has_pairs() or (self.grid.bits == 4 and self.zero is None):
            return self
        with torch.device(self.codes.device):
            layer = GroupInt(nn.Linear(self.in_features, self.out_features, False), replace(self.grid, bits=4))
        layer.bias, layer.dtype, layer.scale, layer.codes = self.bias, self.dtype, self.scale, self.codes
        if self.grid.bits == 3:
            middle = 4 if self.zero is None else 0  # moves the middle code from 4 (3 bits) to 8 (4 bits)
            layer.codes = pack(unpack(self.codes, 3, self.in_features) + middle, 4)
        if self.zero is not None:  # unpacking in each forward would take a tenth of a product's time
            layer.zero = unpack(self.zero, self.grid.bits, len(self.scale[0]))
        return layer.train(self.training)

    def qparams(self) -> QuantParams:
        """The scales and zero points (O, G), unpacked, in float32."""
        scale, bits = self.scale.float(), self.grid.bits
        if self.zero is None:
            return QuantParams(scale, torch.full_like(scale, 2 ** (bits - 1)))
        packed = self.zero.shape != scale.shape  # `for_step` unpacks the zero points
        return QuantParams(scale, (unpack(self.zero, bits, scale.shape[1]) if packed else self.zero).float())

    def dense(self) -> Tensor:
        # In bfloat16, code - zero is exact, and its product with the scale is rounded only once.
        exact = self.dtype == torch.bfloat16
        eager = self.codes.device.type == "cpu" and not torch.compiler.is_compiling()
        if eager and exact and self.grid.bits == 4 and self._has_pairs():
            return self._dense_by_pairs()
        dtype = torch.bfloat16 if exact else torch.float32
        scale, zero = (s.to(dtype)[..., None] for s in self.qparams())
        codes = self.grid.grouped(unpack(self.codes, self.grid.bits, self.in_features).to(dtype))
        return codes.sub_(zero).mul_(scale).flatten(1)[:, : self.in_features].to(self.dtype)

    def _dense_by_pairs(self) -> Tensor:
        """The dense bfloat16 matrix (O, I) of 4-bit codes, dequantized `DENSE_ROWS` rows at a time."""
        scale, zero = (s.to(torch.bfloat16)[..., None] for s in self.qparams())
        zero = zero + PAIR_OFFSET
        dense = scale.new_empty(*scale.shape[:2], self.in_features // scale.shape[1])
        for i in range(0, self.out_features, DENSE_ROWS):
            rows = slice(i, i + DENSE_ROWS)
            codes = _pairs(self.codes[rows]).view_as(dense[rows])
            torch.mul(codes.sub_(zero[rows]), scale[rows], out=dense[rows])
        return dense.flatten(1)


def _pairs(codes: Tensor) -> Tensor:
    """Unpack bytes (O, N) of two 4-bit codes each: returns codes + `PAIR_OFFSET` (O, 2 N) in bfloat16.

    The bit pattern of 128 in bfloat16 is 0x4300; adding a code to 128 sets its last four bits to the code.
    """
    words = codes.to(torch.int32)
    return words.mul_(1 + 2**12).bitwise_and_(0x000F000F).bitwise_or_(0x43004300).view(torch.bfloat16)


def packed_bytes(count: int, bits: int) -> int:
    """The number of bytes of a row of `count` packed codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (O, I) below 2**bits into bytes (O, packed_bytes(I, bits)) uint8."""
    numbers = codes.to("cpu", torch.uint8).numpy()[..., None]
    planes = np.unpackbits(numbers, axis=-1, count=bits, bitorder="little").reshape(len(codes), -1)
    return torch.from_numpy(np.packbits(planes, axis=-1, bitorder="little")).to(codes.device)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: bytes (O, N) -> codes (O, count) uint8."""
    size = bits // math.gcd(bits, 8)  # the smallest number of bytes that codes fill completely
    padded = F.pad(packed, (0, -packed.shape[1] % size))
    parts = padded.view(len(packed), -1, size).unbind(-1)
    return torch.stack([_code(parts, first, bits) for first in range(0, 8 * size, bits)], -1).flatten(1)[:, :count]


def _code(parts: Sequence[Tensor], first: int, bits: int) -> Tensor:
    """The code of `bits` bits that starts at bit `first` of a group of bytes; `parts` has one tensor per byte."""
    byte, bit = divmod(first, 8)
    code: Tensor = parts[byte] >> bit
    if bit + bits > 8:
        code = code | (parts[byte + 1] << (8 - bit))
    return code.bitwise_and(2**bits - 1)
