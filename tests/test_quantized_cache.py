"""The cache in few bits: what each query reads, however a text is cut, batched and rolled back."""

import itertools

import numpy as np
import pytest
import torch

from dunes.generate import PrefixCache, generate, look_up
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.parts import Cache, CacheFormat, QuantizedCache, cache_for
from dunes.parts.quantized_cache import SLACK, pack, quantize, unpack

HEADS, LENGTH = 2, 70
FORMATS = [
    CacheFormat(8, group=8, residual=8),
    CacheFormat(4, group=8, residual=3),
    CacheFormat(2, group=4, residual=17),
    CacheFormat(2, group=3, residual=0),
    CacheFormat(4, group=8, residual=5, keys="token", values="channel"),
]


def random(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.linspace(0.1, 9, shape[-1]) + 1).to(dtype)


def on_grid(x, bits, axis):
    """The values (n,) along one axis of a float32 array, rounded to a grid that was derived anew."""
    low, levels = x.min(axis, keepdims=True), np.float32(2**bits - 1)
    zero = low.astype(np.float16)
    zero = np.where(zero > low, np.nextafter(zero, np.float16(-np.inf)), zero).astype(np.float32)
    step = ((x.max(axis, keepdims=True) - zero) / levels).astype(np.float32)
    half = step.astype(np.float16)
    half = np.where(half < step, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32)
    return np.clip(np.rint((x - zero) / half), 0, levels) * half + zero


def rounded(x, axis, format):
    """A group (K, G, D) as it is read from its codes."""
    if axis == "channel":
        return on_grid(x, format.bits, 1)
    channels = x.shape[2] if x.shape[2] % format.group else format.group
    return on_grid(x.reshape(*x.shape[:2], -1, channels), format.bits, 3).reshape(x.shape)


def expected(x, p, axis, format, lost=0):
    """What the query at position p reads of tokens x (K, L, D): groups beyond the last tokens are rounded."""
    x, g = x[:, : p + 1].numpy().copy(), format.group
    for start in range(0, p + 1, g):
        if start + g <= max(p + 1 - format.residual, lost):
            x[:, start : start + g] = rounded(x[:, start : start + g], axis, format)
    return torch.from_numpy(x)


def put(cache, k, v, real=None):
    """Feed tokens (B, K, T, D); for each row and query that is real: its position, and what it reads in order."""
    positions = cache.start(k.shape[2] if real is None else real)
    readable = cache.put(0, k, v, positions)
    key = cache.slot_positions(positions.amax(1)).expand(cache.batch, -1)
    mask = cache.visible(key[:, None], positions[:, :, None]).expand(cache.batch, -1, -1)
    positions = positions.expand(cache.batch, -1)
    reads = {}
    for row, t in (positions >= 0).nonzero().tolist():
        slots = mask[row, t].nonzero()[:, 0]
        slots = slots[key[row, slots].argsort()]
        p = int(positions[row, t])
        assert key[row, slots].tolist() == list(range(p + 1)), "each token once"
        reads[row, p] = [x[row][:, slots] for x in readable]
    cache.advance((positions >= 0).sum(1))
    return reads


def check(reads, k, v, format, lost=0):
    for (row, p), read in reads.items():
        for x, got, axis in ((k, read[0], format.keys), (v, read[1], format.values)):
            assert torch.equal(got, expected(x[row], p, axis, format, lost)), (row, p, axis)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("cuts", [[LENGTH], [1] * LENGTH, [7, 1, 30, 2, 30], [LENGTH - 1, 1]], ids=len)
def test_what_is_read_depends_on_the_position_alone(format, cuts):
    k, v = random(2, HEADS, LENGTH, 8), random(2, HEADS, LENGTH, 5, seed=1)
    cache = QuantizedCache(2, LENGTH, format=format)
    for a, b in itertools.pairwise([0, *itertools.accumulate(cuts)]):
        check(put(cache, k[:, :, a:b], v[:, :, a:b]), k, v, format)
    whole = QuantizedCache(2, LENGTH, format=format)
    put(whole, k, v)
    complete = LENGTH // format.group
    for own, other in zip(cache.groups[0], whole.groups[0], strict=True):
        for stored, want in zip(own._tensors(), other._tensors(), strict=True):
            assert torch.equal(stored[:, :, :complete], want[:, :, :complete])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_reads_the_same_in_a_ragged_batch(format):
    k, v, generator = random(3, HEADS, LENGTH, 8), random(3, HEADS, LENGTH, 5, seed=1), torch.Generator()
    generator.manual_seed(2)
    cache, held = QuantizedCache(3, 20, format=format), [0, 0, 0]
    cache.grow(LENGTH)
    for width in (25, 1, 9, 1, 1, 1, 14, 2, 1, 1, 9):
        new = [min(n, LENGTH - h) for n, h in zip([width, int(torch.randint(width + 1, (), generator=generator)), width // 2], held)]
        real = torch.arange(width) >= width - torch.tensor(new)[:, None]
        parts = [torch.full((3, HEADS, width, x.shape[3]), torch.nan) for x in (k, v)]
        for x, part in zip((k, v), parts, strict=True):
            for row, n in enumerate(new):
                part[row, :, width - n :] = x[row, :, held[row] : held[row] + n]
        check(put(cache, *parts, real), k, v, format)
        held = [h + n for h, n in zip(held, new, strict=True)]
    assert held[0] == 65 and min(held) > 24
