"""Arcee (AFM-4.5B): LLaMA whose MLP is one matrix up, a squared ReLU, one matrix down.

The default for training from scratch: it learns faster than SwiGLU here, per step and per second
(docs/log/training.md, "Which form to train from scratch"), and transformers opens its folder.
https://arxiv.org/abs/2109.08668
"""

from dataclasses import replace
from typing import Any, Self

from dunes.models import llama
from dunes.models.names import Names
from dunes.parts import MLP, Decoder, squared_relu


class Config(llama.Config):
    """Like LLaMA's; customarily the MLP is four times as wide as the model."""

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this family for training from scratch, from its width and depth; the rest is customary."""
        return replace(super().from_size(vocab, dim, depth, context_length), hidden=4 * dim)


def mlp(config: Config) -> MLP:
    return MLP(config.dim, config.hidden, squared_relu, bias=config.mlp_bias)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, mlp=mlp)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model has other parts."""
    return Config(**llama.read_fields(model, context_length, model.blocks[0].mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    return Config(**llama.config_fields(hf, act="relu2"))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of the config.json of this Config."""
    return llama.to_hf(config) | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
    }


NAMES: Names = [n for n in llama.NAMES if "gate_proj" not in n.theirs]

IGNORED_NAMES = llama.IGNORED_NAMES
