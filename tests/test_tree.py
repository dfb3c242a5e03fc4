"""Places, globs, and exchanging modules at them."""

import pytest
import torch
from torch import nn

from dunes import tree
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
    hit = tree.replace(model, "blocks.*.attn.[qv]", Wrapped, tree.linear)
    assert len(hit) == 24
    assert [p.name for p in tree.places(model)] == before
    # A second change from outside wraps the wrapper, one from inside goes below it.
    tree.replace(model, "blocks.0.attn.q", Wrapped, tree.linear)
    assert isinstance(model.blocks[0].attn.q.base.base, nn.Linear)
    tree.replace(model, "blocks.0.attn.q", lambda m: nn.Identity(), lambda m: type(m) is nn.Linear, "inner")
    assert isinstance(model.blocks[0].attn.q.base.base, nn.Identity)


def test_nothing_selected_is_an_error_that_lists_what_there_is(model):
    with pytest.raises(ValueError, match=r"'blocks.\*.attention.q' selects nothing; .*blocks\.0\.attn\.q"):
        tree.find(model, "blocks.*.attention.q", tree.linear)
    with pytest.raises(ValueError, match="none of the requested kind"):
        tree.replace(model, "blocks.*.attn_norm", Wrapped, tree.linear)
    with pytest.raises(ValueError, match="no parameter"):
        tree.freeze(model, "head.weight")


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
