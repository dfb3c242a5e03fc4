"""Adapters on disk: PEFT opens ours, we open PEFT's, and what cannot be right is refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dunes import checkpoint, tree
from dunes.augment import Adapted, attach, bare, detach, quantize, select
from dunes.checkpoint.stored import held, moved
from dunes.models import FAMILIES, spellings
from dunes.models.names import to_ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import transformers

LIMIT = 1e-5
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES = {
    "llama": ("llama", COMMON),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
}
IDS = torch.arange(60).view(3, 20)
pytestmark = pytest.mark.filterwarnings("ignore")


def pair(shape):
    """Their model, and ours with the same weights."""
    torch.manual_seed(0)
    family, words = SHAPES[shape]
    special = {"bos_token_id": 0, "eos_token_id": 0}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **{**words, **special})
    ).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, 0.0, 0.2)
    state = {k: v for k, v in theirs.state_dict().items() if "lm_head" not in k or not theirs.config.tie_word_embeddings}
    moves, unknown = to_ours(spellings(family), {k: tuple(w.shape) for k, w in state.items()})
    assert not unknown
    ours = FAMILIES[family].build(FAMILIES[family].from_hf(theirs.config.to_dict())).eval()
    ours.load_state_dict({k: w.read() for k, w in moved(moves, held(state)).items()})
    return theirs, ours


def trained(model, name="default", seed=1):
    """Numbers as after training, in every adapter of that name."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted) and name in module.adapters:
                for p in module[name].parameters():
                    p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    return model


def difference(a, b):
    return (a - b).abs().max().item()


@torch.no_grad()
def their_logits(theirs, folder=None):
    model = theirs if folder is None else peft.PeftModel.from_pretrained(theirs, folder).eval()
    return model(IDS).logits


KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "pissa": {"init": "pissa"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_peft_opens_ours(shape, kind, tmp_path):
    theirs, ours = pair(shape)
    base = their_logits(theirs)
    where = ["blocks.**", "!**.router", *(["!**.experts.**"] if kind == "dora" else [])]
    attach(ours, where=where, rank=4, ranks={"**.mlp.**": 6, "blocks.1.attn.out": 3}, **KINDS[kind])
    trained(ours)
    checkpoint.save_adapter(ours, tmp_path / "a")
    with torch.no_grad():
        said = ours(IDS)
    there = their_logits(theirs, tmp_path / "a")
    print(f"{shape} {kind}: {difference(said, there):.1e}, base {difference(said, base):.1e}")
    assert difference(said, there) <= LIMIT * base.abs().max()
    assert difference(said, base) > 0.1
    select(ours, None)
    assert difference(ours(IDS), base) <= LIMIT * base.abs().max()
    detach(ours)
    checkpoint.load_adapter(ours, tmp_path / "a", "again")
    assert difference(ours(IDS), said) <= LIMIT * base.abs().max()


LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}
THEIRS = {
    "lora": {"rank_pattern": {"q_proj": 2, "c_attn": 5}, "alpha_pattern": {"o_proj": 3, "c_attn": 7}},
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 2, "c_fc": 2}},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("shape", LINEARS)
def test_we_open_pefts(shape, kind, tmp_path):
    theirs, ours = pair(shape)
    words = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS[shape], **THEIRS[kind]}
    if shape == "mixtral" and kind != "dora":
        words["target_modules"] = [*LINEARS[shape], "gate", *([] if kind == "rslora" else ["w1", "w2", "w3"])]
    elif shape == "llama" and kind == "lora":
        words["target_modules"] = [*LINEARS[shape], "embed_tokens"]
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**words)).eval()
    for n, p in adapted.named_parameters():
        if "lora_" in n:
            p.data += torch.randn(p.shape) * 0.1
    adapted.save_pretrained(tmp_path)
    base = ours(IDS)
    checkpoint.load_adapter(ours, tmp_path)
    there = their_logits(adapted)
    print(f"{shape} {kind}: {difference(ours(IDS), there):.1e}")
    assert difference(ours(IDS), there) <= LIMIT * base.abs().max()
    assert difference(there, base) > 0.1
