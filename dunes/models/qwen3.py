"""Qwen3: LLaMA with an RMSNorm on each head's queries and keys. https://arxiv.org/abs/2505.09388

The norms keep training stable at high learning rates.
"""

from typing import Any

from dunes.models import llama
from dunes.models.config_values import check_supported, refuse_mixed_windows
from dunes.models.llama import IGNORED_NAMES, Config, read
from dunes.models.names import Names, name
from dunes.parts import Attention, Decoder, RMSNorm

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def attention(config: Config, layer: int) -> Attention:
    q_norm, k_norm = (RMSNorm(config.head_dim, config.eps) for _ in "qk")
    return llama.attention(config, layer, q_norm=q_norm, k_norm=k_norm)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    refuse_mixed_windows(hf)
    check_supported(hf, required={"mlp_bias": False})
    return Config(**llama.config_fields({"head_dim": 128, **hf}))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    del hf["mlp_bias"]
    return hf | {"use_sliding_window": False, "sliding_window": None}


HEAD_NORMS: Names = [
    name(f"model.layers.{{i}}.self_attn.{p}_norm.weight", f"blocks.{{i}}.attn.{p}_norm.weight") for p in "qk"
]

NAMES: Names = [*llama.NAMES, *HEAD_NORMS]
