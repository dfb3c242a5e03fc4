"""StableLM (3B, Stable Code, 2 1.6B): LLaMA with LayerNorm and a quarter of each head rotated.

https://arxiv.org/abs/2402.17834
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from dunes.models import gpt_neox, llama
from dunes.models.config_values import check_supported, flag
from dunes.models.gpt_neox import norm
from dunes.models.llama import IGNORED_NAMES
from dunes.models.names import Names, name
from dunes.parts import Attention, Block, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; `rotary_dim` dimensions of each head are rotated.

    `attention_bias` adds biases to queries, keys and values only.
    """

    rotary_dim: int

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        return cls(**gpt_neox.partial_rotary_fields(vocab, dim, depth, context_length))


def attention(config: Config, layer: int) -> Attention:
    return gpt_neox.attention(config, layer, out_bias=False)


def block(config: Config, attn: nn.Module, mlp: nn.Module) -> Block:
    return Block(norm(config), attn, norm(config), mlp)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, block=block, norm=norm)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    biased = model.blocks[0].attn.q.bias is not None
    return Config(**gpt_neox.read_fields(model, context_length) | {"attention_bias": biased})


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    # A parallel block has one norm for both parts, and norms of queries and keys have weights for each head.
    refused = {"use_parallel_residual": False, "qk_layernorm": False, "hidden_dropout": 0.0}
    check_supported(hf, refused)
    hf = hf | {"head_dim": None, "mlp_bias": False, "attention_bias": flag(hf, "use_qkv_bias")}
    return Config(**llama.config_fields(hf, eps="layer_norm_eps", partial=0.25))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
    return gpt_neox.partial_rotary_to_hf(config) | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
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
