"""Pruning: SparseGPT as derived directly, Wanda and magnitude, patterns, zeros that stay."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from conftest import change_json, refuses
from dunes import checkpoint, tree
from dunes.augment import CHANGES, apply_change, attach, merge
from dunes.augment.calibrate import Gram, calibrate_blocks
from dunes.augment.gptq import hessian
from dunes.augment.prune import (
    MaskedLinear,
    Pattern,
    Sparsity,
    lowest,
    mask_linears,
    masked_places,
    prune_columns,
    refit,
    smallest,
    wanda_scores,
)
from dunes.train import Trainer, muon
from small_models import random_model
from test_calibrate import IDS

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")


def layer(outputs=24, inputs=32, tokens=400, seed=0):
    """A weight, and the Gram of inputs that depend on each other."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=draw) * torch.linspace(0.2, 2, inputs)
    x = torch.randn(tokens, inputs, generator=draw) @ mix
    gram = Gram.zeros(inputs, torch.device("cpu"))
    gram.add(x)
    return torch.randn(outputs, inputs, generator=draw), gram


def damped(gram, damp=0.01):
    h = 2 / gram.tokens * gram.matrix.double()
    return h + damp * h.diagonal().mean() * torch.eye(len(h), dtype=torch.double)


def exact(weight, h, choose):
    """SparseGPT without its factor: after each column, the rest is solved for and the column leaves the Hessian.

    `choose(j, weight, inverse)` returns the rows whose weight in column j goes.
    """
    weight, inverse = weight.double().clone(), torch.linalg.inv(h)
    for j in range(weight.shape[1]):
        rows = choose(j, weight, inverse)
        # Least squares: the change of the later weights of a row that makes up for weight j, with the earlier ones
        # fixed, minimises d H d with d_j = -w_j.
        later = torch.arange(j + 1, weight.shape[1])
        if len(later):
            solved = torch.linalg.solve(h[later][:, later], h[later, j])
            weight[rows[:, None], later] += weight[rows, j, None] * solved
        weight[rows, j] = 0
        inverse = inverse[1:, 1:] - inverse[1:, :1] @ inverse[:1, 1:] / inverse[0, 0]
    return weight


def scores(weight, h, columns):
    """Each weight's error if it alone is pruned: later weights make up for it, earlier ones are fixed."""
    inverses = {j: torch.linalg.inv(h[j:, j:])[0, 0] for j in columns}
    return torch.stack([weight[:, j].double().square() / inverses[j] for j in columns], 1)


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_sparsegpt_is_the_exact_update_of_each_row_by_least_squares(sparsity):
    weight, gram = layer()
    h = damped(gram)
    all_scores = scores(weight, h, range(32))
    mask = all_scores <= all_scores.flatten().sort().values[int(all_scores.numel() * sparsity)]
    expected = exact(weight, h, lambda j, w, inverse: mask[:, j].nonzero()[:, 0])
    pruned = prune_columns(weight, hessian(gram, 0.01), Sparsity(sparsity))
    assert torch.equal(pruned == 0, mask)
    assert int(mask.sum()) == int(weight.numel() * sparsity) + 1
    assert (pruned - expected).abs().max() < 1e-4
    parts = prune_columns(weight, hessian(gram, 0.01), Sparsity(sparsity), block=8)
    assert [int((part == 0).sum()) for part in parts.split(8, 1)] == 4 * [int(24 * 8 * sparsity) + 1], "by block"
    mask = parts == 0
    expected = exact(weight, h, lambda j, w, inverse: mask[:, j].nonzero()[:, 0])
    assert (parts - expected).abs().max() < 1e-4


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "3:4"])
def test_patterns_are_chosen_on_weights_that_made_up_for_earlier_ones(pattern):
    weight, gram = layer()
    h, shape = damped(gram), Pattern(*map(int, pattern.split(":")))
    chosen = {}

    def choose(j, w, inverse):
        if j % shape.group == 0:
            group = range(j, j + shape.group)
            worst = scores(w, h, group).topk(shape.group - shape.kept, largest=False).indices
            for i in group:
                chosen[i] = (worst == i - j).any(1).nonzero()[:, 0]
        return chosen[j]

    expected = exact(weight, h, choose)
    pruned = prune_columns(weight, hessian(gram, 0.01), Sparsity(0.5, shape))
    assert (pruned - expected).abs().max() < 1e-4
    assert ((pruned != 0).unflatten(1, (-1, shape.group)).sum(2) == shape.kept).all()


def test_equal_weights_do_not_all_go_and_small_ones_have_scores_that_do_not_underflow():
    weight = torch.ones(8, 16)
    assert smallest(weight, 0.25).sum() == 8 * 16 // 4 + 1
    weight[:6] = 0
    assert smallest(weight, 0.25).sum() == 6 * 16, "zeros are no weights to keep"
    weight = torch.arange(1.0, 5).repeat(8, 4)
    assert smallest(weight, 0.5).sum() == 8 * 16 // 2 + 1
    assert smallest(weight, 0.5)[weight == 1].all()
    weight, gram = layer()
    h = hessian(gram, 0.01)
    for pattern in (None, Pattern(2, 4)):
        small = prune_columns(weight * 2.0**-80, h, Sparsity(0.5, pattern))
        assert torch.equal(small, prune_columns(weight, h, Sparsity(0.5, pattern)) * 2.0**-80)


def test_wanda_prunes_the_lowest_scores_of_each_output():
    weight, gram = layer()
    x_norms = gram.matrix.diagonal().sqrt()
    mask = lowest(wanda_scores(weight, gram), int(32 * 0.7), 1)
    assert (mask.sum(1) == 22).all()
    for row, gone in zip(weight, mask, strict=True):
        s = row.abs() * x_norms
        assert s[gone].max() < s[~gone].min()
    model = random_model()
    apply_change(model, "prune", ids=LONG, method="wanda", sparsity=0.7)
    for place in tree.find(model, "blocks.**", tree.linear):
        assert ((place.module.weight == 0).sum(1) == int(0.7 * place.module.in_features)).all()


def test_dead_inputs_and_singular_matrices():
    weight, gram = layer()
    for i in (3, 17):
        gram.matrix[i] = gram.matrix[:, i] = 0
    h = hessian(gram, 0.01)
    assert h.damp == 0.01
    pruned = prune_columns(weight, h, Sparsity(0.5))
    assert pruned.isfinite().all()
    assert not pruned[:, [3, 17]].any()
    assert not prune_columns(weight, h, Sparsity(0.02))[:, [3, 17]].any(), "at any sparsity"
    row = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    flat = Gram(row.T @ row, 100)  # rank one
    h = hessian(flat, 0.0)
    assert h.damp > 0
    assert prune_columns(weight, h, Sparsity(0.5)).isfinite().all()
    refuses("not finite", hessian, Gram(flat.matrix * math.nan, 100), 0.01)


def least_squares(weight, h, zeros):
    """The weight (O, I) in float64 whose outputs are nearest to those of `weight`, with these zeros."""
    weight, h, fitted = weight.double(), h.double(), torch.zeros(weight.shape, dtype=torch.double)
    for row, w, gone in zip(fitted, weight, zeros, strict=True):
        kept = (~gone).nonzero()[:, 0]
        row[kept] = torch.linalg.solve(h[kept][:, kept], h[kept] @ w)
    return fitted


@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_weights_that_stay_are_fitted_to_all_zeros(pattern):
    weight, gram = layer(48, 96, 800)
    gram.matrix[5] = gram.matrix[:, 5] = 0
    h = hessian(gram, 0.01)
    pruned = prune_columns(weight, h, Sparsity.of(None, pattern))
    fitted = refit(pruned, weight, h)
    expected = least_squares(weight, damped(gram), pruned == 0)
    assert torch.equal(fitted == 0, pruned == 0)
    differences = (w - weight for w in (pruned, fitted, expected.float()))
    error = [float((d @ damped(gram).float() * d).sum()) for d in differences]
    print(error)
    assert error[2] <= error[1] < error[2] + 0.02 * (error[0] - error[2])
    assert error[1] < 0.9 * error[0]
    assert (refit(expected.float(), weight, h) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("pattern", [None, "2:4", "1:4"])
def test_zeros_that_a_model_keeps_are_not_revived(pattern):
    weight, gram = layer()
    h, zeros = hessian(gram, 0.01), torch.zeros(24, 32, dtype=torch.bool)
    zeros[:, 4:7], zeros[::2, 20] = True, True
    pruned = prune_columns(weight.masked_fill(zeros, 0), h, Sparsity.of(None, pattern), zeros=zeros)
    assert not pruned[zeros].any()
    assert int((pruned == 0).sum()) == {None: 24 * 16 + 1, "2:4": 24 * 17, "1:4": 24 * 24}[pattern]


def test_a_pruned_model_is_pruned_further_and_its_new_blocks_learn():
    model = random_model()
    apply_change(model, "prune", method="magnitude", sparsity=0.3)
    before = zeros(model)
    apply_change(model, "prune", ids=LONG, pattern="2:4")
    for name, after in zeros(model).items():
        assert after[before[name]].all()
        assert (after.unflatten(1, (-1, 4)).sum(2) >= 2).all()
    apply_change(model, "expand", blocks=1)
    assert len({place.split(".")[1] for place in masked_places(model)}) == 2
    assert len(model.blocks) == 3


FAMILY_FIELDS = [("gpt2", {}), ("llama", {}), ("qwen3", {}), ("arcee", {}), ("mixtral", {"experts": 2})]
LONG = torch.randint(50, (40, 32), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("family", "fields", "method"),
    [*((*pair, "sparsegpt") for pair in FAMILY_FIELDS), ("llama", {}, "wanda"), ("mixtral", {}, "magnitude")],
)
def test_models_of_all_families(family, fields, method):
    model = random_model(family, **fields)
    others = {n: p.clone() for n, p in model.named_parameters() if "router" in n or not n.startswith("blocks")}
    text = {} if method == "magnitude" else {"ids": LONG}
    change = apply_change(model, "prune", method=method, pattern="2:4", **text)
    assert all(torch.equal(model.get_parameter(n), p) for n, p in others.items())
    assert all("router" not in place and place.startswith("blocks.") for place in change.places)
    for place, said in change.places.items():
        linear = model.get_submodule(place)
        assert type(linear) is MaskedLinear
        assert said == {"weights": linear.weight.numel(), "nonzero": int((linear.weight != 0).sum())}
        assert ((linear.weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all()
    assert masked_places(model) == [*change.places]
    assert CHANGES["prune"].describe(change).startswith("50.0% of ")


def test_sparsegpt_leaves_a_model_the_fitted_weights():
    model, place, grams = random_model(), "blocks.0.mlp.up", {}
    weight = model.get_submodule(place).weight.detach().clone()
    next(calibrate_blocks(model, LONG, [place], grams.update))
    apply_change(model, "prune", ids=LONG, where=place)
    h = hessian(grams[place], 0.01)
    expected = refit(prune_columns(weight, h, Sparsity(0.5)), weight, h)
    assert (model.get_submodule(place).weight - expected).abs().max() < 1e-5


def test_experts_with_few_tokens_are_pruned_by_magnitude():
    model = random_model("mixtral", experts=8)
    for block in model.blocks:
        block.mlp.router.weight.data[2] = -100 * block.mlp.router.weight.data[:2].sign().sum(0)
    change = apply_change(model, "prune", ids=LONG[:8])
    few = {name for name, said in change.places.items() if said.get("method") == "magnitude"}
    print(CHANGES["prune"].describe(change))
    assert few
    assert all(".experts." in name for name in few)
    assert all(change.places[n]["tokens"] < model.get_submodule(n).in_features for n in few)
    assert f"{len(few)} layers by magnitude" in CHANGES["prune"].describe(change)
    for name in few:
        weight = model.get_submodule(name).weight
        assert int((weight == 0).sum()) == weight.numel() // 2 + 1


def test_other_layers_are_refused_and_a_head_of_its_own_is_pruned_on_request():
    model = random_model(tied=False)
    apply_change(model, "prune", ids=LONG, where=["blocks.0.**", "head"])
    assert int((model.head.weight == 0).sum()) >= model.head.weight.numel() // 2
    nan = random_model()
    nan.blocks[1].mlp.up.weight.data[0, 0] = math.nan
    refuses(r"blocks\.1\.mlp\.up: has weights that are not finite", apply_change, nan, "prune", ids=LONG)


def zeros(model):
    return {p.name: tree.innermost(p.module).weight == 0 for p in tree.find(model, "blocks.**", tree.linear)}


def loss(model, ids):
    total, count, _ = model(ids[:, :-1], targets=ids[:, 1:])
    return total, count


def train(model, steps=4):
    trainer = Trainer(model, muon(model), loss)
    for step in trainer.run(iter(lambda: LONG[:4], None)):
        if step.number == steps:
            return model
    return None


def test_zeros_stay_while_all_weights_are_trained():
    model, free = random_model(), random_model()
    apply_change(model, "prune", ids=LONG, pattern="2:4")
    before, weights = zeros(model), {n: p.clone() for n, p in model.named_parameters()}
    train(model)
    assert all(torch.equal(mask, before[name]) for name, mask in zeros(model).items())
    assert all(not torch.equal(p, weights[n]) for n, p in model.named_parameters() if p.dim() == 2)
    free.load_state_dict(model.state_dict())
    train(free)
    assert not any(torch.equal(mask, before[name]) for name, mask in zeros(free).items())


def test_adapters_on_a_pruned_model_compute_what_merging_them_gives():
    for options in ({}, {"dora": True}, {"init": "pissa"}, {"rslora": True}):
        model = random_model()
        apply_change(model, "prune", ids=LONG, pattern="2:4")
        before, plain = zeros(model), model(IDS)
        attach(model, rank=4, **options)
        assert (model(IDS) - plain).abs().max() < 1e-5
        tree.freeze(model, ["**", "!**.adapters.**"])
        train(model)
        trained = model(IDS)
        assert (trained - plain).abs().max() > 1e-3
        merge(model)
        assert (model(IDS) - trained).abs().max() < 1e-4, options
        assert all(torch.equal(mask, before[name]) for name, mask in zeros(model).items())
        assert masked_places(model) == [*before]


@torch.no_grad()
def test_a_pruned_model_is_a_plain_folder_whose_zeros_stay(tmp_path):
    model = random_model("llama", tied=True)
    change = apply_change(model, "prune", ids=LONG, pattern="2:4")
    checkpoint.save(model, tmp_path / "pruned", None, 32, {"changes": [change.record()]})
    loaded = checkpoint.load(tmp_path / "pruned")
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(loaded.model(IDS), model(IDS))
    assert masked_places(loaded.model) == [*change.places]
    for masked, message in (
        (["blocks.7.attn.q"], "no such dense linear layer"),
        ("all", "no such dense linear layer"),
        (5, "not iterable"),
    ):
        change_json(tmp_path / "pruned" / "dunes.json", masked=masked)
        refuses(f"dunes.json: 'masked': .*{message}", checkpoint.load, tmp_path / "pruned")


def test_masked_layers_are_the_linear_layers_they_are():
    model = random_model("mixtral", experts=4)
    with torch.no_grad():
        before = model(IDS)
        mask_linears(model, [p.name for p in tree.find(model, "blocks.*.mlp.experts.**", tree.linear)])
        assert torch.equal(model(IDS), before)
    assert all(block.mlp.pack() for block in model.blocks)
    assert not isinstance(checkpoint.hf_config_of(model, 32), str)
    linear = nn.Linear(3, 3)
    mask_linears(nn.ModuleDict({"a": linear}), ["a"])
    refuses("b: this model has no such dense linear layer", mask_linears, nn.ModuleDict({"a": linear}), ["b"])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_inputs_that_are_always_zero_do_not_outweigh_the_others(scale):
    weight, gram = layer()
    gram.matrix[::4], gram.matrix[:, ::4] = 0, 0
    errors = []
    for factor in (1.0, scale):
        h = hessian(Gram(gram.matrix * factor**2, gram.tokens), 0.01)
        change = refit(prune_columns(weight, h, Sparsity.of(0.5, None)), weight, h) - weight
        errors.append(float(((change @ gram.matrix) * change).sum()))
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)


def test_a_fit_is_kept_only_where_the_error_without_damping_falls():
    kept = left = 0
    for seed, largest in itertools.product(range(200), (10, 100)):
        generator = torch.Generator().manual_seed(seed)
        weight, x = torch.randn(1, 16, generator=generator), torch.randn(8, 16, generator=generator)
        x[:, 0] *= largest
        gram = Gram(x.T @ x, len(x))
        h = hessian(gram, 0.01)
        pruned = prune_columns(weight, h, Sparsity.of(0.5, None))
        fitted = refit(pruned, weight, h)
        before, after = (float((((weight - w) @ gram.matrix) * (weight - w)).sum()) for w in (pruned, fitted))
        assert after <= before * (1 + 1e-4)
        left, kept = left + torch.equal(fitted, pruned), kept + (after < 0.99 * before)
    assert left
    assert kept > 350


def test_a_fit_whose_products_underflow_is_no_worse_and_one_whose_overflow_leaves_the_weights():
    weight, gram = layer()
    tiny = hessian(Gram(gram.matrix * 1e-16, gram.tokens), 0.01)
    for scale in (1e-10, 1e-14, 1e-16, 1e-20):
        pruned = prune_columns(weight * scale, tiny, Sparsity.of(0.5, None))
        fitted = refit(pruned, weight * scale, tiny)
        differences = (weight - w.double() / scale for w in (pruned, fitted))
        before, after = (float(((d @ gram.matrix.double()) * d).sum()) for d in differences)
        assert after <= before * (1 + 1e-6)
    huge = hessian(Gram(gram.matrix * 1e30, gram.tokens), 0.01)
    pruned = prune_columns(weight * 1e10, huge, Sparsity.of(None, "2:4"))
    assert torch.equal(refit(pruned, weight * 1e10, huge), pruned)
