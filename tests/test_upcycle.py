"""Dense MLPs into mixtures of copies: the model computes the same, for any router, and HF opens the result."""

import pytest
import torch

from adapters import difference
from conftest import refuses
from dunes import tree
from dunes.augment import apply_change
from dunes.checkpoint.formats.adapter import peft_factors
from dunes.parts import MoE
from small_models import random_model as dense

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")
IDS = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(1))


def spread(model, scale=3.0):
    """Give each virtual group of the routers other, large logits."""
    for m in model.modules():
        if isinstance(m, MoE):
            m.router.weight.data *= scale / m.router.weight.std()
    return model


@pytest.mark.parametrize(
    ("family", "fields", "request_"),
    [
        ("llama", {"hidden": 96}, {}),
        ("llama", {"hidden": 96, "mlp_bias": True, "tied": False}, {"granularity": 2}),
        ("mistral", {"hidden": 96}, {"granularity": 2, "top_k": 4}),
        ("qwen2", {"hidden": 96}, {"experts": 12, "granularity": 4, "top_k": 8}),
        ("qwen3", {"hidden": 96}, {"experts": 6, "granularity": 3, "top_k": 3}),
        ("arcee", {"hidden": 96}, {}),
        ("gpt2", {}, {"experts": 8, "granularity": 4, "top_k": 4}),
    ],
)
@torch.no_grad()
def test_the_mixture_computes_what_the_dense_model_does_for_any_router(family, fields, request_):
    model = dense(family, **fields)
    before = model(IDS)
    change = apply_change(model, "upcycle", **request_)
    first = difference(model(IDS), before)
    any_router = difference(spread(model)(IDS), before)
    print(f"{family} {request_}: {first:.1e}, any router {any_router:.1e}")
    assert max(first, any_router) <= 1e-5
    assert {type(model.get_submodule(place)) for place in change.places} == {MoE}
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert len({p.data_ptr() for p in experts}) == len(experts), "experts share weights"


@torch.no_grad()
def test_a_router_without_preference_still_chooses_whole_copies():
    model = dense()
    before = model(IDS)
    apply_change(model, "upcycle", experts=12, granularity=4, top_k=4)
    assert difference(spread(model, 0.0)(IDS), before) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_scaled_exactly(dtype):
    model = dense().to(dtype)
    old = {k: v.clone() for k, v in model.state_dict().items()}
    apply_change(model, "upcycle", experts=8, granularity=4, top_k=4)
    assert {p.dtype for p in model.parameters()} == {dtype}
    down = torch.cat([model.blocks[1].mlp.experts[e].down.weight for e in range(4, 8)], 1)
    assert torch.equal(down / 4, old["blocks.1.mlp.down.weight"])


@torch.no_grad()
def test_dropped_neurons_are_drawn_anew_after_the_check():
    model, plain = dense(hidden=96), dense(hidden=96)
    before = model(IDS)
    apply_change(model, "upcycle", drop=0.5)
    apply_change(plain, "upcycle")
    assert difference(plain(IDS), before) <= 1e-5 < difference(model(IDS), before)
    for e in range(8):
        expert, copied = (m.blocks[0].mlp.experts[e] for m in (model, plain))
        changed = (expert.gate.weight != copied.gate.weight).all(1)
        assert changed.sum() == 48
        assert torch.equal((expert.down.weight != copied.down.weight).all(0), changed)
        assert torch.equal((expert.up.weight != copied.up.weight).any(1), changed)
        assert float(expert.up.weight.std()) == pytest.approx(float(copied.up.weight.std()), rel=0.1)
    masks = [(m.gate.weight != c.gate.weight).all(1) for m, c in
             zip(model.blocks[0].mlp.experts, plain.blocks[0].mlp.experts, strict=True)]  # fmt: skip
    assert not torch.equal(masks[0], masks[1])


def test_only_the_routers_are_new_and_both_learn():
    model = dense()
    change = apply_change(model, "upcycle")
    new = [n for n, _ in model.named_parameters() if tree.matches(change.new, n)]
    assert new == ["blocks.0.mlp.router.weight", "blocks.1.mlp.router.weight"]
    model.train()(IDS).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    # the experts are equal, so the choice between them changes nothing yet
    assert float(model.blocks[0].mlp.router.weight.grad.abs().max()) < 1e-6


def test_a_model_that_would_not_be_equal_is_put_back(monkeypatch):
    from dunes.augment import upcycle

    real = upcycle.copy_neurons
    monkeypatch.setattr(upcycle, "copy_neurons", lambda e, m, n, scale: real(e, m, n, 1.01))
    model = dense()
    logits = model(IDS)
    refuses(r"blocks\.0\.mlp: the experts differ .* as before", apply_change, model, "upcycle")
    assert torch.equal(model(IDS), logits)
    monkeypatch.undo()
    model.blocks[1].mlp.down.weight.data[0, 0] = torch.nan
    refuses(r"blocks\.1\.mlp: .* nan", apply_change, model, "upcycle")
    assert not any(isinstance(m, MoE) for m in model.modules())


def test_lora_on_a_form_of_its_own_is_refused_with_what_saves_it():
    model = dense("gpt2")
    apply_change(model, "upcycle")
    apply_change(model, "lora", rank=2)
    refuses(r"has no Hugging Face config: .*; save the whole model", peft_factors, model)
