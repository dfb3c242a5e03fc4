"""Arcee (AFM-4.5B): LLaMA with a two-matrix MLP that uses squared ReLU. https://arxiv.org/abs/2109.08668

This family is the default for training from scratch. In this project's measurements this MLP learns faster than
SwiGLU, per step and per second (docs/log/training.md, "Which form to train from scratch"). transformers can load
models of this family.
"""

from dataclasses import replace
from typing import Any, Self

from dunes.models import llama
from dunes.models.names import Names
from dunes.parts import MLP, Decoder, squared_relu


class Config(llama.Config):
    """LLaMA's config; by convention the MLP is four times as wide as the model."""

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; the other sizes are conventional."""
        return replace(super().from_size(vocab, dim, depth, context_length), hidden=4 * dim)


def mlp(config: Config) -> MLP:
    return MLP(config.dim, config.hidden, squared_relu, bias=config.mlp_bias)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, mlp=mlp)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    return Config(**llama.read_fields(model, context_length, model.blocks[0].mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    return Config(**llama.config_fields(hf, act="relu2"))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    return llama.to_hf(config) | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
    }


NAMES: Names = [n for n in llama.NAMES if "gate_proj" not in n.theirs]

IGNORED_NAMES, refusal = llama.IGNORED_NAMES, llama.refusal
