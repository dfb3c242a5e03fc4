"""Qwen3: LLaMA with a norm on each head's queries and keys. https://arxiv.org/abs/2505.09388

The norms keep it stable at high learning rates.
"""

from typing import Any

from dunes.models import llama
from dunes.models.llama import Config
from dunes.models.names import Names, name
from dunes.models.words import hf_config
from dunes.parts import Attention, Decoder, RMSNorm, Rotary

__all__ = ["NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def attention(config: Config) -> Attention:
    return Attention(
        config.dim,
        config.heads,
        config.kv_heads,
        head_dim=config.head_dim,
        position=Rotary(config.head_dim, config.rope_base),
        q_norm=RMSNorm(config.head_dim, config.eps),
        k_norm=RMSNorm(config.head_dim, config.eps),
    )


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, attention)


read = llama.read


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    hf_config(hf, refused={"use_sliding_window": False})
    return llama.from_hf(hf)


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    words = llama.to_hf(config) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    del words["mlp_bias"]
    return words | {"use_sliding_window": False, "sliding_window": None}


NAMES: Names = [
    *llama.NAMES,
    name("model.layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attn.q_norm.weight"),
    name("model.layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attn.k_norm.weight"),
]
