"""StableLM (3B, Stable Code 3B, StableLM 2 1.6B): LLaMA with LayerNorm and a quarter of each head rotated.

https://arxiv.org/abs/2402.17834
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from dunes.models import llama
from dunes.models.config_values import check_supported, flag, rotary_share
from dunes.models.names import Names, name
from dunes.parts import Attention, Block, Decoder, Rotary
from dunes.parts.position import PartialRotary


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; `rotary_dim` dimensions of each head are rotated, and attention's `out` never has a bias."""

    rotary_dim: int

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the heads divide the width evenly."""
        base = vars(llama.Config.from_size(vocab, dim, depth, context_length))
        base["head_dim"] = dim // base["heads"]
        return cls(**base, rotary_dim=max(2, base["head_dim"] // 8 * 2))


def attention(config: Config, layer: int, out_bias: bool = False) -> Attention:
    rotary = Rotary(config.rotary_dim, config.rope_base, config.scaling)
    position = rotary if config.rotary_dim == config.head_dim else PartialRotary(rotary)
    return llama.attention(config, layer, position=position, out_bias=out_bias)


def norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.dim, config.eps)


def block(config: Config, attn: nn.Module, mlp: nn.Module, parallel: bool = False) -> Block:
    return Block(norm(config), attn, norm(config), mlp, parallel=parallel)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, block=block, norm=norm)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    return Config(**read_fields(model, context_length))


def read_fields(model: Any, context_length: int) -> dict[str, Any]:
    """The fields of the Config of a built model."""
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    rotary = getattr(attn.position, "rotary", attn.position)
    own = {"attention_bias": attn.q.bias is not None, "rotary_dim": rotary.head_dim}
    return llama.read_fields(model, context_length, mlp) | own


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    # Parallel blocks with a shared norm, and norms of queries and keys with weights per head, are not supported.
    check_supported(hf, required={"use_parallel_residual": False, "qk_layernorm": False})
    return Config(**config_fields(hf | {"mlp_bias": False, "attention_bias": flag(hf, "use_qkv_bias")}))


def config_fields(hf: dict[str, Any], act: str = "silu", base: float = 1e4, share: float = 0.25) -> dict[str, Any]:
    """The fields of a Config. `base` and `share` are the defaults of rope_theta and of the rotated share."""
    check_supported(hf, required={"hidden_dropout": 0.0})
    return llama.config_fields(hf | {"head_dim": None}, act, base, "layer_norm_eps", share)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
    hf, share = llama.to_hf(config), rotary_share(config.rotary_dim, config.head_dim)
    for key in ("head_dim", "rms_norm_eps", "attention_bias", "mlp_bias"):
        del hf[key]
    return hf | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "layer_norm_eps": config.eps,
        "partial_rotary_factor": share,
        "rope_parameters": hf["rope_parameters"] | {"partial_rotary_factor": share},
        "use_qkv_bias": config.attention_bias,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    }


NAMES: Names = [
    *llama.NAMES,
    name("model.layers.{i}.input_layernorm.bias", "blocks.{i}.attn_norm.bias"),
    name("model.layers.{i}.post_attention_layernorm.bias", "blocks.{i}.mlp_norm.bias"),
    name("model.norm.bias", "norm.bias"),
]

IGNORED_NAMES = llama.IGNORED_NAMES
