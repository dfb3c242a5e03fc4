"""Qwen3: LLaMA with a norm on each head's queries and keys. https://arxiv.org/abs/2505.09388

The norms keep it stable at high learning rates.
"""

from typing import Any

from dunes.models import llama
from dunes.models.llama import IGNORED, Config, read
from dunes.models.names import Names, name
from dunes.models.words import hf_config, no_windows
from dunes.parts import Attention, Decoder, RMSNorm

__all__ = ["IGNORED", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def attention(config: Config) -> Attention:
    q_norm, k_norm = (RMSNorm(config.head_dim, config.eps) for _ in "qk")
    return llama.attention(config, q_norm=q_norm, k_norm=k_norm)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, attention)


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    no_windows(hf)
    hf_config(hf, refused={"mlp_bias": False})
    return Config(**llama.sizes({"head_dim": 128, **hf}))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    words = llama.to_hf(config) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    del words["mlp_bias"]
    return words | {"use_sliding_window": False, "sliding_window": None}


HEAD_NORMS: Names = [
    name(f"model.layers.{{i}}.self_attn.{p}_norm.weight", f"blocks.{{i}}.attn.{p}_norm.weight") for p in "qk"
]

NAMES: Names = [*llama.NAMES, *HEAD_NORMS]
