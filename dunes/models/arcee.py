"""Arcee (AFM-4.5B): LLaMA whose MLP is one matrix up, a squared ReLU, one matrix down.

The default for training from scratch: it learns faster than SwiGLU here, per step and per second
(LOG.md), and its folder opens in transformers. https://arxiv.org/abs/2109.08668
"""

from dataclasses import replace
from typing import Any, Self

from dunes.models import llama
from dunes.models.names import Names
from dunes.parts import MLP, Decoder, squared_relu


class Config(llama.Config):
    """Sizes as LLaMA's; by custom the MLP is four times as wide as the model."""

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """A config of this family for training from scratch: width and depth, the rest by custom."""
        return replace(super().sized(vocab, dim, depth, context), hidden=4 * dim)


def mlp(config: Config) -> MLP:
    return MLP(config.dim, config.hidden, squared_relu, bias=config.mlp_bias)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, mlp=mlp)


def read(model: Any, context: int) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    return Config(**llama.sizes_of(model, context, model.blocks[0].mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    return Config(**llama.sizes(hf, act="relu2"))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    return llama.to_hf(config) | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
    }


NAMES: Names = [n for n in llama.NAMES if "gate_proj" not in n.theirs]

IGNORED = llama.IGNORED
