"""GPT-NeoX, such as Pythia: attention and MLP side by side, LayerNorm, a quarter of each head rotated, biases.

https://arxiv.org/abs/2204.06745, https://arxiv.org/abs/2304.01373
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import nn

from dunes.models import llama
from dunes.models.config_values import check_supported, flag, number, quotient, rotary_share
from dunes.models.names import Names, name, per_head, weight_and_bias
from dunes.parts import MLP, Attention, Block, Decoder, Rotary
from dunes.parts.position import PartialRotary

TANH_GELU = partial(F.gelu, approximate="tanh")
TANH_GELU_NAMES = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; `rotary_dim` dimensions of each head are rotated. `parallel` is that of `Block`.

    The MLP's GELU is exact, or with `tanh_gelu` its usual approximation.
    """

    rotary_dim: int
    parallel: bool = True
    tanh_gelu: bool = False

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        base = partial_rotary_fields(vocab, dim, depth, context_length)
        return cls(**base | {"hidden": 4 * dim, "attention_bias": True, "mlp_bias": True})


def partial_rotary_fields(vocab: int, dim: int, depth: int, context_length: int) -> dict[str, Any]:
    """The fields of LLaMA's `from_size` and `rotary_dim`, a quarter; the heads share the width without a rest."""
    base = vars(llama.Config.from_size(vocab, dim, depth, context_length))
    heads = next(n for n in range(base["heads"], 0, -1) if dim % n == 0)
    head_dim = dim // heads
    rotary_dim = max(2, head_dim // 8 * 2)
    return base | {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim}


def attention(config: Any, layer: int, **parts: Any) -> Attention:
    """The attention of a block, rotating `config.rotary_dim` dimensions; `parts` overrides its arguments."""
    rotary = Rotary(config.rotary_dim, config.rope_base, config.scaling)
    position = rotary if config.rotary_dim == config.head_dim else PartialRotary(rotary)
    return llama.attention(config, layer, position=position, **parts)


def mlp(config: Config) -> MLP:
    return MLP(config.dim, config.hidden, TANH_GELU if config.tanh_gelu else F.gelu, config.mlp_bias)


def norm(config: llama.Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.dim, config.eps)


def block(config: Config, attn: nn.Module, mlp: nn.Module) -> Block:
    return Block(norm(config), attn, norm(config), mlp, parallel=config.parallel)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, mlp, block, norm)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    block = model.blocks[0]
    tanh_gelu = getattr(block.mlp.act, "keywords", {}) == TANH_GELU.keywords
    return Config(**read_fields(model, context_length), parallel=block.parallel, tanh_gelu=tanh_gelu)


def read_fields(model: Any, context_length: int) -> dict[str, Any]:
    """The fields of LLaMA's Config and `rotary_dim` of a built model."""
    block = model.blocks[0]
    rotary = getattr(block.attn.position, "rotary", block.attn.position)
    return llama.read_fields(model, context_length, block.mlp) | {"rotary_dim": rotary.head_dim}


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, required={"hidden_dropout": 0.0})
    base, share = number(hf, "rotary_emb_base", 10_000.0, above=1.0), number(hf, "rotary_pct", 0.25)
    tanh_gelu = hf.get("hidden_act") in TANH_GELU_NAMES
    # Each head has keys of its own, and all have an equal share of the width.
    hf = hf | {"num_key_value_heads": None, "head_dim": None, "mlp_bias": True}
    hf |= {"attention_bias": flag(hf, "attention_bias", True), **({"hidden_act": "gelu"} if tanh_gelu else {})}
    quotient(hf, "hidden_size", "num_attention_heads")
    fields = llama.config_fields(hf, "gelu", base, "layer_norm_eps", share)
    return Config(**fields, parallel=flag(hf, "use_parallel_residual", True), tanh_gelu=tanh_gelu)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
    return partial_rotary_to_hf(config, "num_key_value_heads") | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "rotary_emb_base": config.rope_base,
        "rotary_pct": rotary_share(config.rotary_dim, config.head_dim),
        "attention_bias": config.attention_bias,
        "hidden_act": TANH_GELU_NAMES[0] if config.tanh_gelu else "gelu",
        "use_parallel_residual": config.parallel,
    }


def partial_rotary_to_hf(config: Any, *without: str) -> dict[str, Any]:
    """The config.json of a LLaMA of these sizes with LayerNorms of which a part of each head is rotated."""
    hf = llama.to_hf(config)
    share = {"partial_rotary_factor": rotary_share(config.rotary_dim, config.head_dim)}
    for key in ("head_dim", "rms_norm_eps", "attention_bias", "mlp_bias", *without):
        del hf[key]
    return hf | {"layer_norm_eps": config.eps, "rope_parameters": hf["rope_parameters"] | share, **share}


_LAYER, _OURS = "gpt_neox.layers.{i}", "blocks.{i}"

NAMES: Names = [
    name("gpt_neox.embed_in.weight", "embed.token.weight"),
    *weight_and_bias(f"{_LAYER}.input_layernorm", f"{_OURS}.attn_norm"),
    *(
        name(
            f"{_LAYER}.attention.query_key_value.{kind}",
            *(f"{_OURS}.attn.{part}.{kind}" for part in "qkv"),
            load=per_head,
            save=per_head,
        )
        for kind in ("weight", "bias")
    ),
    *weight_and_bias(f"{_LAYER}.attention.dense", f"{_OURS}.attn.out"),
    *weight_and_bias(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.mlp_norm"),
    *weight_and_bias(f"{_LAYER}.mlp.dense_h_to_4h", f"{_OURS}.mlp.up"),
    *weight_and_bias(f"{_LAYER}.mlp.dense_4h_to_h", f"{_OURS}.mlp.down"),
    *weight_and_bias("gpt_neox.final_layer_norm", "norm"),
    name("embed_out.weight", "head.weight"),
]

ALIASES: Names = [name("lm_head.weight", "head.weight")]
"""The head's name in the modules of transformers 5, whose files keep the old one."""

IGNORED_NAMES = tuple(f"{_LAYER}.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq"))
"""Names of causal masks and rotary frequencies, which older versions of transformers stored with the weights."""
