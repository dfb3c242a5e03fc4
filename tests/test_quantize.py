"""Few bits: bitsandbytes' codes, what is lost, and shapes without numbers."""

import logging
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapters import difference
from dunes.augment.quantized import NF4, Int8, encode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    if sys.platform == "linux":
        import bitsandbytes.functional as theirs
    else:
        theirs = pytest.importorskip("bitsandbytes.functional")


def noise(*sides, seed=0):
    return torch.randn(sides, generator=torch.Generator().manual_seed(seed))


def borders():
    """For each place between two levels a block with it, the numbers next to it, and their negatives."""
    levels = theirs.get_4bit_type("nf4", "cpu")
    middle = ((levels[1:] + levels[:-1]) / 2)[:, None]
    near = torch.cat([middle, *(middle.nextafter(torch.full((), end)) for end in (-2.0, 2.0))], 1)
    return torch.cat([torch.ones(15, 1), near, -near, torch.zeros(15, 57)], 1)


BLOCKS = {
    "noise": noise(2048, 64),
    "bfloat16": noise(2048, 64).bfloat16(),
    "float16": noise(2048, 64).half(),
    "zeros": torch.zeros(200),
    "borders": borders(),
    "borders, smaller": borders() * 1e-3,
    "borders, a third larger": borders() * 1.3,
    **{f"a last block of borders, {i}": row[:50] * 1.3 for i, row in enumerate(borders())},
    "odd": noise(1001),
    "one number": noise(1),
    "zeros in a last block": F.pad(noise(64), (0, 9)),
    "subnormal": noise(1024, 64) * 1e-42,
    "at the edge of subnormal": torch.linspace(-1.3e-38, 1.3e-38, 20_001),
    "subnormal, odd": noise(77) * 1e-40,
    "small": noise(1024, 64) * 1e-36,
    "large": noise(64, 64) * 1e37,
}


@pytest.mark.parametrize("case", BLOCKS)
def test_codes_and_scales_are_bitsandbytes_to_the_bit(case):
    weight = BLOCKS[case]
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = packed.flatten()
    codes, scale = encode(weight)
    wrong = codes != torch.stack([packed >> 4, packed & 15], 1).flatten()[: weight.numel()]
    print(f"{case}: {wrong.sum()} of {weight.numel()} codes differ, {(scale != state.absmax).sum()} scales")
    assert not wrong.any(), "L6"
    assert torch.equal(scale, state.absmax)
    ours = NF4(nn.Linear(weight.numel(), 1, dtype=weight.dtype))
    ours.fill(weight.view(1, -1))
    assert torch.equal(ours.codes, packed)
    if len(codes) % 2 == 0:  # theirs compiles something for odd sizes
        assert torch.equal(ours.dense().flatten(), theirs.dequantize_4bit(packed[:, None], state).flatten())


def test_scales_in_a_byte_lose_less_than_bitsandbytes_do():
    """Theirs are the steps of a floating point number (fine near the mean), ours are equal steps."""
    weight = noise(512, 512) * 0.02 * noise(512, 1, seed=1).mul(0.3).exp()
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    there = theirs.dequantize_4bit(packed, state)
    ours = NF4(nn.Linear(512, 512), double=True)
    ours.fill(weight)
    exact = encode(weight)[1]
    scales = theirs.dequantize_blockwise(state.absmax, state.state2) + state.offset
    lost = [((s - exact).norm() / exact.norm()).item() for s in (ours.scales(), scales)]
    whole = [((w - weight).norm() / weight.norm()).item() for w in (ours.dense(), there)]
    apart = ((ours.dense() - there).norm() / weight.norm()).item()
    bits = sum(b.numel() * b.element_size() * 8 for b in ours.buffers()) / weight.numel()
    print(f"scales off by {lost[0]:.4f}, theirs {lost[1]:.4f}; weights {whole[0]:.4f}, theirs {whole[1]:.4f}, ")
    print(f"apart {apart:.4f}; {bits:.4f} bits a number")
    assert torch.equal(ours.codes, packed.flatten())
    assert lost[0] < lost[1] < 0.01
    assert whole[0] < whole[1] < 0.1
    assert apart < 0.01
    assert bits == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("make", [Int8, NF4, lambda base: NF4(base, double=True)])
@pytest.mark.parametrize("sides", [(8, 64), (5, 51)])
def test_zeros_stay_zeros_where_small_numbers_are_flushed(make, sides):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    small = make(nn.Linear(sides[1], sides[0]))
    small.fill(torch.zeros(sides))
    assert torch.equal(small.dense(), torch.zeros(sides))
    small.fill(noise(*sides) * 1e-42)
    assert small.dense().isfinite().all()


@pytest.mark.parametrize("sides", [(5, 51), (8, 64), (300, 64)])
@pytest.mark.parametrize("make", [Int8, NF4, lambda base: NF4(base, double=True)])
def test_quantized_maps_are_near_idempotent_and_counted(make, sides):
    linear = nn.Linear(sides[1], sides[0])
    nn.init.normal_(linear.weight)
    small = make(linear)
    small.fill(linear.weight.detach())
    x = torch.randn(3, sides[1])
    assert difference(small(x), F.linear(x, small.dense(), linear.bias)) == 0
    lost = (small.dense() - linear.weight).norm() / linear.weight.norm()
    assert lost < (0.01 if isinstance(small, Int8) else 0.12)
    bits = sum(b.numel() * b.element_size() * 8 for b in small.buffers()) / linear.weight.numel()
    if sides == (300, 64):
        of_codes = 4.127 if getattr(small, "double_quantized", False) else 4.5
        assert bits == pytest.approx(8 + 32 / 64 if isinstance(small, Int8) else of_codes, abs=0.01)
    again = make(linear)
    again.fill(small.dense().detach())
    if not getattr(small, "twice", False):
        assert torch.equal(again.codes, small.codes)
    zero = make(linear)
    zero.fill(torch.zeros(sides))
    assert not zero.dense().any()


@pytest.mark.parametrize("inputs", [128, 100])
def test_a_row_in_int8_is_the_same_alone_and_among_many(inputs):
    """As greedy text with and without proposals is, whose rows are read one by one or several at once."""
    torch.manual_seed(0)
    linear, x = nn.Linear(inputs, 64).bfloat16(), torch.randn(40, inputs).bfloat16()
    layer = Int8(linear)
    layer.fill(linear.weight.detach())
    with torch.no_grad():
        many = layer(x)
        for rows in (1, 4, 5):
            assert (layer(x[:rows]) - many[:rows]).norm() <= 5e-4 * many[:rows].norm()
        dense = F.linear(x.double(), layer.codes.double() * layer.scale.double(), linear.bias.double())
    assert (many - dense).norm() <= 3e-3 * dense.norm()
