"""Mistral 7B: LLaMA with a sliding window. https://arxiv.org/abs/2310.06825

A Mistral without a window (as in version 0.2 and later) is a LLaMA, and is saved as a LLaMA.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama
from dunes.models.config_values import check_supported, size
from dunes.models.llama import ALIASES, IGNORED_NAMES, NAMES
from dunes.parts import Attention, Decoder

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


DEFAULT_WINDOW = 4096
"""The window for a config.json without the key `sliding_window`, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config and `window`: the number of tokens that a token attends to, itself included (None: all)."""

    window: int | None = None

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the window is half the context length."""
        return replace(super().from_size(vocab, dim, depth, context_length), window=max(1, context_length // 2))


def attention(config: Config, layer: int) -> Attention:
    return llama.attention(config, layer, window=config.window)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    block = model.blocks[0]
    return Config(**llama.read_fields(model, context_length, block.mlp), window=block.attn.window)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    return Config(**config_fields({"sliding_window": DEFAULT_WINDOW} | hf))


def config_fields(hf: dict[str, Any], base: float = 10_000.0) -> dict[str, Any]:
    """The fields of a Config, read from a config.json; a null `sliding_window` means no window."""
    check_supported(hf, required={"attention_bias": False, "mlp_bias": False})
    window = None if hf["sliding_window"] is None else size(hf, "sliding_window", largest=1 << 31)
    return llama.config_fields(hf, base=base) | {"window": window}


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del hf["attention_bias"], hf["mlp_bias"]
    return hf | {"sliding_window": config.window}
