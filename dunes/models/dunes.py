"""Dunes: Arcee, in whose first layers a token attends only to itself and the token before it.

To continue an earlier occurrence of a token (https://arxiv.org/abs/2209.11895), attention needs keys that depend
on the tokens before theirs. The first layers compute these from the start, so they need not learn to attend one
token back. On code, this is far better after three minutes of training and equal after fifteen
(docs/log/training.md, "First layers that see two tokens"). Only dunes can load models of this family.
"""

from dataclasses import dataclass
from typing import Any, Self

from dunes.models import arcee, llama
from dunes.models.arcee import IGNORED_NAMES, NAMES
from dunes.models.config_values import layer_windows, layer_windows_to_hf, size
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "refusal", "to_hf"]

PAIR, PAIR_LAYERS = 2, 2
"""Window of the first layers, the token itself included, and the number of these layers."""


def window(layer: int, depth: int) -> int | None:
    """The window of a layer in a new model; the last layer has none."""
    return PAIR if layer < min(PAIR_LAYERS, depth - 1) else None


@dataclass(frozen=True, kw_only=True)
class Config(arcee.Config):
    """Arcee's config, with a window for each layer, or None."""

    windows: tuple[int | None, ...]

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch."""
        base = vars(arcee.Config.from_size(vocab, dim, depth, context_length))
        return cls(**base, windows=tuple(window(layer, depth) for layer in range(depth)))


def attention(config: Config, layer: int) -> Attention:
    return llama.attention(config, layer, window=config.windows[layer % len(config.windows)])


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, arcee.mlp)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part, and ValueError if no
    layer has a window of PAIR."""
    windows = tuple(block.attn.window for block in model.blocks)
    if PAIR not in windows:
        raise ValueError(f"no layer has a window of {PAIR}")
    return Config(**vars(arcee.read(model, context_length)), windows=windows)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a config.json to a Config. Raises ValueError for unsupported settings."""
    windows = layer_windows(hf, [False] * size(hf, "num_hidden_layers"))
    return Config(**vars(arcee.from_hf(hf)), windows=windows)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a config.json."""
    hf = arcee.to_hf(config) | layer_windows_to_hf(config.windows, config.context_length)
    return hf | {"architectures": ["DunesForCausalLM"], "model_type": "dunes"}


def refusal(config: Config) -> str:
    """The reason why transformers does not run the model."""
    return "it knows no family of this name; train with --family arcee for a model that it knows"
