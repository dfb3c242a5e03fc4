"""Low-rank adapters: what they leave alone, what they change, and that it can be undone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapters import IDS, build, difference, trained
from conftest import equal_states, refuses
from dunes import checkpoint, tree
from dunes.augment import Adapted, adapter_active, attach, base_model, detach, lora, merge, quantize, set_adapter
from dunes.augment.adapted import LoraConfig, dense
from dunes.augment.changes import decide_change, repeat_structure
from dunes.augment.lora import DoRA
from dunes.ops import low_rank
from dunes.parts import Checkpointed
from dunes.train import Trainer, adamw, cast_frozen, next_token
from dunes.train.loss import next_token_loss

KINDS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "dora-pissa": {"dora": True, "init": "pissa"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@torch.no_grad()
def test_an_adapter_is_merged(family, kind):
    model = build(family)
    names, before = list(model.state_dict()), model(IDS)
    note = attach(model, rank=4, **KINDS[kind])
    changed = trained(model)(IDS)
    assert difference(changed, before) > 0.1
    merged = merge(model)
    assert difference(model(IDS), changed) < 1e-5 * max(1, changed.abs().max()), "L3"
    assert merged.errors.keys() == note.places.keys()
    assert max(merged.errors.values()) < 1e-5
    assert list(model.state_dict()) == names
    assert checkpoint.hf_config_of(model, 32).family == family


def dora_by_the_book(adapter, weight):
    whole = weight + adapter.config.scale * adapter.B @ adapter.A
    return adapter.magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True).detach()


def test_dora_equals_its_formula_in_values_and_gradients():
    linear = nn.Linear(12, 7).double()
    outer = Adapted(linear)
    outer.adapters["a"] = adapter = DoRA(linear, LoraConfig(3, 5.0), torch.float64)
    outer.active = "a"
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in adapter.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype))
    x = torch.randn(4, 12, dtype=torch.float64)
    plain = F.linear(x, dora_by_the_book(adapter, linear.weight), linear.bias)
    assert difference(outer(x), plain) < 1e-12
    ours = torch.autograd.grad(outer(x).square().sum(), list(adapter.parameters()))
    theirs = torch.autograd.grad(plain.square().sum(), list(adapter.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert difference(outer.dense(), dora_by_the_book(adapter, linear.weight)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_b_learns_first_and_both_afterwards(family, kind):
    model = build(family)
    attach(model, rank=2, **KINDS[kind])
    tree.freeze(model, ["**", "!**.adapters.**"])
    for step in range(2):
        model.zero_grad()
        next_token(model, IDS)[0].backward()
        grads = {n: p.grad.any().item() for n, p in model.named_parameters() if p.grad is not None}
        a, b = ([learns for n, learns in grads.items() if n.endswith(end)] for end in (".A", ".B"))
        print(f"{family} {kind}: {sum(a) + sum(b)} of {len(a) + len(b)} have a gradient in step {step + 1}")
        assert all(b), "L2"
        assert set(a) == {step == 1 or "pissa" in kind}, "L2: none of A in the first step, all in the second"
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad


@pytest.mark.slow
@pytest.mark.parametrize("few_bits", [None, "int8", "nf4"])
def test_training_moves_only_the_adapter_and_keeps_no_copy_of_the_base(few_bits):
    model = build("mixtral").train()
    if few_bits:
        quantize(model, kind=few_bits)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    pointers = {v.data_ptr() for v in model.state_dict().values()}
    note = attach(model, rank=4, dropout=0.1)
    tree.freeze(model, ["**", *(f"!{new}" for new in note.new)])
    optimizer = adamw(model, 1e-2)
    losses = [s.loss for s in Trainer(model, optimizer, next_token_loss).run([IDS] * 20)]
    print(f"base {few_bits}: loss {losses[0]:.2f} to {losses[-1]:.2f}, {len(optimizer.state)} tensors learnt")
    assert losses[-1] < losses[0] - 0.3
    bases = base_model(model).state_dict()
    assert equal_states(bases, weights), "L7"
    assert {w.data_ptr() for w in bases.values()} == pointers
    adapters = {id(p) for n, p in model.named_parameters() if ".adapters." in n}
    assert {id(p) for p in optimizer.state} == adapters, "L7"
    held = tree.count(model) - tree.count(base_model(model))
    assert held == tree.count(model, trainable=True) == sum(p.numel() for p in optimizer.state)


def test_ranks_follow_the_last_glob_and_names_stay():
    model = build("mixtral")
    ranks = {"**.attn.*": 8, "**.mlp.**": 2, "blocks.1.attn.out": 3}
    note = attach(model, ranks=ranks, where=["blocks.**", "!**.k"])
    ranks = {k: one["rank"] for k, one in note.places.items()}
    assert (ranks["blocks.0.attn.q"], ranks["blocks.1.attn.out"]) == (8, 3)
    assert ranks["blocks.0.mlp.experts.3.down"] == 2
    assert "blocks.0.attn.k" not in ranks
    assert "blocks.0.mlp.router" in ranks, "asked for"
    assert "blocks.0.mlp.router" not in decide_change(build("mixtral"), "lora").places
    state = model.state_dict()
    assert state["blocks.0.attn.q.adapters.default.A"].shape == (8, 32)
    assert state["blocks.0.attn.q.adapters.default.B"].shape == (32, 8)
    assert "blocks.0.attn.q.base.weight" in state
    assert isinstance(tree.find(model, "blocks.0.attn.q")[0].module, Adapted)


def test_several_adapters_share_one_wrapper_and_take_turns():
    model = build()
    base = model(IDS)
    attach(model, where="**.attn.*", rank=2, adapter="one")
    attach(model, where=["**.attn.q", "**.mlp.*"], rank=3, adapter="two", dora=True)
    assert isinstance(model.blocks[0].attn.q.base, nn.Linear), "it joined the wrapper"
    trained(model, "one")
    trained(model, "two", seed=2)
    two = model(IDS)
    with adapter_active(model, "one"):
        one = model(IDS)
        with adapter_active(model, None):
            assert torch.equal(model(IDS), base)
    assert torch.equal(model(IDS), two)
    assert min(difference(one, two), difference(one, base), difference(two, base)) > 0.01
    alone = base_model(model)
    attach(alone, where="**.attn.*", rank=2, adapter="one")
    trained(alone, "one")
    assert torch.equal(alone(IDS), one)
    refuses("no adapter 'three'; its adapters are: one, two", set_adapter, model, "three")
    refuses("detach the others", merge, model, "one")
    detach(model, "two")
    assert torch.equal(model(IDS), base), "what was active is gone"
    assert model.blocks[0].attn.q.active is None
    set_adapter(model, "one")
    assert torch.equal(model(IDS), one)
    assert isinstance(model.blocks[0].mlp.up, nn.Linear)


def test_first_numbers_depend_on_seed_name_and_place_alone():
    some, more = build(), build()
    attach(some, where="blocks.1.attn.q", rank=4)
    attach(more, rank=4)
    assert torch.equal(some.blocks[1].attn.q["default"].A, more.blocks[1].attn.q["default"].A)
    assert not torch.equal(more.blocks[0].attn.q["default"].A, more.blocks[1].attn.q["default"].A)
    bound = more.blocks[0].attn.q["default"].A.abs().max() * 32**0.5
    assert 0.9 < bound <= 1, "kaiming_uniform with a=sqrt(5)"
    attach(some, where="blocks.1.attn.q", rank=4, adapter="other", seed=1)
    assert not torch.equal(some.blocks[1].attn.q["default"].A, some.blocks[1].attn.q["other"].A)


def test_pissa_begins_with_the_greatest_part_of_the_matrix_and_scales_are_those_of_the_papers():
    model = build()
    attach(model, where="blocks.0.attn.q", rank=4, init="pissa", alpha=8)
    adapter, weight = model.blocks[0].attn.q["default"], model.blocks[0].attn.q.base.weight
    values = torch.linalg.svdvals(weight)
    left = weight - adapter.config.scale * adapter.B @ adapter.A
    assert torch.allclose(left.norm(), values[4:].norm(), rtol=1e-4)
    assert torch.allclose(adapter.A.norm(dim=1), adapter.B.norm(dim=0), rtol=1e-4)
    assert (LoraConfig(16, 32).scale, LoraConfig(16, 32, rslora=True).scale) == (2, 8)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_adapter_on_a_bfloat16_base(kind, autocast):
    model = build().bfloat16()

    def logits():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(IDS)

    before = logits()
    attach(model, rank=4, **KINDS[kind])
    assert torch.equal(logits(), before)
    trained(model)
    after = logits()
    assert after.dtype == before.dtype == torch.bfloat16
    assert difference(after, before) > 0.1
    after.float().square().sum().backward()
    grads = [p.grad for n, p in model.named_parameters() if ".adapters." in n]
    assert all(g is not None and g.dtype == torch.float32 for g in grads)
    assert 1e-4 < max(merge(model).errors.values()) < 0.1, "bfloat16 loses, and says so"
    assert model.blocks[0].attn.q.weight.dtype == torch.bfloat16
    assert (logits() - after).float().norm() < 0.05 * after.float().norm()


@torch.no_grad()
def test_norms_of_dora_are_not_rounded_by_autocast_and_rows_of_zeros_do_no_harm():
    model = build()
    model.blocks[0].attn.out.weight.zero_()
    before = model(IDS)
    attach(model, rank=4, dora=True)
    assert torch.equal(model(IDS), before)
    trained(model)
    outer = model.blocks[1].attn.q
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outer["default"].norms(outer.base)
    assert torch.equal(rounded, outer["default"].norms(outer.base))
    assert model(IDS).isfinite().all()


def test_dropout_acts_in_training_only():
    model = build()
    attach(model, rank=4, dropout=0.5)
    trained(model)
    assert torch.equal(model(IDS), model(IDS))
    model.train()
    assert difference(model(IDS), model(IDS)) > 0


def test_a_base_that_learns_gets_its_gradient_beside_an_adapter():
    torch.manual_seed(0)
    block = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(8, 9)})})
    attach(block, rank=2)
    outer = block["blocks"]["0"]
    outer(torch.randn(3, 8)).sum().backward()
    assert outer.base.weight.grad.any()
    assert outer.base.bias.grad.any()


def test_head_and_embedding_when_asked():
    model = build(tied=False)
    before = model(IDS)
    note = attach(model, where=["head", "embed.token"], rank=4)
    assert list(note.places) == ["embed.token", "head"]
    assert torch.equal(model(IDS), before)
    trained(model)
    after = model(IDS)
    total, count, _ = model(IDS[:, :-1], targets=IDS[:, 1:])
    loss, number = next_token(model, IDS)
    assert (count, torch.allclose(total, loss)) == (number, True)
    assert max(merge(model).errors.values()) < 1e-5
    assert difference(model(IDS), after) < 1e-5
    assert "embed.token" not in decide_change(model, "lora", where=["**"]).places, "not by a star"
    gpt = build("gpt2")
    refuses("embed.token: the embedding is tied to the head", attach, gpt, where=["embed.token"], rank=2)
    attach(gpt, where="embed.place", rank=2)
    trained(gpt)
    changed = gpt(IDS)
    merge(gpt)
    assert difference(gpt(IDS), changed) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_both_orders_of_quantizing_and_adapting_are_one(kind):
    first, second = build("mixtral"), build("mixtral")
    quantize(first, kind=kind)
    one = attach(first, rank=4, dora=True)
    two = attach(second, rank=4, dora=True)
    quantize(second, kind=kind)
    assert one == two
    assert list(first.state_dict()) == list(second.state_dict())
    kinds = [[type(p.module) for p in tree.places(m)] for m in (first, second)]
    assert kinds[0] == kinds[1]
    for model in (first, second):
        lora.fill(model, one, {})
        tree.freeze(model, ["**", "!**.adapters.**"])
        trained(model)
    assert torch.equal(first(IDS), second(IDS))
    next_token(first, IDS)[0].backward()
    learnt = {n for n, p in first.named_parameters() if p.grad is not None}
    assert learnt == {n for n, _ in first.named_parameters() if ".adapters." in n}
    after = first(IDS)
    assert max(merge(first).errors.values()) < 1e-5
    assert difference(first(IDS), after) < 1e-4
    assert checkpoint.hf_config_of(first, 32).family == "mixtral", "dense again"
    refuses(r"blocks.0.attn.q: already quantized", quantize, second, kind="int8")


def test_more_refusals():
    model = build()
    note = attach(model, where="**.q", rank=2)
    refuses("is damaged: .*blocks.0.attn.q", repeat_structure, nn.Sequential(nn.Linear(2, 2)), note)
    merge(model)
    refuses("its adapters are: none", merge, model)
    attach(model, where="**.q", rank=2, adapter="a")
    attach(model, where="**.k", rank=2, adapter="b")
    refuses("adapters a, b are at different places", merge, model)
    merge(model, "a")


def test_any_module_with_linears_and_blocks_that_are_wrapped():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert list(attach(net, where="**", rank=2).places) == ["0", "2"]
    model = build()
    tree.replace(model, "blocks.*", Checkpointed)
    before = model(IDS)
    assert "blocks.0.attn.q" in attach(model, rank=2).places
    assert torch.equal(model(IDS), before)
    assert dense(model.blocks[0].base.attn.q).shape == (32, 32)


@pytest.mark.parametrize("kind", ["dense", "int8", "nf4"])
def test_the_matrix_of_a_frozen_base_is_not_held_for_the_way_back(kind):
    """With the adapter and without it; the gradients are those of the plain form."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(64, 96)})})
    if kind != "dense":
        quantize(block, kind=kind)
    note = attach(block, rank=4)
    tree.freeze(block, ["**", *(f"!{new}" for new in note.new)])
    outer, x = block["blocks"]["0"], torch.randn(5, 64, requires_grad=True)
    adapter = outer["default"]
    nn.init.normal_(adapter.B)
    weight = dense(outer.base).detach()
    want = low_rank.plain(x, adapter.A, adapter.B, lambda: weight, outer.bias, adapter.config.scale)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        got = outer(x)
        if kind != "dense":
            outer.base(x)
    assert saved
    assert weight.shape not in saved
    assert weight.T.shape not in saved
    slope = torch.randn(want.shape)
    leaves = (x, adapter.A, adapter.B)
    ours, theirs = (torch.autograd.grad(y, leaves, slope) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_halved_frozen_maps_train_to_the_same_numbers(kind):
    """Under autocast, bit for bit; embeddings, norms and the adapter keep their dtype."""
    losses = []
    for half in (False, True):
        model = build()
        if kind != "dense":
            quantize(model, kind=kind)
        note = attach(model, rank=4)
        tree.freeze(model, ["**", *(f"!{new}" for new in note.new)])
        if half:
            assert cast_frozen(model, torch.bfloat16) == 2 * 7 + (model.head is not None)
            assert cast_frozen(model, torch.bfloat16) == 0
            assert dense(model.blocks[0].attn.q.base).dtype == torch.bfloat16
            assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
            assert model.embed.token.weight.dtype == torch.float32
        trainer = Trainer(model, adamw(model), next_token_loss, dtype=torch.bfloat16)
        losses.append([s.loss for s in trainer.run([IDS] * 5)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5
