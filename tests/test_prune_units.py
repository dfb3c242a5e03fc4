"""Heads, neurons, experts and blocks taken out: what is left computes what the others' absence leaves."""

import pytest
import torch

from conftest import refuses
from dunes import checkpoint, tree
from dunes.augment import CHANGES, Change, apply_change, repeat_structure
from dunes.augment.changes import decide_change
from dunes.augment.prune_units import block_influence, importances
from dunes.parts import MoE
from own_parts import alibi, scored
from small_models import assert_refused_unchanged, random_model
from test_calibrate import IDS
from test_prune import LONG, loss

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")
FAMILY_FIELDS = [
    ("gpt2", {}), ("llama", {"heads": 4, "kv_heads": 2, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"heads": 4, "kv_heads": 2, "head_dim": 8}), ("qwen3", {"heads": 4, "kv_heads": 4, "head_dim": 8}),
    ("arcee", {"heads": 4, "kv_heads": 2, "head_dim": 8}), ("mixtral", {"experts": 4}),
]  # fmt: skip


def silenced(model, change):
    """The model with the outputs of what the change takes out set to zero."""
    for place, kept in change.places.items():
        (kind,) = kept.keys() - {"of"}
        module = model.get_submodule(place)
        gone = [i for i in range(kept["of"]) if i not in kept[kind]]
        if kind in ("groups", "neurons"):
            last = module.out if kind == "groups" else module.down
            last.weight.data.view(len(last.weight), kept["of"], -1)[:, gone] = 0
        elif kind == "blocks":
            tree.remove(model, {f"blocks.{i}" for i in gone})
    return model


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("family", "fields"), FAMILY_FIELDS)
@torch.no_grad()
def test_what_is_left_computes_what_silencing_the_rest_does(family, fields, uneven):

    def build():
        model = random_model(family, depth=3, **fields)
        for p in (p for n, p in model.blocks[0].named_parameters() if n.endswith(("out.weight", "down.weight"))):
            p.mul_(1e-3)  # the first block goes, and the others are renumbered
        return model

    model, heads = build(), build().blocks[0].attn.q.out_features // build().blocks[0].attn.head_dim
    size = tree.count(model)
    sizes = {"heads": max(1, heads // 2), "neurons": 20, "blocks": 2}
    change = apply_change(model, "narrow", ids=LONG[:8], uneven=uneven, **sizes)
    assert tree.count(model) < 0.75 * size
    assert (model(IDS) - silenced(build(), change)(IDS)).abs().max() < 1e-5
    described = checkpoint.hf_config_of(model, 32)
    if family == "gpt2" and heads > 1:
        assert "gpt2" in described  # whose heads together are as wide as the model
    elif not uneven:
        assert described.config.hidden == 20
        assert described.config.depth == 2
    print(CHANGES["narrow"].describe(change), described if isinstance(described, str) else "")


@torch.no_grad()
def test_experts_that_stay_are_chosen_among_themselves():
    model, whole = random_model("mixtral", experts=4), random_model("mixtral", experts=4)
    change = apply_change(model, "narrow", ids=LONG, experts=2)
    for place, kept in change.places.items():
        moe, before = model.get_submodule(place), whole.get_submodule(place)
        assert len(moe.experts) == 2
        assert torch.equal(moe.router.weight, before.router.weight[kept["experts"]])
        for expert, e in zip(moe.experts, kept["experts"], strict=True):
            assert torch.equal(expert.down.weight, before.experts[e].down.weight)
    assert checkpoint.hf_config_of(model, 32).config.experts == 2
    both = random_model("mixtral", experts=4)
    change = apply_change(both, "narrow", ids=LONG, experts=3, neurons=16, blocks=1)
    assert both(IDS).isfinite().all()
    assert all(m.down.in_features == 16 for moe in both.modules() if isinstance(moe, MoE) for m in moe.experts)
    assert len(change.places) == 1 + 1 + 3


def test_importance_is_what_the_loss_loses_to_first_order():
    model = random_model("llama", heads=4, kv_heads=2, head_dim=8).double()
    names = {"blocks.0.attn.out": 2, "blocks.1.mlp.down": 96}
    scores = importances(model, IDS, names)
    for name, units in names.items():
        layer, signed = model.get_submodule(name), torch.zeros(units)
        for unit in range(units):
            gate = torch.ones(units, dtype=torch.double, requires_grad=True)
            each = layer.in_features // units
            hook = layer.register_forward_pre_hook(lambda m, x, g=gate, n=each: (x[0] * g.repeat_interleave(n),))
            total, _ = loss_of(model)
            hook.remove()
            signed[unit] = torch.autograd.grad(total, gate)[0][unit]
            if unit >= 3:
                break
        # The sum of absolute values over tokens bounds that of the values themselves.
        assert (scores[name][:3] >= signed[:3].abs() - 1e-4).all()
        assert scores[name].shape == (units,)


def loss_of(model):
    logits = model(IDS)[:, :-1].float()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
    return total, None


def test_what_does_nothing_goes_first():
    model = random_model(depth=3, heads=4, kv_heads=2, head_dim=8)
    idle = model.blocks[1]
    idle.attn.out.weight.data.zero_()
    idle.mlp.down.weight.data.zero_()
    model.blocks[0].mlp.down.weight.data[:, 5:] *= 1e-6
    model.blocks[2].attn.out.weight.data[:, :16] *= 1e-6
    assert int(block_influence(model, LONG).argmin()) == 1
    change = decide_change(model, "narrow", ids=LONG, heads=2, neurons=5, blocks=2)
    assert change.places["blocks"] == {"blocks": [0, 2], "of": 3}
    assert change.places["blocks.0.mlp"]["neurons"] == [0, 1, 2, 3, 4]
    assert change.places["blocks.2.attn"] == {"groups": [1], "of": 2}
    uneven = decide_change(model, "narrow", ids=LONG, neurons=34, uneven=True)
    sizes = [len(uneven.places.get(f"blocks.{i}.mlp", {"neurons": range(96)})["neurons"]) for i in range(3)]
    print(sizes)
    assert sizes == [5, 1, 96]


def test_narrowed_models_learn_and_stay_in_their_mode():
    model = random_model().train()
    apply_change(model, "narrow", ids=LONG, neurons=20, heads=1)
    assert all(m.training for m in model.modules())
    total, _ = loss(model, LONG[:2])
    total.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_other_layers_and_damaged_records_are_refused():
    refuses("experts is 1", apply_change, random_model("mixtral", experts=4), "narrow", ids=LONG, experts=1)
    record = decide_change(random_model(), "narrow", ids=LONG, neurons=8).record()
    for places in ({"blocks.9.mlp": {"neurons": [1], "of": 96}}, {"blocks.1.mlp": {"limbs": [1], "of": 96}}):
        refuses("is damaged", repeat_structure, random_model(), Change.of({**record, "places": places}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: random_model("olmo2", heads=4, kv_heads=4, head_dim=8), "norms are over all heads"),
        (scored, "from a ValueResidualAttention"),
        (alibi, "sinks or a bias for each head"),
    ],
)
def test_heads_that_depend_on_one_another_stay(make, words):
    assert_refused_unchanged(words, make(), "narrow", heads=2, ids=IDS)
