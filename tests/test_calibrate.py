"""Calibration: what linear layers read, as hooks on the whole model see it; blocks are fed by changed ones."""

import gc
import weakref

import pytest
import torch
from torch import nn

from conftest import raising, refuses
from dunes import tree
from dunes.augment import attach, quantize
from dunes.augment.calibrate import calibrate_blocks, require_text
from small_models import random_model

IDS = torch.randint(50, (5, 24), generator=torch.Generator().manual_seed(1))


def linears(model, where="blocks.**"):
    return {p.name: p.module for p in tree.find(model, where, tree.linear)}


def direct(model, names, ids=IDS):
    """The Grams by hooks on the whole model, in float64, one sequence at a time."""
    sums = {}

    def count(name):
        def hook(module, inputs, output):
            x = inputs[0].detach().flatten(0, -2).double()
            matrix, tokens = sums.get(name, (0, 0))
            sums[name] = (matrix + x.T @ x, tokens + len(x))

        return hook

    hooks = [module.register_forward_hook(count(name)) for name, module in names.items()]
    with tree.mode(model, False):
        for row in ids:
            model(row[None])  # with gradients, experts are grouped only from FEW tokens on: none here
    for hook in hooks:
        hook.remove()
    return sums


def calibrate(*arguments, **options):
    for _ in calibrate_blocks(*arguments, **options):
        pass


def collected(model, names=None, **options):
    grams = {}
    calibrate(model, IDS, names or linears(model), grams.update, **options)
    return grams


def distance(a, b):
    return float((a.double() - b).norm() / b.norm())


FAMILY_FIELDS = [
    *(("gpt2", {}), ("llama", {"attention_bias": True}), ("mistral", {"window": 5}), ("qwen2", {}), ("qwen3", {})),
    *(("arcee", {}), ("mixtral", {"experts": 4, "window": 5}), ("qwen3_moe", {"experts": 4})),
]


@pytest.mark.parametrize(
    ("family", "fields", "sequential"),
    [*((*pair, False) for pair in FAMILY_FIELDS), ("llama", {}, True), ("mixtral", {"experts": 4}, True)],
)
def test_grams_are_those_of_the_whole_model(family, fields, sequential, monkeypatch):
    monkeypatch.setattr("dunes.augment.calibrate.TOKENS", 50)  # two sequences at once, then one
    monkeypatch.setattr("dunes.parts.moe.forms.fits", lambda *_: False)
    model = random_model(family, **fields)
    expected = direct(model, linears(model))
    monkeypatch.undo()
    monkeypatch.setattr("dunes.augment.calibrate.TOKENS", 50)
    grams = collected(model, sequential=sequential)
    assert grams.keys() == linears(model).keys()
    for name, (matrix, tokens) in expected.items():
        assert grams[name].tokens == tokens, name
        assert distance(grams[name].matrix, matrix) < 1e-5, name
    unused = grams.keys() - expected.keys()
    assert all(grams[name].tokens == 0 and not grams[name].matrix.any() for name in unused)
    if not unused:
        assert sum(g.tokens for n, g in grams.items() if "experts" in n) % IDS.numel() == 0


def test_a_layer_that_is_called_twice_is_counted_twice(monkeypatch):
    monkeypatch.setattr("dunes.augment.calibrate.TOKENS", 50)
    model = random_model()
    attn, norm = model.blocks[0].attn, model.blocks[0].mlp_norm
    attn.out.register_forward_hook(lambda m, x, y: y + attn.v(norm(y)))
    names = {"blocks.0.attn.v": attn.v}
    expected = direct(model, names)["blocks.0.attn.v"]
    grams = collected(model, names)
    assert grams["blocks.0.attn.v"].tokens == expected[1] == 2 * IDS.numel()
    assert distance(grams["blocks.0.attn.v"].matrix, expected[0]) < 1e-5


@pytest.mark.parametrize("sequential", [False, True])
def test_later_layers_read_what_changed_ones_write(sequential):
    model = random_model("mixtral", experts=2, top_k=2)
    calls = []

    def halve(grams):
        if not sequential or len(calls) % 4 < 2:
            expected.append(direct(model, {name: places[name] for name in grams}))
        for name in grams:
            places[name].weight.data.mul_(0.5)
        calls.append(grams)

    places = {name: m for name, m in linears(model).items() if "router" not in name}
    expected: list = []
    calibrate(model, IDS, places, halve, sequential=sequential)
    stages = [{name.split(".", 2)[2] for name in grams} for grams in calls]
    if sequential:
        experts = lambda *names: {f"mlp.experts.{e}.{name}" for e in (0, 1) for name in names}
        assert stages == 2 * [{"attn.q", "attn.k", "attn.v"}, {"attn.out"}, experts("gate", "up"), experts("down")]
    else:
        assert stages == 2 * [{n.split(".", 2)[2] for n in places if n.startswith("blocks.0.")}]
    checked = [grams for i, grams in enumerate(calls) if not sequential or i % 4 < 2]
    for grams, sums in zip(checked, expected, strict=True):
        assert all(distance(gram.matrix, sums[name][0]) < 1e-5 for name, gram in grams.items())


def test_the_head_reads_what_the_norm_writes():
    model = random_model("llama", tied=False)
    (sums, _), grams = direct(model, {"head": model.head})["head"], collected(model, ["head"])
    assert distance(grams["head"].matrix, sums) < 1e-5


def test_the_model_stays_in_its_mode_and_nothing_is_held():
    model = random_model("mixtral", experts=4).train()
    model.blocks[1].eval()
    before = {name: m.training for name, m in model.named_modules()}
    held = []
    calibrate(model, IDS, linears(model), lambda grams: held.extend(map(weakref.ref, grams.values())))
    assert {name: m.training for name, m in model.named_modules()} == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    gc.collect()
    assert held
    assert not any(ref() for ref in held)
    with pytest.raises(RuntimeError, match="no"):
        calibrate(model, IDS, linears(model), fail)
    assert {name: m.training for name, m in model.named_modules()} == before
    assert not any(m._forward_pre_hooks for m in model.modules())


fail = raising(RuntimeError("no"))


def test_bfloat16_models_have_float32_grams():
    model = random_model().bfloat16()
    grams = collected(model)
    sums = direct(model, linears(model))
    assert {g.matrix.dtype for g in grams.values()} == {torch.float32}
    assert all(distance(gram.matrix, sums[name][0]) < 0.02 for name, gram in grams.items())


@pytest.mark.parametrize(
    ("ids", "message"),
    [(None, "NoneType"), (IDS[0], r"shape \(24,\)"), (IDS[:0], r"\(0, 24\)"), (IDS.float(), "float32"),
     (IDS + 9, "vocabulary ends at 49"), (IDS - 99, "ids from -99")],
)  # fmt: skip
def test_other_ids_are_refused(ids, message):
    refuses(message, calibrate, random_model(), ids, [], fail)


def test_only_dense_layers_of_blocks_and_the_head_are_calibrated():
    model = random_model("llama", tied=True)
    for name, message in (("embed.token", "Embedding"), ("head", "no module"), ("blocks.9.attn.q", "no module")):
        refuses(f"{name} is .*{message}", calibrate, model, IDS, [name], fail)
    attach(model, where="blocks.*.attn.q", rank=2)
    quantize(model, where="blocks.*.attn.k")
    for name in ("q", "k"):
        refuses("expected a plain linear layer", calibrate, model, IDS, [f"blocks.0.attn.{name}"], fail)
    refuses("Linear is no Decoder", calibrate, nn.Linear(2, 2), IDS, [], fail)


def test_too_few_tokens_are_refused():
    layers = linears(model := random_model())
    require_text(model, IDS, layers)
    refuses(r"too short: 24 tokens for \d+ inputs of blocks.0.mlp.down", require_text, model, IDS[:1], layers)
