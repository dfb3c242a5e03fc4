"""GPTQ: against a plain derivation, on what it promises, and where it has too little to go by."""

import json

import pytest
import torch
from torch import nn

from dunes import tree
from dunes.augment import Change, apply_change
from dunes.augment.calibrate import Gram, calibrate_blocks
from dunes.augment.gptq import hessian_of, round_columns
from dunes.augment.quantization import describe
from dunes.augment.quantized import NF4, Grid, Int8
from small_models import assert_takes_numbers, random_model

IDS = torch.randint(50, (24, 32), generator=torch.Generator().manual_seed(1))
GRIDS = [Grid(8, symmetric=True), Grid(4, 32), Grid(4, 0), Grid(3, 64), Grid(3, 40, True), Grid(3, 150)]


def noise(*sides, seed=0):
    return torch.randn(sides, generator=torch.Generator().manual_seed(seed))


def inputs(count=160, tokens=600):
    """Correlated inputs (tokens, count), of which some are much larger than others."""
    mixed = noise(tokens, count, seed=1) @ noise(count, count, seed=2) / count**0.5
    return (mixed + noise(tokens, 1, seed=3)) * noise(count, seed=4).exp()


def model_of(family="llama", **fields):
    """A small model whose hidden states have a few large components."""
    model, draw = random_model(family, **fields), torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if "norm.weight" in name:
            p.data *= torch.randn(p.shape, generator=draw).exp()
    return model


def gram_of(x):
    gram = Gram.zeros(x.shape[1], x.device)
    gram.add(x)
    return gram


def best_rest(weight, rounded, gram, j):
    """The later columns that minimise the error of the outputs, given that the columns up to j are rounded."""
    done, rest = slice(0, j + 1), slice(j + 1, None)
    error = weight[:, done] - rounded[:, done]
    return weight[:, rest] + error @ gram[done, rest] @ torch.linalg.inv(gram[rest, rest])


def plain_gptq(weight, gram, grid, static, zeros=None):
    """GPTQ by a least-squares problem for each column, in float64."""
    weight, gram = weight.double(), gram.double().clone()
    gram.diagonal().add_(0.01 * gram.diagonal().mean())
    order = gram.diagonal().argsort(descending=True) if static else torch.arange(len(gram))
    original, weight, gram = weight, weight[:, order], gram[order][:, order]
    current, rounded = weight.clone(), torch.zeros_like(weight)
    width = grid.width(weight.shape[1])
    for j in range(weight.shape[1]):
        first = int(order[j]) // width * width
        if static:
            steps = grid.fit(original[:, first : first + width])
        elif j == first:
            steps = grid.fit(current[:, j : j + width])
        rounded[:, j] = grid.round(current[:, j : j + 1], steps)[:, 0]
        if zeros is not None:
            rounded[zeros[:, order[j]], j] = 0
        current[:, j] = rounded[:, j]
        current[:, j + 1 :] = best_rest(weight, rounded, gram, j)
    return rounded[:, order.argsort()]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_solves_the_least_squares_of_each_column(grid, act_order):
    x, weight = inputs(), noise(24, 160)
    rounded, steps = round_columns(weight, *hessian_of(gram_of(x), act_order), grid)
    expected = plain_gptq(weight, x.T @ x, grid, act_order)
    same = (rounded - expected).abs() <= 1e-5 * expected.abs().max()
    print(f"{grid}: {(~same).sum()} of {same.numel()} numbers differ")
    assert same.all(), "Q7"
    assert torch.equal(grid.round_weight(rounded, steps), rounded), "on the grid"
    plain = grid.round_weight(weight, grid.fit_weight(weight))
    errors = [((w - weight) @ x.T).norm() / (weight @ x.T).norm() for w in (rounded, plain)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("grid", [Grid(4, 16), Grid(3, 0, True), Grid(8, symmetric=True)], ids=str)
def test_gptq_of_a_pruned_layer_is_the_least_squares_of_the_columns_around_its_zeros(grid, pattern):
    model, place, grams = model_of(), "blocks.0.mlp.down", {}
    apply_change(model, "prune", method="sparsegpt", pattern=pattern, where=place, ids=IDS)
    weight = model.get_submodule(place).weight.detach().clone()
    next(calibrate_blocks(model, IDS, [place], grams.update))
    zeros = weight == 0
    expected = plain_gptq(weight, grams[place].matrix, grid, True, zeros)
    kind = {"kind": f"int{grid.bits}"} | ({} if grid.bits == 8 else {"group": grid.group})
    quantized(model, method="gptq", where=place, **kind, symmetric=grid.bits == 3)
    actual = model.get_submodule(place).dense()
    assert zeros.float().mean() >= 0.5
    assert not actual[zeros].any()
    assert ((actual - expected).abs() <= 1e-5 * expected.abs().max()).all()


def test_overrides_give_places_other_kinds_or_leave_them_dense():
    model = model_of(tied=False)
    override = ["blocks.1.**=int3", "**.v=nf4", "blocks.1.attn.v=dense", "head=int8"]
    change = quantized(model, kind="int8", method="gptq", group=16, override=override)
    names = {name: type(tree.innermost(model.get_submodule(name))) for name in change.places}
    assert type(model.blocks[1].attn.v) is nn.Linear
    assert "blocks.1.attn.v" not in names
    assert names["blocks.0.attn.v"] is NF4
    assert names["blocks.0.attn.q"] is names["head"] is Int8
    assert model.blocks[1].mlp.up.grid == Grid(3, 16)
    assert describe(change) == "int8 in groups of 16, by GPTQ; nf4 at 1 place; int3 at 6 places"
    read = Change.of(json.loads(json.dumps(change.record())))
    assert_takes_numbers(model_of(tied=False), read, model, IDS)


def test_gptq_of_dead_inputs_and_of_too_few_tokens():
    x, weight, grid = inputs(tokens=40), noise(8, 160), Grid(4, 32)
    x[:, 5], x[:, 64:96] = 0.0, 0.0
    rounded, _ = round_columns(weight, *hessian_of(gram_of(x), False), grid)
    assert rounded.isfinite().all()
    plain = grid.round_weight(weight, grid.fit_weight(weight))
    assert torch.equal(rounded[:, 64:96], plain[:, 64:96]), "inputs without text are rounded to nearest"
    assert ((rounded - weight) @ x.T).norm() < 0.3 * ((plain - weight) @ x.T).norm()
    zeros, _ = round_columns(weight, *hessian_of(gram_of(0 * x), False), grid)
    assert torch.equal(zeros, plain)
    copies = x[:, :1].expand(-1, 160) * 1e4
    assert round_columns(weight, *hessian_of(gram_of(copies), True), grid)[0].isfinite().all()
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.up: the inputs .* not finite"):
        hessian_of(gram_of(torch.full((4, 4), torch.nan)), False, "blocks.0.mlp.up")


FAMILY_FIELDS = [
    *(("gpt2", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {"kv_heads": 1, "heads": 2})),
    *(("qwen3", {}), ("arcee", {}), ("mixtral", {"experts": 4})),
]


def quantized(model, **request):
    ids = IDS if request.get("method") == "gptq" else None
    return apply_change(model, "quantize", **request, **({} if ids is None else {"ids": ids}))


def moved(family, fields, **request):
    model = model_of(family, **fields)
    expected = model(IDS)
    quantized(model, **request)
    return ((model(IDS) - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fields"), FAMILY_FIELDS)
def test_models_of_all_families_move_least_by_gptq(family, fields):
    """Logits on the calibration text; on other text and trained models see the slow tests."""
    by = {m: moved(family, fields, kind="int3", group=32, method=m) for m in ("rtn", "gptq")}
    print(family, {method: f"{distance:.4f}" for method, distance in by.items()})
    assert by["gptq"] < 0.9 * by["rtn"]
    assert moved(family, fields, kind="int8", method="gptq") < 0.1


def test_experts_with_few_tokens_are_rounded_to_nearest_and_recorded():
    model, few = model_of("mixtral", experts=4), model_of("mixtral", experts=4)
    change = apply_change(model, "quantize", kind="int3", method="gptq", ids=IDS)
    assert not any("method" in settings for settings in change.places.values())
    bias = few.blocks[0].mlp.router
    bias.weight.data[3] = 0.0
    bias.weight.data[3, 0] = -1e3
    states = []
    hook = bias.register_forward_pre_hook(lambda m, x: states.append(x[0].detach()))
    few(IDS)
    hook.remove()
    assert states
    change = apply_change(few, "quantize", kind="int3", method="gptq", ids=IDS[:4])
    short = {name for name, settings in change.places.items() if settings.get("method") == "rtn"}
    assert short
    assert all(".experts." in name for name in short)
