"""Dunes: Arcee, in whose first layer a token attends only to itself and the token before it.

This family is the default for training from scratch. To continue an earlier occurrence of a token
(https://arxiv.org/abs/2209.11895), attention needs keys that depend on the token before theirs. The first layer
computes these from the start, so it need not learn to attend one token back (docs/log/training.md, "A first layer
that sees two tokens"). Only dunes can load models of this family.
"""

from dataclasses import dataclass
from typing import Any, Self

from dunes.models import arcee, llama
from dunes.models.arcee import IGNORED_NAMES, NAMES
from dunes.models.config_values import layer_windows, layer_windows_to_hf, size
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "refusal", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(arcee.Config):
    """Arcee's config and the windows of the layers: the tokens a token attends to, itself included (None: all)."""

    windows: tuple[int | None, ...]

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch."""
        base = vars(arcee.Config.from_size(vocab, dim, depth, context_length))
        return cls(**base, windows=(2 if depth > 1 else None, *[None] * (depth - 1)))


def attention(config: Config, layer: int) -> Attention:
    return llama.attention(config, layer, window=config.windows[layer % len(config.windows)])


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, arcee.mlp)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part, and ValueError if no
    layer has a window, since the model is an Arcee."""
    windows = tuple(block.attn.window for block in model.blocks)
    if not any(windows):
        raise ValueError("no layer has a window")
    return Config(**vars(arcee.read(model, context_length)), windows=windows)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a config.json to a Config. Raises ValueError for unsupported settings."""
    first = [layer == 0 for layer in range(size(hf, "num_hidden_layers"))]
    return Config(**vars(arcee.from_hf(hf)), windows=layer_windows({"sliding_window": 2} | hf, first))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a config.json."""
    hf = arcee.to_hf(config) | layer_windows_to_hf(config.windows, config.context_length)
    return hf | {"architectures": ["DunesForCausalLM"], "model_type": "dunes"}


def refusal(config: Config) -> str:
    """The reason why transformers does not run the model: it knows no such family."""
    return "it knows no family of this name; train with --family arcee for a model that it knows"
