"""Mistral 7B: LLaMA with a sliding window. https://arxiv.org/abs/2310.06825

Without a window (as from v0.2 on) it is a LLaMA, and is saved as one.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama
from dunes.models.llama import IGNORED, NAMES
from dunes.models.words import hf_config, size
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


UNSAID = 4096
"""The window where a config.json does not mention one, as transformers has it."""


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A token sees `window` tokens, itself included; None: all before it."""

    window: int | None = None

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """A config of this family for training from scratch: by custom the window is half the context."""
        return replace(super().sized(vocab, dim, depth, context), window=max(1, context // 2))


def attention(config: Config) -> Attention:
    return llama.attention(config, window=config.window)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, attention)


def read(model: Any, context: int) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    block = model.blocks[0]
    return Config(**llama.sizes_of(model, context, block.mlp), window=block.attn.window)


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    return Config(**sizes({"sliding_window": UNSAID} | hf))


def sizes(hf: dict[str, Any], base: float = 10_000.0) -> dict[str, Any]:
    """The fields of a Config; a window of null means that there is none."""
    hf_config(hf, refused={"attention_bias": False, "mlp_bias": False})
    window = None if hf["sliding_window"] is None else size(hf, "sliding_window", largest=1 << 31)
    return llama.sizes(hf, base=base) | {"window": window}


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    words = llama.to_hf(config) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del words["attention_bias"], words["mlp_bias"]
    return words | {"sliding_window": config.window}
