"""A KV cache in 8, 4 or 2 bits: keys quantized per channel, values per token, the last tokens in full precision.

KIVI (https://arxiv.org/abs/2402.02750): some channels of keys are large in all tokens, so they are quantized per
channel over a group of tokens; values have no such channels. A group of G tokens is stored as codes when it is
complete. A query reads these codes once the entire group is older than the last R tokens (including the query's
own); until then it reads the group in full precision. So the values a query reads follow from its position alone,
not from how a text was split into forwards, nor from other rows.

Full-precision tokens are kept longer than they are read, in a ring of a few groups, so that a short
rollback is exact.
"""

# Shapes: B batch, T new tokens, S readable slots, K key/value heads, N groups, G tokens in a group, D head dim,
# W tokens in the ring, P words of codes.

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.parts.cache import Cache, ring_positions

Axis = Literal["channel", "token"]
BITS = 8, 4, 2
SLACK = 16
"""Tokens that `truncate` can always drop without loss; speculation proposes as many."""
LARGEST = 65504.0
"""Maximum of float16, the dtype of scales and minima; larger values are clipped."""
SMALLEST = 2.0**-24


@dataclass(frozen=True)
class CacheFormat:
    """Quantization of a cache. Raises ValueError for unsupported settings.

    Each quantization grid has 2 ** bits values from a minimum on, a scale apart; both are float16. Keys have one
    grid per channel and `group` tokens; values have one per token and `group` channels, or per head if `group`
    does not divide head_dim. The last `residual` tokens are read in full precision. `keys` and `values` are for
    comparisons.
    """

    bits: int
    group: int = 32
    residual: int = 32
    keys: Axis = "channel"
    values: Axis = "token"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"a cache of {self.bits} bits; expected {', '.join(map(str, BITS))}")
        if self.group < 1 or self.residual < 0:
            raise ValueError(
                f"a cache with groups of {self.group} and the last {self.residual} tokens whole; "
                "expected at least 1 and 0"
            )

    @property
    def ring(self) -> int:
        """Tokens W in full precision: the residual tokens and SLACK more, rounded up to groups."""
        return self.group * (1 + -(-max(0, self.residual - 1 + SLACK) // self.group))

    def layer_bytes(self, capacity: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Bytes of one row in one layer, for keys and values of `itemsize` bytes per element.

        2 * K * (W + 1) * D * itemsize for tokens in full precision, and for each of ceil(capacity / G) + 1 groups
        and head 2 * 8 * ceil(G * D * bits / 64) for codes, and 4 for each grid: D grids for keys; D for values, or
        G if G does not divide D.
        """
        groups = -(-capacity // self.group) + 1
        codes = 2 * 8 * _words(self.group * head_dim, self.bits)
        grids = sum(4 * self.grids(axis, head_dim) for axis in (self.keys, self.values))
        return kv_heads * (groups * (codes + grids) + 2 * (self.ring + 1) * head_dim * itemsize)

    def grids(self, axis: Axis, head_dim: int) -> int:
        """Number of grids of a group of tokens in one head."""
        return head_dim if axis == "channel" else self.group * self.parts(head_dim)

    def parts(self, head_dim: int) -> int:
        """Number of parts, each with a grid, into which the channels of a token are divided."""
        return 1 if head_dim % self.group else head_dim // self.group


def quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, like x), scales and minima (float16, 1 in `dim`) of float32 values with one grid along `dim`.

    The ends of a grid are rounded outwards, so that it covers its values: code * scale + minimum is off by at most
    half the scale. Values beyond the range of float16 are clipped first.
    """
    x, levels = x.clamp(-LARGEST, LARGEST), 2**bits - 1
    zero = _round_outwards(x.amin(dim, True), -torch.inf)
    scale = _round_outwards((x.amax(dim, True) - zero.float()) / levels, torch.inf)
    codes = ((x - zero.float()) / scale.float().clamp(min=SMALLEST)).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale, zero


def _round_outwards(x: Tensor, towards: float) -> Tensor:
    """Round to float16, towards -inf or inf."""
    y = x.half()
    inside = y.float() > x if towards < 0 else y.float() < x
    return torch.where(inside, torch.nextafter(y, torch.full_like(y, towards)), y)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n) into words of 8 bytes (..., P): byte i has codes i, 8 P + i, 16 P + i, ..."""
    count = 8 * _words(codes.shape[-1], bits) * (8 // bits)
    codes = F.pad(codes, (0, count - codes.shape[-1])).view(torch.int64)
    parts = torch.unflatten(codes, -1, (8 // bits, -1)).unbind(-2)
    return torch.stack([part << bits * i for i, part in enumerate(parts)]).sum(0)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: codes (..., count) from words (..., P)."""
    # Shifting words is several times as fast as shifting bytes; bits that cross into another byte are masked.
    mask = int.from_bytes(bytes([2**bits - 1]) * 8, "little", signed=True)
    parts = [packed] if bits == 8 else [(packed >> i) & mask for i in range(0, 8, bits)]
    return torch.cat(parts, -1).view(torch.uint8)[..., :count]


def _words(count: int, bits: int) -> int:
    """Number of 8-byte words for `count` codes."""
    return -(-count * bits // 64)


@dataclass(frozen=True)
class _Writes:
    """Destinations of the new tokens (B, T) of a forward, the same in all layers."""

    ring: Tensor
    """Slots (B, T) in the ring; W for tokens that are not kept in it."""
    groups: Tensor
    """Numbers (B, n) of the groups that may become complete; the extra last group stands for incomplete ones."""
    index: Tensor
    """Offsets (B, T) in these groups; n * G for none."""
    open_slots: Tensor
    """Slots (B, G) of the ring that contain the start of the first of these groups."""


class QuantizedCache(Cache):
    """A quantized cache of `capacity` positions in each row, in the given format.

    `keys` and `values` are each layer's rings of full-precision tokens (B, K, W + 1, D). `codes` (B, K, N + 1, P),
    `scales` and `minima` are the groups of keys and of values, in turn; the last one stands for incomplete groups.
    It serves layers with and without windows; tokens out of all windows are kept.
    """

    row_state = ("length", "first_whole")
    growing = ("codes", "scales", "minima")
    stored = ("keys", "values", *growing)

    def __init__(
        self, batch: int, capacity: int, device: torch.device | str = "cpu", format: CacheFormat = CacheFormat(4)
    ) -> None:
        super().__init__(batch, capacity, device)
        self.format = format
        # Tokens from this position on, a multiple of G, are in full precision in the ring.
        self.first_whole = torch.zeros_like(self.length)
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.minima: list[Tensor] = []
        self._new_positions = torch.zeros(0)
        self._writes: _Writes | None = None

    @property
    def in_order(self) -> bool:
        """Always False: codes stand beside full-precision tokens, so keys are never in order."""
        return False

    @property
    def _readable_groups(self) -> int:
        return self.max_length // self.format.group

    def _plan(self, positions: Tensor) -> None:
        self._new_positions = positions = positions.expand(self.batch, -1)
        size, ring = self.format.group, self.format.ring
        real, open_group = positions >= 0, self.length // size
        # Each slot is written once: a GPU does not define which of several values stays.
        in_ring = real & (positions >= self._ring_start(positions.amax(1))[:, None])
        count = self._completed_count(positions.shape[1])
        numbers = torch.arange(max(size, count), device=real.device)
        groups = open_group[:, None] + numbers[:count]
        complete = (groups + 1) * size <= (self.length + real.sum(1))[:, None]
        index = positions - open_group[:, None] * size
        self._writes = _Writes(
            torch.where(in_ring, positions % ring, ring),
            torch.where(complete, groups, self._slot_count),
            torch.where(real & (index < count * size), index, count * size),
            (open_group[:, None] * size + numbers[:size]) % ring,
        )

    def _completed_count(self, new: int) -> int:
        """Maximum number of groups that become complete in a row; exact if all rows are equal."""
        size = self.format.group
        if self._in_order:
            return self.max_length // size - (self.max_length - new) // size
        return (size - 1 + new) // size

    def _ring_start(self, last: Tensor) -> Tensor:
        """First position (B,) in the ring, a multiple of G, if the last one is `last` (B,)."""
        return last // self.format.group * self.format.group + self.format.group - self.format.ring

    @property
    def _slot_count(self) -> int:
        return -(-self.capacity // self.format.group)

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D); return all readable ones (B, K, S, D): codes, ring, new tokens."""
        if layer == len(self.keys):
            for rings, x, axis in ((self.keys, k, self.format.keys), (self.values, v, self.format.values)):
                rings.append(self._allocate(x, self.format.ring))
                self._allocate_groups(x, axis)
        i = 2 * layer
        return self._put(i, self.keys[layer], k), self._put(i + 1, self.values[layer], v)

    def _allocate_groups(self, x: Tensor, axis: Axis) -> None:
        format, dim = self.format, x.shape[3]
        shape = self.batch, x.shape[1], self._slot_count + 1
        grid = (1, dim) if axis == "channel" else (format.group, format.parts(dim), 1)
        self.codes.append(x.new_zeros(*shape, _words(format.group * dim, format.bits), dtype=torch.int64))
        self.scales.append(x.new_zeros(*shape, *grid, dtype=torch.float16))
        self.minima.append(torch.zeros_like(self.scales[-1]))

    def _put(self, i: int, ring: Tensor, x: Tensor) -> Tensor:
        writes = self._writes
        assert writes is not None, "start comes first"
        if writes.groups.shape[1]:
            self._write_groups(i, writes.groups, self._complete_groups(ring, x, writes))
        count = self._readable_groups * self.format.group
        parts = [x] if self._empty else [ring[:, :, :-1], x]
        slots = count + sum(x.shape[2] for x in parts)
        readable = x.new_empty(*x.shape[:2], slots, x.shape[3])
        self._read_groups(i, self._readable_groups, readable[:, :, :count])
        torch.cat(parts, 2, out=readable[:, :, count:])
        ring.scatter_(2, writes.ring[:, None, :, None].expand_as(x), x)
        return readable

    def _write_groups(self, i: int, numbers: Tensor, x: Tensor) -> None:
        """Store groups x (B, K, n, G, D) of keys or values under these numbers (B, n)."""
        dim, bits = -2 if self._by_channel(i) else -1, self.format.bits
        codes, scale, minimum = quantize(self._divide(i, x.float()), dim, bits)
        rows = torch.arange(len(numbers), device=numbers.device)[:, None]
        packed = pack(codes.reshape(*x.shape[:3], -1), bits), scale, minimum
        for tensors, values in zip((self.codes, self.scales, self.minima), packed, strict=True):
            tensors[i].transpose(1, 2)[rows, numbers] = values.transpose(1, 2)

    def _read_groups(self, i: int, n: int, out: Tensor) -> None:
        """Write the tokens of the first n groups of keys or values into `out` (B, K, n * G, D)."""
        size, dim = self.format.group, out.shape[3]
        x = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        groups = x.view(*x.shape[:2], n, size, dim)
        groups.copy_(unpack(self.codes[i][:, :, :n], self.format.bits, size * dim).view(groups.shape))
        scale, minimum = self.scales[i][:, :, :n].float(), self.minima[i][:, :, :n].float()
        self._divide(i, groups).mul_(scale).add_(minimum)
        if x is not out:
            out.copy_(x)

    def _by_channel(self, i: int) -> bool:
        return (self.format.keys, self.format.values)[i % 2] == "channel"

    def _divide(self, i: int, x: Tensor) -> Tensor:
        """Groups with one grid in the last dimension, or in the last but one."""
        return x if self._by_channel(i) else torch.unflatten(x, -1, (self.format.parts(x.shape[-1]), -1))

    def _complete_groups(self, ring: Tensor, x: Tensor, writes: _Writes) -> Tensor:
        """Tokens (B, K, n, G, D) of the groups to write, from the ring and the new tokens."""
        (b, heads, _, dim), (count, size) = x.shape, (writes.groups.shape[1], self.format.group)
        work = x.new_zeros(b, heads, count * size + 1, dim)
        work[:, :, :size] = ring.gather(2, writes.open_slots[:, None, :, None].expand(b, heads, size, dim))
        work.scatter_(2, writes.index[:, None, :, None].expand_as(x), x)
        return work[:, :, :-1].view(b, heads, count, size, dim)

    def slot_positions(self, last: Tensor) -> Tensor:
        """The position (B, S) in each readable slot: of codes, of the ring, and of new tokens; -1 if empty."""
        codes = torch.arange(self._readable_groups * self.format.group, device=last.device)
        ring = ring_positions(self.length - 1, self.format.ring, self.format.ring)
        parts = [codes.expand(self.batch, -1), ring, self._new_positions]
        return torch.cat(parts[::2] if self._empty else parts, 1)

    def visible(self, key: Tensor, query: Tensor) -> Tensor:
        """Attention mask (B, T, S): True if a query at (B, T, 1) may attend to a slot's key, at (B, 1, S)."""
        size = self.format.group
        codes = torch.arange(key.shape[2], device=key.device) < self._readable_groups * size
        is_old = query >= (key // size + 1) * size + self.format.residual - 1
        # After a long rollback, some of the last tokens exist only as codes.
        codes_only = key < self.first_whole[:, None, None]
        return super().visible(key, query) & ((is_old | codes_only) == codes)

    def advance(self, n: Tensor) -> None:
        """End the forward: each row grows by `n` (B or 1,) tokens."""
        super().advance(n)
        self.first_whole = torch.maximum(self.first_whole, self._ring_start(self.length - 1))

    def truncate(self, n: Tensor) -> Tensor:
        """Drop all but the first `n` (B,) tokens of each row; returns the remaining number (B,), at most G - 1
        fewer.

        Dropping up to SLACK tokens is exact. After more, some residual tokens may exist only as codes, which are
        then read, with an error of at most half the scale. A group of codes that is cut in two is dropped, and the
        caller evaluates it again, so that nothing is quantized twice.
        """
        n = torch.minimum(self.length, n.to(self.length))
        remaining = super().truncate(
            torch.where(n < self.first_whole, n // self.format.group * self.format.group, n)
        )
        self.first_whole = torch.minimum(self.first_whole, remaining)
        return remaining
