"""Models of one's own parts: kept with the function that builds them, whole and exact."""

import json
import os
import runpy
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from conftest import change_json, refuses
from dunes import checkpoint
from dunes.generate import generate
from dunes.parts import Attention, Block, Decoder, Embedding, RMSNorm, Rotary
from dunes.text import Tokenizer
from small_models import random_model

TOKENIZER = Tokenizer.train("bytes", [])
IDS = torch.arange(40).view(2, 20)


class Shifted(nn.Module):
    """With all that a module may hold: parameters of two dtypes, buffers that are kept and one that is not."""

    supports_packing = True

    def __init__(self, dim, times=2):
        super().__init__()
        self.up, self.down, self.times = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), times
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(dim, dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("shift", torch.linspace(0, 1, dim), persistent=False)

    def forward(self, x):
        return self.down((self.up(x + self.shift) * self.scale.float()).relu()) * self.times + self.seen


def build(dim=32, window=8, tied=True, mlp=Shifted):
    position = Rotary(dim // 2)
    attention = lambda i: Attention(dim, 2, 1, position=position, window=None if i else window)
    blocks = [Block(RMSNorm(dim), attention(i), RMSNorm(dim), mlp(dim)) for i in range(2)]
    embed, head = Embedding(TOKENIZER.vocab, dim), nn.Linear(dim, TOKENIZER.vocab, bias=False)
    model = Decoder(embed, blocks, RMSNorm(dim), head)
    if tied:
        model.head.weight = model.embed.token.weight
    return model


def learned(model, seed=1):
    """Other numbers in all that is kept."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape, generator=draw) * 3 - 1)
    return model.eval()


def save(model, folder, **how):
    build_with, arguments = how.pop("build", build), how.pop("arguments", {})
    architecture = checkpoint.Architecture.of_function(build_with, **arguments)
    checkpoint.save(model, folder, TOKENIZER, 64, architecture=architecture, **how)


@pytest.fixture
def kept(tmp_path):
    save(learned(build()), tmp_path / "own", facts={"note": "x", "family": "llama"})
    return tmp_path / "own"


def test_what_is_kept_is_loaded_bit_for_bit(kept):
    model, loaded = learned(build()), checkpoint.load(kept, build=build)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in loaded.model.state_dict().items())
    assert torch.equal(loaded.model(IDS), model(IDS))
    assert loaded.model.head.weight is loaded.model.embed.token.weight
    assert loaded.tokenizer.json() == TOKENIZER.json()
    assert (loaded.context_length, loaded.card["note"], loaded.model.training) == (64, "x", False)
    assert loaded.card["family"] == {"function": "test_built:build", "arguments": {}}
    assert len(list(generate(loaded.model, [1, 2], max_tokens=3, context_length=loaded.context_length))) == 3
    assert sorted(p.name for p in kept.iterdir() if p.name.startswith("model")) == ["model.safetensors"]


def test_arguments_are_in_the_card_and_given_to_the_function(tmp_path):
    model = learned(build(16, window=None, tied=False))
    save(model, tmp_path, arguments={"dim": 16, "window": None, "tied": False})
    loaded = checkpoint.load(tmp_path, build=build)
    assert loaded.card["family"]["arguments"] == {"dim": 16, "window": None, "tied": False}
    assert torch.equal(loaded.model(IDS), model(IDS))
    refuses("unexpected keyword argument 'dim'", checkpoint.load, tmp_path, build=learned)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(model, tmp_path, arguments={"dim": torch.ones(1)})
    refuses("returned a str; expected a module", save, model, tmp_path, build=lambda: "x")


MINE = """
import sys
import torch
from torch import nn
from dunes import checkpoint
from dunes.parts import Attention, Block, Decoder, Embedding, RMSNorm

def build(hidden):
    mlp = nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 32))
    return Decoder(Embedding(50, 32), [Block(RMSNorm(32), Attention(32, 2), RMSNorm(32), mlp)], RMSNorm(32))

if __name__ == "__main__":
    model = checkpoint.load(sys.argv[1], build=build).model
    print(model(torch.arange(10)[None]).flatten().tolist())
"""


def test_it_is_loaded_in_another_process_from_the_file_that_has_the_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    found = runpy.run_path(str(path))
    model = found["build"](8).eval()
    architecture = checkpoint.Architecture.of_function(found["build"], hidden=8)
    checkpoint.save(model, tmp_path / "kept", None, 16, architecture=architecture)
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "DUNES_HOME": str(tmp_path / "home")}
    env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": os.environ["MKL_CBWR"]}  # the bits of this process
    line = [sys.executable, "-W", "ignore", path, tmp_path / "kept"]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert not done.stderr
    assert json.loads(done.stdout) == model(torch.arange(10)[None]).flatten().tolist()


class Wider(Shifted):
    def __init__(self, dim):
        super().__init__(dim, times=3)
        self.up, self.extra = nn.Linear(dim, 3 * dim), nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(()))
        del self.none


def test_every_difference_from_what_was_saved_is_listed(kept):
    other = partial(build, tied=False, window=4, mlp=Wider)
    said = refuses("builds a different model from the saved one", checkpoint.load, kept, build=other)
    assert said.startswith(f"{kept}: test_built:build builds")
    for i in (0, 1):
        for words in (
            f"blocks.{i}.mlp.extra (2,) is missing",
            f"blocks.{i}.mlp.none (0, 3) is not a weight",
            f"blocks.{i}.mlp.up.weight is (64, 32), not (96, 32)",
            f"blocks.{i}.mlp.up.bias is (64,), not (96,)",
            f"blocks.{i}.mlp.scale is torch.float64, not torch.float32",
            f"blocks.{i}.mlp has another class or other settings",
        ):
            assert words in said
    assert "head.weight is the same tensor as embed.token.weight, not a tensor of its own" in said
    assert "blocks.0.attn has another class or other settings" in said
    assert "blocks.1.attn is" not in said
    words = r"blocks\.0\.attn has another class .*; if this is intended, .*load_state"
    refuses(words, checkpoint.load, kept, build=partial(build, window=4))


def test_a_set_is_the_same_in_whatever_order_it_lies(tmp_path):
    def make(order):
        model = nn.Linear(2, 2)
        model.chosen = set(order)
        return model

    assert str({0, 8}) != str({8, 0})
    architecture = checkpoint.Architecture.of_function(partial(make, [8, 0]))
    checkpoint.save(make([0, 8]), tmp_path, TOKENIZER, 1, architecture=architecture)
    assert checkpoint.load(tmp_path, build=partial(make, [8, 0])).model.chosen == {0, 8}


def test_a_function_that_builds_another_model_is_refused_before_anything_is_written(tmp_path):
    def refusal(model, **how):
        message = refuses("builds a different model: ", save, model, tmp_path / "own", **how)
        assert not (tmp_path / "own").exists()
        return message

    assert "blocks.0.attn: window is 4, not 8" in refusal(learned(build(window=4)))
    assert "blocks.0.attn.k.weight is (8, 16), not (16, 32)" in refusal(learned(build(16)))
    assert "norm.weight is torch.bfloat16, not torch.float32" in refusal(learned(build()).bfloat16())
    model = learned(build())
    model.blocks[0].mlp.shift += 1
    assert "blocks.0.mlp.shift has other values, which would be lost, as it is not persistent" in refusal(model)
    model = learned(build())
    model.blocks[1].mlp.noise = nn.Parameter(torch.zeros(2))
    assert "blocks.1.mlp.noise (2,) is not a weight of this model" in refusal(model)


def test_tensors_that_no_file_holds_are_named(tmp_path):
    class Odd(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.phase = nn.Parameter(torch.zeros(dim, dtype=torch.complex64))

        def get_extra_state(self):
            return {"a": 1}

    odd = partial(build, mlp=Odd)
    refuses(r"^blocks\.0\.mlp\.phase, blocks\.0\.mlp\._extra_state, ", save, odd(), tmp_path, build=odd)


def test_any_module_can_be_kept_and_building_draws_no_random_numbers_from_the_callers(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = make()
    model(torch.rand(9, 4))  # its running means are buffers
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    checkpoint.save(model.eval(), tmp_path, None, 1, architecture=checkpoint.Architecture.of_function(make))
    with pytest.warns(UserWarning, match="tokenizer is None"):
        loaded = checkpoint.load(tmp_path, build=make).model
    assert torch.equal(torch.rand(3), expected)
    x = torch.rand(3, 4)
    assert torch.equal(loaded(x), model(x))


def test_without_the_function_it_is_refused_in_one_line_that_says_how(kept, tmp_path):
    refuses(r"of_function\(build\)", checkpoint.save, build(), tmp_path / "new", TOKENIZER, 64)
    for read in (checkpoint.load, checkpoint.describe, checkpoint.load_with_tokenizer):
        assert refuses("test_built:build.*--trust-code", read, kept).startswith(f"{kept}: ")


@pytest.mark.parametrize("by", ["function", "class"])
def test_inspect_describes_a_folder_whose_function_it_does_not_import(by, kept, tmp_path, command):
    if by == "class":
        kept = tmp_path / "weights"
        checkpoint.save_weights(build(), kept)
    status, out, _ = command("inspect", kept)
    assert status == 1, "it would not load"
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    name = "test_built:build, dunes" if by == "function" else "dunes.parts.decoder:Decoder, dunes"
    assert shown["family"].startswith(name)
    stored = sum(t.numel() for t in load_file(kept / "model.safetensors").values())
    assert shown["parameters"].startswith(f"{stored:,} ")
    assert shown["loads"].startswith("no: ")
    assert ("--trust-code" if by == "function" else "load_weights") in shown["loads"]


def test_a_model_of_a_family_is_hugging_faces_and_needs_no_function(tmp_path):
    make = lambda: random_model(vocab=TOKENIZER.vocab, context=16)
    save(make(), tmp_path, build=make)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    for loaded in (checkpoint.load(tmp_path), checkpoint.load(tmp_path, build=make)):
        assert loaded.card["family"] == "llama"
        assert torch.equal(loaded.model(IDS[:, :16]), make().eval()(IDS[:, :16]))


def test_one_kind_over_the_other_leaves_nothing_of_it(kept):
    save(random_model(vocab=TOKENIZER.vocab, context=16), kept)
    assert checkpoint.load(kept).card["family"] == "llama"
    save(learned(build()), kept)
    refuses("not imported automatically", checkpoint.load, kept)
    assert torch.equal(checkpoint.load(kept, build=build).model(IDS), learned(build())(IDS))


@pytest.mark.parametrize(
    "change",
    [
        {"family": {"function": "a:b"}},
        {"family": {"function": 3, "arguments": {}}},
        {"family": {"function": "a:\nb", "arguments": {}}},
        {"structure": None},
        {"structure": {"modules": {"": 3}, "tied": {}}},
        {"structure": {"modules": {}, "tied": []}},
        {"context_length": "x"},
    ],
)
def test_a_damaged_card_is_refused_in_one_line(kept, change):
    change_json(kept / "dunes.json", **change)
    refuses("dunes.json", checkpoint.load, kept, build=build)
