"""What does not fit is refused in words of the field: changes of other models, and paths that are no models."""

import copy
import io
import sys

import pytest
import torch
from torch import nn

import typed_parts
from conftest import refuses
from dunes import checkpoint
from dunes.augment import apply_change
from dunes.models import FAMILIES
from dunes.parts import Attention, Block, Decoder, Embedding, GatedMLP, MoE, RMSNorm, Rotary
from dunes.text import Tokenizer
from small_models import random_model

IDS = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(0))
CHANGES = {
    "expand": {},
    "experts": {"experts": 4},
    "lora": {"rank": 2, "where": "**"},
    "lora-experts": {"rank": 2, "router": "mlp", "balance": 0},
    "narrow": {"ids": IDS, "experts": 2},
    "prune": {"ids": IDS},
    "quantize": {"kind": "int8"},
    "routing": {"shared": 1},
    "upcycle": {"experts": 4},
}


def stack(attention=lambda: Attention(32, 2, position=Rotary(16)), mlp=lambda: GatedMLP(32, 64), **parts):
    blocks = [Block(RMSNorm(32), attention(), RMSNorm(32), mlp()) for _ in range(2)]
    return Decoder(**{"embed": Embedding(50, 32), "blocks": blocks, "norm": RMSNorm(32)} | parts)


def mixture(expert):
    return lambda: MoE(nn.Linear(32, 4), [expert() for _ in range(4)], 2)


OWN = {
    "mlp": (lambda: stack(mlp=lambda: typed_parts.OwnMLP(32)), "blocks.0.mlp is OwnMLP, not GatedMLP"),
    "attention": (lambda: stack(typed_parts.OwnAttention), "blocks.0.attn is OwnAttention, not Attention"),
    "position": (lambda: stack(lambda: Attention(32, 2)), "blocks.0.attn has position NoneType, not Rotary"),
    "experts": (
        lambda: stack(mlp=mixture(lambda: typed_parts.OwnMLP(32))),
        "blocks.0.mlp.experts.0 is OwnMLP, not GatedMLP",
    ),
    "nested": (
        lambda: stack(mlp=mixture(mixture(lambda: GatedMLP(32, 64)))),
        "blocks.0.mlp.experts.0 is MoE, not GatedMLP",
    ),
    "embedding": (lambda: stack(embed=OwnTable(), head=nn.Linear(32, 50)), "embed is OwnTable, not Embedding"),
    "norm": (lambda: stack(norm=nn.Identity()), "norm is Identity, not RMSNorm"),
    "empty": (lambda: stack(blocks=[]), "it has no blocks.0"),
}


class OwnTable(nn.Module):
    supports_packing = True

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32)

    def forward(self, ids, ctx):
        return self.table(ids)


def changed(model, name):
    """The model after a change, or None after a refusal in one line of the field's words."""
    model = copy.deepcopy(model)
    try:
        apply_change(model, name, **CHANGES[name])
    except ValueError as error:
        reason = str(error)
    else:
        return model
    assert not any(word in reason for word in ("\n", "object has no", "damaged")), reason
    return None


@pytest.mark.slow
@pytest.mark.parametrize("model", [*FAMILIES, *OWN])
def test_a_change_is_made_or_refused_in_one_line_and_the_form_has_a_reason(model):
    start = OWN[model][0]() if model in OWN else random_model(model)
    if model in OWN:
        assert OWN[model][1] in checkpoint.hf_config_of(start, 32)
    for first in map(changed, [start] * len(CHANGES), CHANGES):
        stacked = map(changed, [first] * len(CHANGES), CHANGES) if first and model == "gpt2" else []
        for result in filter(None, [first, *stacked]):
            assert "object has no" not in str(checkpoint.hf_config_of(result, 32))


@pytest.mark.parametrize(
    ("model", "change", "reason"),
    [
        ("experts", "narrow", r"^blocks\.0\.mlp: its experts are OwnMLP; expected MLP or GatedMLP"),
        ("nested", "routing", r"^blocks\.0\.mlp: experts"),
        (
            "embedding",
            "expand",
            r"^embed is OwnTable, which has no place: the change expand does not support this",
        ),
        ("embedding", "narrow", r"^embed is OwnTable, which has no token: the change narrow"),
    ],
)
def test_a_part_without_what_a_change_uses_is_named(model, change, reason):
    refuses(reason, apply_change, OWN[model][0](), change, **CHANGES[change])


def test_an_upcycled_gpt2_says_why_it_has_a_form_of_its_own():
    model = random_model("gpt2")
    apply_change(model, "upcycle", experts=4)
    assert checkpoint.hf_config_of(model, 32) == "blocks.0.mlp is MoE, not MLP"


@pytest.fixture
def paths(tmp_path):
    """Paths that are no model folders, some with a part of what is said of them."""
    for folder in ("src", "empty", "run/state/step-000004", "tuned/state", "weights", "many/one", "config"):
        (tmp_path / folder).mkdir(parents=True)
    for i in range(40):
        (tmp_path / "src" / f"{i}.py").write_text("pass\n")
    (tmp_path / "src" / "state").mkdir()
    (tmp_path / "src" / "state" / "store.py").write_text("pass\n")
    (tmp_path / "tuned/state/plan.json").write_text('{"method": "lora"}')
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    (tmp_path / "config" / "config.json").write_text("{}")
    (tmp_path / "config" / "app.js").write_text("")
    checkpoint.save(random_model("llama"), tmp_path / "many/one", Tokenizer.train("chars", ["a"]), 32)
    return tmp_path, {
        **dict.fromkeys(("src", "src/0.py", "empty", "weights", "config", "many/one/config.json"), ""),
        "run": f"--resume --out {tmp_path / 'run'}",
        "tuned": "--resume",
        "many": f"{tmp_path / 'many/one'}",
        "many/ones": "",
    }


def test_a_path_that_is_no_model_folder_says_what_it_is(paths):
    folder, said = paths
    reads = (checkpoint.load, checkpoint.load_with_tokenizer, checkpoint.load_network, checkpoint.describe)
    for name, reason in said.items():
        for read in reads:
            caught = refuses(".", read, folder / name)
            assert reason in caught.removeprefix(str(folder / name))
            assert caught.startswith(str(folder / name))


VERBS = [
    "generate M", "chat M hello", "complete M", "eval M", "inspect M", "convert M OUT", "export M OUT",
    "export M OUT --to gguf", "compile M", "finetune M --data M/0.py --out OUT", "train M --from M --out OUT",
    "bench decode M", "bench memory M", "augment quantize M OUT", "augment merge M OUT",
    "augment expand --undo M OUT", "generate M --draft M",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_that_a_source_folder_is_no_model(verb, paths, monkeypatch, command, tmp_path):
    folder, _ = paths
    line = [part.replace("M", str(folder / "src")) for part in verb.split()]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    status, _, error = command(*(tmp_path / "OUT" if a == "OUT" else a for a in line))
    assert status == 2
    assert str(folder / "src") in error.splitlines()[-1]
    assert not (tmp_path / "OUT").exists()
