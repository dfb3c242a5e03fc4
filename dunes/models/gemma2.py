"""Gemma 2: norms before and after attention and MLP, capped scores and logits, a window in every other layer.

https://arxiv.org/abs/2408.00118
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch.nn.functional as F
from torch import nn

from dunes.models import llama
from dunes.models.config_values import check_supported, layer_windows, layer_windows_to_hf, optional, size
from dunes.models.llama import IGNORED_NAMES, refusal
from dunes.models.names import Names, name
from dunes.parts import Attention, Block, Decoder, Embedding, GatedMLP
from dunes.parts.layers import ZeroCenteredRMSNorm

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "refusal", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config, with a window for each layer. Scores are divided by sqrt(`query_scalar`)."""

    windows: tuple[int | None, ...]
    query_scalar: int
    softcap: float | None = 50.0
    logit_softcap: float | None = 30.0

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; windows are half the context length."""
        base = vars(llama.Config.from_size(vocab, dim, depth, context_length))
        windows = tuple(None if i % 2 else max(1, context_length // 2) for i in range(depth))
        return cls(**base, windows=windows, query_scalar=base["head_dim"])


C = TypeVar("C", bound=Config)


def attention(config: Config, layer: int, **parts: Any) -> Attention:
    """The attention of a block; `parts` are further arguments of `Attention`."""
    window, scale = config.windows[layer % len(config.windows)], config.query_scalar**-0.5
    return llama.attention(config, layer, window=window, scale=scale, softcap=config.softcap, **parts)


def block(config: Config, attn: nn.Module, mlp: nn.Module) -> Block:
    norms = [ZeroCenteredRMSNorm(config.dim, config.eps) for _ in range(4)]
    return Block(norms[0], attn, norms[1], mlp, attn_post_norm=norms[2], mlp_post_norm=norms[3])


def mlp(config: Config) -> GatedMLP:
    return GatedMLP(config.dim, config.hidden, partial(F.gelu, approximate="tanh"))


def build(config: C, attention: Callable[[C, int], Attention] = attention) -> Decoder:
    """Build the model of this config, untrained."""
    model = llama.build(config, attention, mlp, block)
    embed, norm = (
        Embedding(config.vocab, config.dim, scale=config.dim**0.5),
        ZeroCenteredRMSNorm(config.dim, config.eps),
    )
    return Decoder(embed, [*model.blocks], norm, model.head, config.logit_softcap)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    return Config(**read_fields(model, context_length))


def read_fields(model: Any, context_length: int) -> dict[str, Any]:
    """The fields of the Config of a built model."""
    attn = model.blocks[0].attn
    return llama.read_fields(model, context_length, model.blocks[0].mlp) | {
        "windows": tuple(block.attn.window for block in model.blocks),
        "query_scalar": round(attn.scale**-2),
        "softcap": attn.softcap,
        "logit_softcap": model.softcap,
    }


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | hf
    return Config(**config_fields(hf, [i % 2 == 0 for i in range(size(hf, "num_hidden_layers"))]))


def config_fields(hf: dict[str, Any], windowed: Sequence[bool]) -> dict[str, Any]:
    """The fields of a Config. In a file without `layer_types`, layer i has a window if `windowed[i]`."""
    hf = {"tie_word_embeddings": True, "sliding_window": 4096, "head_dim": 256, "query_pre_attn_scalar": 256} | hf
    hf = {**hf, "use_bidirectional_attention": hf.get("use_bidirectional_attention") or False}
    check_supported(hf, {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False})
    return llama.config_fields(hf | {"hidden_act": "silu", "mlp_bias": False}) | {
        "windows": layer_windows(hf, windowed),
        "query_scalar": size(hf, "query_pre_attn_scalar"),
        "softcap": optional(hf, "attn_logit_softcapping"),
        "logit_softcap": optional(hf, "final_logit_softcapping"),
    }


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | layer_windows_to_hf(config.windows, config.context_length)
    del hf["hidden_act"], hf["mlp_bias"]
    return hf | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_scalar,
        "attn_logit_softcapping": config.softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


PLACES = {"post_attention": "attn_post_norm", "pre_feedforward": "mlp_norm", "post_feedforward": "mlp_post_norm"}
NAMES: Names = [
    *(n for n in llama.NAMES if "post_attention_layernorm" not in n.theirs),
    *(name(f"model.layers.{{i}}.{t}_layernorm.weight", f"blocks.{{i}}.{o}.weight") for t, o in PLACES.items()),
]
