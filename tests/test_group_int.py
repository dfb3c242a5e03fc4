"""int4 and int3 by group: packing to the bit, the grid, and layers that save, load, train adapters and export."""

import copy
import struct

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapters import IDS, build, difference
from conftest import equal_states, refuses
from dunes import checkpoint
from dunes.augment import quantize
from dunes.augment.quantization import describe
from dunes.augment.quantized import Grid, GroupInt, pack, packed_bytes, unpack
from dunes.checkpoint import Architecture
from dunes.models import llama
from dunes.ops import int_linear

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")

GRIDS = [
    Grid(4, 32),
    Grid(4, 64, True),
    Grid(4, 128),
    Grid(4, 0),
    Grid(3, 32, True),
    Grid(3, 64),
    Grid(3, 0, True),
]


def noise(*sides, seed=0):
    return torch.randn(sides, generator=torch.Generator().manual_seed(seed))


def filled(weight, grid):
    layer = GroupInt(nn.Linear(weight.shape[1], weight.shape[0]), grid)
    layer.fill(weight)
    return layer


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 16, 51, 64, 129])
@pytest.mark.parametrize("bits", [3, 4])
def test_packed_codes_are_exact_and_take_the_fewest_bytes(bits, count):
    codes = torch.randint(2**bits, (5, count), generator=torch.Generator().manual_seed(count))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, packed_bytes(count, bits)) == (5, (count * bits + 7) // 8)
    assert torch.equal(unpack(packed, bits, count), codes.to(torch.uint8))
    for row, data in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << bits * i for i, code in enumerate(row))
        assert bytes(data) == number.to_bytes(len(data), "little")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("sides", [(5, 51), (8, 64), (3, 129), (6, 256)])
def test_values_are_the_nearest_of_the_grid(grid, sides):
    weight = noise(*sides)
    weight[:, ::7] = 0.0
    layer = filled(weight, grid)
    (scale, zero), width = layer.qparams(), grid.width(sides[1])
    wide = [t.repeat_interleave(width, 1)[:, : sides[1]] for t in (scale, zero)]
    ends = torch.stack([(code - wide[1]) * wide[0] for code in (0, grid.highest)])
    inside = (weight >= ends.amin(0)) & (weight <= ends.amax(0))
    error = (layer.dense() - weight).abs()
    assert (error <= 0.5001 * wide[0].abs())[inside].all(), "Q1"
    outside = torch.stack([(weight - end).abs() for end in ends]).amin(0)
    assert (error - outside).abs()[~inside].le(1e-6).all()
    assert not layer.dense()[weight == 0].any(), "Q1: zero stays zero"
    assert torch.equal(filled(layer.dense(), grid).codes, layer.codes), "Q3"
    assert torch.equal(filled(layer.dense(), grid).dense(), layer.dense())
    if not grid.symmetric:
        assert (error <= 0.62 * wide[0]).all(), "zero points and scales are rounded"
    again = GroupInt(nn.Linear(*reversed(sides)), grid)
    again.fill(layer.dense(), layer.qparams())
    assert torch.equal(again.codes, layer.codes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_layer_multiplies_by_its_dense_form(grid):
    weight, x = noise(12, 96), noise(2, 3, 96, seed=1).requires_grad_()
    layer = filled(weight, grid)
    y = layer(x)
    assert difference(y, F.linear(x, layer.dense(), layer.bias)) <= 1e-5, "Q6"
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert difference(grad, layer.dense().sum(0).expand_as(grad)) <= 1e-5


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("inputs", [128, 96, 51])
def test_a_compiled_step_multiplies_equal_codes(grid, inputs):
    layer, x = filled(noise(12, inputs), grid), noise(1, 3, inputs, seed=1)
    stepped = layer.for_step()
    assert torch.equal(stepped.dense(), layer.dense())
    assert torch.equal(stepped.bias, layer.bias)
    expected = F.linear(x, layer.dense())
    for y, want in ((stepped.code_products(x), expected), (stepped.code_products(x[:, :1]), expected[:, :1])):
        assert (y is not None) == (inputs % grid.width(inputs) == 0 and grid.width(inputs) % 2 == 0)
        assert y is None or difference(y, want) <= 2e-6 * want.abs().max(), "Q6"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_values_in_half_precision_are_rounded_once(grid, dtype):
    layer = filled(noise(6, 128), grid)
    exact = layer.dense()
    layer.dtype = dtype
    assert torch.equal(layer.dense(), exact.to(dtype))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("inputs", [256, 192, 51])
def test_few_rows_in_bfloat16_are_as_exact_by_codes_as_by_the_dense_matrix(grid, inputs, monkeypatch):
    used, packed = [], int_linear.int4_linear
    monkeypatch.setattr(int_linear, "int4_linear", lambda *inputs: used.append(1) or packed(*inputs))
    layer = filled(noise(48, inputs), grid)
    weight = layer.dense().double()
    layer.dtype, layer.bias = torch.bfloat16, nn.Parameter(layer.bias.bfloat16())
    for rows in (1, 16, 17):
        x = noise(rows, inputs, seed=rows).bfloat16()
        expected = x.double() @ weight.T + layer.bias.double()
        with torch.inference_mode():
            y = layer(x)
        assert y.dtype == torch.bfloat16
        assert (y - expected).norm() <= 0.004 * expected.norm()
        fits = inputs % grid.width(inputs) == 0 and grid.width(inputs) in int_linear.WIDTHS and rows <= 16
        assert used == [1] * fits
        used.clear()
    assert not layer(noise(0, inputs).bfloat16()).numel()


@pytest.mark.parametrize("change", ["codes", "scale", "zero", "other codes", "moved"])
def test_a_packed_matrix_is_not_used_after_its_layer_has_changed(change):
    weight, x = noise(32, 128), noise(1, 128, seed=1).bfloat16()
    layer = filled(weight, Grid(4, 64)).bfloat16()
    layer.dtype, layer.bias = torch.bfloat16, None
    with torch.no_grad():
        before = layer(x)
        match change:
            case "codes":
                layer.codes.copy_(layer.codes.flip(0))
            case "scale":
                layer.scale.mul_(2)
            case "zero":
                layer.zero = layer.zero.flip(0)
            case "other codes":
                layer.load_state_dict(filled(-weight, Grid(4, 64)).state_dict() | {"bias": None}, False, True)
            case "moved":
                layer = copy.deepcopy(layer)
                layer.codes.zero_()
        after, expected = layer(x), F.linear(x, layer.dense())
    assert difference(before, expected) > 0.1
    assert difference(after, expected) < 0.02 * expected.abs().max()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_extreme_numbers(grid, dtype):
    for weight in (torch.zeros(3, 70), torch.ones(3, 70), noise(3, 70) * 1e-6, noise(3, 70) * 6e3):
        layer = GroupInt(nn.Linear(70, 3, dtype=dtype), grid)
        layer.fill(weight.to(dtype))
        assert layer.dense().dtype == dtype
        assert ((layer.dense().float() - weight).norm() / weight.norm().clamp(min=1e-30)) < 0.3
    layer.fill(torch.zeros(3, 70))
    assert not layer.dense().any()


def bytes_of(linear, bits, group, zero):
    """Bytes of a linear layer: codes, scales in two bytes, zero points (none, or packed)."""
    rows, inputs = linear.weight.shape
    groups = -(-inputs // (group or inputs))
    zeros = {"none": 0, "packed": -(-groups * bits // 8)}[zero]
    return rows * (-(-inputs * bits // 8) + 2 * groups + zeros)


@pytest.mark.parametrize(
    ("request_", "zero"),
    [
        ({"kind": "int4"}, "packed"),
        ({"kind": "int4", "symmetric": True, "group": 32}, "none"),
        ({"kind": "int3", "group": 0}, "packed"),
    ],
)
def test_a_file_is_loaded_bit_for_bit_and_has_the_predicted_bytes(tmp_path, request_, zero):
    model, config = build(), llama.Config.from_size(50, 32, 2, 32)
    linears = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    dense = sum(p.nbytes for p in model.parameters()) - sum(m.weight.nbytes for m in linears)
    bits, group = int(request_["kind"][3:]), request_.get("group", 64)
    expected = dense + sum(bytes_of(m, bits, group, zero) for m in linears)
    change = quantize(model, **request_)
    assert change.version == 5
    assert describe(change).endswith("to nearest")
    checkpoint.save(model, tmp_path / "m", None, 32, architecture=Architecture("llama", config, (change,)))
    data = (tmp_path / "m" / "model.safetensors").read_bytes()
    assert len(data) - 8 - struct.unpack("<Q", data[:8])[0] == expected, "Q5"
    loaded = checkpoint.load(tmp_path / "m")
    assert equal_states(loaded.model.state_dict(), model.state_dict()), "Q8"
    assert torch.equal(loaded.model(IDS), model(IDS))


def test_changes_of_several_kinds_follow_each_other():
    one, two = build(), build()
    quantize(one, kind="int8", where="blocks.0.**")
    quantize(one, kind="int4")
    quantize(two, kind="int4", override=["blocks.0.**=int8"])
    assert torch.equal(one(IDS), two(IDS))
    refuses(r"blocks\.0\.attn\.q: already quantized", quantize, one, where=["blocks.1.**", "blocks.0.attn.q"])


@pytest.mark.parametrize("kind", ["nf4", "int8", "int4"])
def test_weights_that_are_not_finite_are_refused(kind):
    model = build()
    model.blocks[1].attn.k.weight.data[0, 0] = torch.nan
    refuses(r"blocks\.1\.attn\.k: not all weights are finite", quantize, model, kind=kind)
    assert isinstance(model.blocks[0].attn.q, nn.Linear)
