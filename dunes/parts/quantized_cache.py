"""A KV cache in 8, 4 or 2 bits: keys quantized per channel, values per token, the last tokens in full precision.

Some channels of keys are large in all tokens (KIVI, https://arxiv.org/abs/2402.02750). So keys are quantized per
channel, over a group of tokens. Values have no such channels and are quantized per token. A group of G tokens is
stored as codes as soon as it is complete. A query reads the codes if the entire group is older than the last
`residual` tokens (the query's own token included); otherwise the query reads the group in full precision. So the
keys and values that a query reads depend only on the query's position. Neither other rows nor the split of a text
into forwards changes these keys and values.

A ring buffer of a few groups stores tokens in full precision for longer than queries read them, so that a short
rollback is exact.
"""

# Shapes: B batch, T new tokens, S readable slots, K key/value heads, N groups, G tokens in a group, D head dim,
# W tokens in the ring, P words of codes.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.parts.cache import Cache, ring_positions

BITS = 8, 4, 2
SLACK = 16
"""Number of tokens that `truncate` can always drop exactly; speculative decoding proposes at most SLACK ids."""
LARGEST = 65504.0
"""Largest float16 number. Keys and values are clipped to [-LARGEST, LARGEST], since scales and minima are
float16."""
SMALLEST = 2.0**-24


@dataclass(frozen=True)
class CacheFormat:
    """The settings of a quantized cache. Raises ValueError for an unsupported number of bits.

    A quantization grid has 2 ** bits values: minimum + code * scale, with minimum and scale in float16. In keys,
    each channel has one grid per `group` consecutive tokens. In values, each token has one grid per `group`
    channels (for each head of a token if `group` does not divide head_dim). The last `residual` tokens are read in
    full precision.
    """

    bits: int
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"a cache of {self.bits} bits; expected {', '.join(map(str, BITS))}")

    @property
    def ring(self) -> int:
        """Number W of tokens in the ring: `residual - 1 + SLACK`, rounded up to full groups, plus one group."""
        return self.group * (1 + -(-max(0, self.residual - 1 + SLACK) // self.group))

    def layer_bytes(self, capacity: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Bytes of one row in one layer; unquantized keys and values have `itemsize` bytes per element.

        Tokens in full precision take 2 * K * (W + 1) * D * itemsize bytes. Each of the ceil(capacity / G) + 1
        groups of each head takes 2 * 8 * ceil(G * D * bits / 64) bytes for codes, and 4 bytes for each grid: D
        grids for keys and D for values (G for values if G does not divide D).
        """
        groups = -(-capacity // self.group) + 1
        codes = 2 * 8 * _words(self.group * head_dim, self.bits)
        grids = 4 * (head_dim + self.group * self.parts(head_dim))
        return kv_heads * (groups * (codes + grids) + 2 * (self.ring + 1) * head_dim * itemsize)

    def parts(self, head_dim: int) -> int:
        """Number of parts into which the channels of a token are divided; each part has its own grid."""
        return 1 if head_dim % self.group else head_dim // self.group


def quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 values with one grid along `dim`: returns codes, scales and minima.

    Codes are uint8 with the shape of x. Scales and minima are float16, with size 1 in `dim`. The minimum is
    rounded down and the scale up, so that the grid covers all values. `code * scale + minimum` is off by at most
    half the scale. Values beyond the range of float16 are clipped first.
    """
    x, levels = x.clamp(-LARGEST, LARGEST), 2**bits - 1
    zero = _round_outwards(x.amin(dim, True), -torch.inf)
    scale = _round_outwards((x.amax(dim, True) - zero.float()) / levels, torch.inf)
    codes = ((x - zero.float()) / scale.float().clamp(min=SMALLEST)).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale, zero


def _round_outwards(x: Tensor, towards: float) -> Tensor:
    """Round x to float16, in the direction `towards` (-inf or inf)."""
    y = x.half()
    inside = y.float() > x if towards < 0 else y.float() < x
    return torch.where(inside, torch.nextafter(y, torch.full_like(y, towards)), y)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n) into 8-byte words (..., P). Byte i contains codes i, 8 P + i, 16 P + i, ..."""
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
    """Number of 8-byte words that `count` codes need."""
    return -(-count * bits // 64)


@dataclass(frozen=True)
class _Writes:
    """The cache slots, equal in all layers, in which a forward stores its new tokens (B, T)."""

    ring: Tensor
    """Slot (B, T) of each token in the ring; W for a token that the ring does not store."""
    groups: Tensor
    """Group indices (B, n) to write; groups still incomplete get the index of an unused extra slot."""
    index: Tensor
    """Offset (B, T) of each token in the concatenated groups to write; n * G for a token outside these groups."""
    open_slots: Tensor
    """Ring slots (B, G) of the first group to write, whose first tokens an earlier forward may have stored."""


class QuantizedCache(Cache):
    """A quantized KV cache for `capacity` positions in each of `batch` rows.

    `keys` and `values` contain each layer's ring of full-precision tokens (B, K, W + 1, D). `codes` (B, K, N + 1,
    P), `scales` and `minima` contain two tensors per layer, for keys and for values. Incomplete groups are written
    to group N, which is never read. Layers may have windows, but tokens outside all windows still stay in the
    cache.
    """

    row_state = ("length", "first_whole")
    growing = ("codes", "scales", "minima")
    stored = ("keys", "values", *growing)

    def __init__(
        self, batch: int, capacity: int, device: torch.device | str = "cpu", format: CacheFormat = CacheFormat(4)
    ) -> None:
        super().__init__(batch, capacity, device)
        self.format = format
        # First position, a multiple of G, from which the ring has all tokens in full precision.
        self.first_whole = torch.zeros_like(self.length)
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.minima: list[Tensor] = []
        self._new_positions = torch.zeros(0)
        self._writes: _Writes | None = None

    @property
    def in_order(self) -> bool:
        """Always False, since keys from codes come before full-precision keys."""
        return False

    @property
    def _readable_groups(self) -> int:
        return self.max_length // self.format.group

    def _plan(self, positions: Tensor) -> None:
        self._new_positions = positions = positions.expand(self.batch, -1)
        size, ring = self.format.group, self.format.ring
        real, open_group = positions >= 0, self.length // size
        # Each slot is written once, since the order of several writes to a slot is undefined on a GPU.
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
        """Upper bound of the groups that a forward completes per row; exact if all rows are equally long."""
        size = self.format.group
        if self._in_order:
            return self.max_length // size - (self.max_length - new) // size
        return (size - 1 + new) // size

    def _ring_start(self, last: Tensor) -> Tensor:
        """First position (B,) stored in the ring, a multiple of G; `last` (B,) is each row's newest position."""
        return last // self.format.group * self.format.group + self.format.group - self.format.ring

    @property
    def _slot_count(self) -> int:
        return -(-self.capacity // self.format.group)

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, T, D); return all readable keys and values (B, K, S, D).

        The order of keys and values is: dequantized groups, tokens in the ring, new tokens.
        """
        if layer == len(self.keys):
            for rings, x in ((self.keys, k), (self.values, v)):
                rings.append(self._allocate(x, self.format.ring))
                self._allocate_groups(x)
        i = 2 * layer
        return self._put(i, self.keys[layer], k), self._put(i + 1, self.values[layer], v)

    def _allocate_groups(self, x: Tensor) -> None:
        format, dim, is_keys = self.format, x.shape[3], len(self.codes) % 2 == 0
        shape = self.batch, x.shape[1], self._slot_count + 1
        grid = (1, dim) if is_keys else (format.group, format.parts(dim), 1)
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
        """Quantize and store groups x (B, K, n, G, D) of keys or values at the group indices (B, n)."""
        dim, bits = -1 if i % 2 else -2, self.format.bits
        codes, scale, minimum = quantize(self._divide(i, x.float()), dim, bits)
        rows = torch.arange(len(numbers), device=numbers.device)[:, None]
        packed = pack(codes.reshape(*x.shape[:3], -1), bits), scale, minimum
        for tensors, values in zip((self.codes, self.scales, self.minima), packed, strict=True):
            tensors[i].transpose(1, 2)[rows, numbers] = values.transpose(1, 2)

    def _read_groups(self, i: int, n: int, out: Tensor) -> None:
        """Dequantize the first n groups of keys or values into `out` (B, K, n * G, D)."""
        size, dim = self.format.group, out.shape[3]
        x = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        groups = x.view(*x.shape[:2], n, size, dim)
        groups.copy_(unpack(self.codes[i][:, :, :n], self.format.bits, size * dim).view(groups.shape))
        scale, minimum = self.scales[i][:, :, :n].float(), self.minima[i][:, :, :n].float()
        self._divide(i, groups).mul_(scale).add_(minimum)
        if x is not out:
            out.copy_(x)

    def _divide(self, i: int, x: Tensor) -> Tensor:
        """x reshaped so that a grid covers one dimension: -2 for keys (even i), -1 for values (odd i)."""
        return torch.unflatten(x, -1, (self.format.parts(x.shape[-1]), -1)) if i % 2 else x

    def _complete_groups(self, ring: Tensor, x: Tensor, writes: _Writes) -> Tensor:
        """The tokens (B, K, n, G, D) of the groups to write, taken from the ring and the new tokens."""
        (b, heads, _, dim), (count, size) = x.shape, (writes.groups.shape[1], self.format.group)
        work = x.new_zeros(b, heads, count * size + 1, dim)
        work[:, :, :size] = ring.gather(2, writes.open_slots[:, None, :, None].expand(b, heads, size, dim))
        work.scatter_(2, writes.index[:, None, :, None].expand_as(x), x)
        return work[:, :, :-1].view(b, heads, count, size, dim)

    def slot_positions(self, last: Tensor) -> Tensor:
        """The position (B, S) of each key that `put` returns, -1 for an empty slot."""
        codes = torch.arange(self._readable_groups * self.format.group, device=last.device)
        ring = ring_positions(self.length - 1, self.format.ring, self.format.ring)
        parts = [codes.expand(self.batch, -1), ring, self._new_positions]
        return torch.cat(parts[::2] if self._empty else parts, 1)

    def visible(self, key: Tensor, query: Tensor) -> Tensor:
        """Attention mask (B, T, S), from the positions of keys (B, 1, S) and queries (B, T, 1)."""
        size = self.format.group
        codes = torch.arange(key.shape[2], device=key.device) < self._readable_groups * size
        is_old = query >= (key // size + 1) * size + self.format.residual - 1
        # After a long rollback, some of the last tokens exist only as codes.
        codes_only = key < self.first_whole[:, None, None]
        return super().visible(key, query) & ((is_old | codes_only) == codes)

    def advance(self, n: Tensor) -> None:
        """End the forward: add the numbers of new tokens `n` (B or 1,) to the rows' lengths."""
        super().advance(n)
        self.first_whole = torch.maximum(self.first_whole, self._ring_start(self.length - 1))

    def truncate(self, n: Tensor) -> Tensor:
        """Keep only the first `n` (B,) tokens of each row, or up to G - 1 fewer. Returns the number of tokens (B,)
        that remain.

        Dropping up to SLACK tokens is exact. After dropping more, some of the last tokens may exist only as codes;
        queries then read the codes, with an error of at most half the scale. If the cut falls inside a group that
        exists only as codes, the group is dropped, and the caller must evaluate the group's tokens again. So no
        token is quantized twice.
        """
        n = torch.minimum(self.length, n.to(self.length))
        whole_groups = n // self.format.group * self.format.group
        remaining = super().truncate(torch.where(n < self.first_whole, whole_groups, n))
        self.first_whole = torch.minimum(self.first_whole, remaining)
        return remaining
