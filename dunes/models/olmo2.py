"""OLMo 2: LLaMA with norms after attention and MLP, and norms over the queries and the keys of all heads.

https://arxiv.org/abs/2501.00656
"""

from typing import Any

import torch
from torch import Tensor, nn

from dunes.models import llama
from dunes.models.config_values import check_supported
from dunes.models.llama import IGNORED_NAMES, Config, norm, read
from dunes.models.names import Names, name
from dunes.models.qwen3 import HEAD_NORMS
from dunes.parts import Attention, Block, Decoder, RMSNorm

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


class JointNorm(RMSNorm):
    """An RMSNorm over all heads of a token together: (..., H, D) -> (..., H, D)."""

    supports_packing = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.unflatten(super().forward(x.flatten(-2)), -1, x.shape[-2:])


def attention(config: Config, layer: int) -> Attention:
    q_norm, k_norm = (JointNorm(n * config.head_dim, config.eps) for n in (config.heads, config.kv_heads))
    return llama.attention(config, layer, q_norm=q_norm, k_norm=k_norm)


def block(config: Config, attn: nn.Module, mlp: nn.Module) -> Block:
    before = nn.Identity(), nn.Identity()
    return Block(before[0], attn, before[1], mlp, attn_post_norm=norm(config), mlp_post_norm=norm(config))


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, block=block)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, required={"mlp_bias": False})
    return Config(**llama.config_fields(hf))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    del hf["mlp_bias"]
    return hf


LAYER = "model.layers.{i}"
NAMES: Names = [
    *(n for n in llama.NAMES if "layernorm" not in n.theirs),
    name(f"{LAYER}.post_attention_layernorm.weight", "blocks.{i}.attn_post_norm.weight"),
    name(f"{LAYER}.post_feedforward_layernorm.weight", "blocks.{i}.mlp_post_norm.weight"),
    *HEAD_NORMS,
]
