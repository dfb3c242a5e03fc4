"""Places, globs, and exchanging modules at them."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from conftest import equal_states, refuses
from dunes import tree
from dunes.augment.quantized import Int8
from dunes.models import qwen3


class Wrapped(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x):
        return self.base(x)


@pytest.fixture
def model():
    return qwen3.build(qwen3.Config.from_size(50, 32, 12, 16))


@pytest.mark.parametrize(
    ("where", "name", "hit"),
    [
        ("blocks.*.attn.q", "blocks.3.attn.q", True),
        ("blocks.*", "blocks.3.attn", False),
        ("blocks.1*", "blocks.11", True),
        ("blocks.1.**", "blocks.11.attn", False),
        ("**.q", "blocks.3.attn.q", True),
        ("blocks.*.attn.[qv]", "blocks.0.attn.k", False),
        (["blocks.**", "!**.mlp.**"], "blocks.0.mlp.up", False),
        (["blocks.**", "!**.mlp.**", "**.up"], "blocks.0.mlp.up", True),
        ("a?c", "abc", True),
        ("a.c", "abc", False),
    ],
)
def test_globs_cross_segments_only_when_asked_and_the_last_match_wins(where, name, hit):
    assert tree.matches(where, name) is hit


def test_a_wrapper_is_transparent_to_names_and_to_the_inner_reach(model):
    before = [p.name for p in tree.places(model)]
    assert len(tree.replace(model, "blocks.*.attn.[qv]", Wrapped, tree.linear)) == 24
    assert [p.name for p in tree.places(model)] == before
    # A second change from outside wraps the wrapper, one from inside goes below it.
    tree.replace(model, "blocks.0.attn.q", Wrapped, tree.linear)
    assert isinstance(model.blocks[0].attn.q.base.base, nn.Linear)
    tree.replace(model, "blocks.0.attn.q", lambda m: nn.Identity(), lambda m: type(m) is nn.Linear, "inner")
    assert isinstance(model.blocks[0].attn.q.base.base, nn.Identity)


def test_nothing_selected_is_an_error_that_lists_what_there_is(model):
    refuses(r"selects nothing; .*blocks\.\*\.attn\.q,", tree.find, model, "blocks.*.attention.q", tree.linear)
    refuses("none of the requested kind", tree.replace, model, "blocks.*.attn_norm", Wrapped, tree.linear)
    refuses("no parameter", tree.freeze, model, "head.weight")
    refuses("is not valid: ", tree.find, model, "[z-a]")


def test_a_set_has_names_and_no_globs(model):
    (place,) = tree.find(model, {"blocks.0", "**"})
    assert place.name == "blocks.0"


def test_freeze_count_and_watch(model):
    total = tree.count(model)
    assert total == sum(p.numel() for p in model.parameters())
    frozen = tree.freeze(model, ["**", "!blocks.0.**"])
    assert tree.count(model, trainable=True) == total - sum(model.get_parameter(n).numel() for n in frozen)
    ids = torch.tensor([[1, 2, 3]])
    with tree.watch(model, "blocks.*.mlp") as seen:
        model(ids)
    assert sorted(seen, key=lambda n: int(n.split(".")[1])) == [f"blocks.{i}.mlp" for i in range(12)]
    assert seen["blocks.0.mlp"].shape == (1, 3, 32)
    seen.clear()
    model(ids)
    assert not seen, "the hooks are gone"


def test_mode_is_put_back_part_by_part(model):
    model.train()
    model.blocks[1].eval()
    with tree.mode(model, False):
        assert not any(m.training for m in model.modules())
    assert model.training
    assert not model.blocks[1].training


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def test_an_expansion_with_silent_copies_and_their_removal_leave_the_model_as_it_was(model):
    """LLaMA Pro: after each group of four blocks a copy of the last, whose output projections are zero."""
    ids, before = torch.randint(0, 50, (2, 9)), {k: v.clone() for k, v in model.state_dict().items()}
    logits = model(ids)
    new = [tree.insert(model, "blocks", i, deepcopy(model.blocks[i - 1])) for i in (4, 9, 14)]
    assert new == ["blocks.4", "blocks.9", "blocks.14"]
    for name in new:
        block = model.get_submodule(name)
        assert torch.equal(block.attn.q.weight, model.blocks[int(name[7:]) - 1].attn.q.weight)
        nn.init.zeros_(block.attn.out.weight)
        nn.init.zeros_(block.mlp.down.weight)
    assert torch.equal(model(ids), logits)
    assert set(model.state_dict()) == set(qwen3.build(qwen3.Config.from_size(50, 32, 15, 16)).state_dict())
    assert tree.remove(model, new) == new
    assert equal_states(model.state_dict(), before)
    assert torch.equal(model(ids), logits)


def test_an_insertion_renumbers_what_follows_and_moves_no_parameter(model):
    optimizer = torch.optim.AdamW(model.parameters())
    held, old = [id(p) for p in optimizer.param_groups[0]["params"]], names_of(model)
    other = qwen3.build(qwen3.Config.from_size(50, 32, 2, 16))
    assert tree.insert(model, "blocks", 5, other.blocks[0]) == "blocks.5"
    assert model.blocks[5] is other.blocks[0]
    new = names_of(model)
    follow = lambda name: f"blocks.{int(name.split('.')[1]) + 1}." + name.split(".", 2)[2]
    moved = {k: follow(v) if v.startswith("blocks.") and int(v.split(".")[1]) >= 5 else v for k, v in old.items()}
    assert {k: v for k, v in new.items() if k in moved} == moved
    added = {v for k, v in new.items() if k not in moved}
    assert added == {f"blocks.5.{k}" for k, _ in other.blocks[0].named_parameters()}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == held
    names = [name for name in model.state_dict() if name.startswith("blocks.")]
    assert names == sorted(names, key=lambda name: int(name.split(".")[1]))
    assert tree.insert(model, "blocks", 13, other.blocks[1]) == "blocks.13"


def test_blocks_are_removed_by_globs_and_the_rest_computes_what_they_compute(model):
    ids, kept = torch.randint(0, 50, (1, 7)), [0, 1, 2, 6, 7, 8, 9]
    blocks = [model.blocks[i] for i in kept]
    assert tree.remove(model, ["blocks.[3-5]", "blocks.1?"]) == [f"blocks.{i}" for i in (3, 4, 5, 10, 11)]
    assert list(model.blocks) == blocks
    assert model(ids).shape == (1, 7, 50)


def test_what_is_no_entry_or_no_list_is_refused_with_its_place(model):
    before = dict(model.named_modules())
    refuses(r"blocks\.0\.attn is no entry of a ModuleList", tree.remove, model, ["blocks.0", "blocks.0.attn"])
    block = qwen3.build(qwen3.Config.from_size(50, 32, 2, 16)).blocks[0]
    refuses(r"'norm' selects nothing; expected: blocks", tree.insert, model, "norm", 0, block)
    for index in (-1, 13):
        refuses(f"blocks: insert at {index}; expected", tree.insert, model, "blocks", index, block)
    held = "blocks: the model already has this Block; insert a copy"
    refuses(held, tree.insert, model, "blocks", 0, model.blocks[4])
    assert dict(model.named_modules()) == before


def test_codes_of_quantized_weights_count_but_are_not_trainable():
    network = nn.Sequential(nn.Linear(32, 3), nn.Linear(3, 2))
    network[0] = Int8(network[0])
    assert tree.count(network) == 32 * 3 + 3 * 2 + (3 + 2)
    assert tree.count(network, trainable=True) == sum(p.numel() for p in network.parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frozen_script_module_has_no_mode_and_is_left_as_it_was():
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()))
    assert [row.type for row in tree.layers(frozen, torch.zeros(2, 4))] == ["Sequential"]
    model = nn.Sequential(nn.Linear(4, 4), frozen)
    shown = tree.layers(model, torch.zeros(2, 4))
    assert [(row.name, row.outputs) for row in shown[:2]] == [("", "2x4"), ("0", "2x4")]
    with tree.watch(model, "0") as outputs, tree.mode(model, False):
        model(torch.zeros(2, 4))
    assert [*outputs] == ["0"]
    assert model.training, "its mode is back"
    assert not hasattr(frozen, "training")
    refuses(r"^1 is a ScriptModule, whose parts call no hooks", tree.watch(model, "**").__enter__)
