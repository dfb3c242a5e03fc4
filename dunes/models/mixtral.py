"""Mixtral 8x7B: Mistral whose MLP is a mixture of experts. https://arxiv.org/abs/2401.04088"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama, mistral
from dunes.models.experts import EXPERTS, mixture, moe_sizes, moe_sizes_of, narrow
from dunes.models.llama import IGNORED
from dunes.models.names import Names, name
from dunes.models.words import hf_config
from dunes.parts import Decoder, MoE

__all__ = ["ALSO", "IGNORED", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(mistral.Config):
    """Sizes as Mistral's, of which `hidden` is one expert's; a token goes to `top_k` of the `experts`.

    `balance` weighs the loss that spreads the tokens over the experts, in training.
    """

    experts: int = 8
    top_k: int = 2
    balance: float = 0.001

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """For training from scratch: eight narrow experts, together about as large as one LLaMA's MLP."""
        config = replace(super().sized(vocab, dim, depth, context), window=None)
        return replace(config, hidden=narrow(dim, config.experts))


def moe(config: Config) -> MoE:
    experts = [llama.mlp(config) for _ in range(config.experts)]
    return mixture(config.dim, experts, config.top_k, balance=config.balance)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, mistral.attention, moe)


def read(model: Any, context: int) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    block = model.blocks[0]
    sizes = llama.sizes_of(model, context, block.mlp.experts[0])
    return Config(**sizes, window=block.attn.window, **moe_sizes_of(block.mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    hf_config(hf, refused={"router_jitter_noise": 0.0})
    return Config(**mistral.sizes({"sliding_window": None} | hf, base=1_000_000.0), **moe_sizes(hf, balance=0.001))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    return mistral.to_hf(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance,
        "router_jitter_noise": 0.0,
    }


_MOE = "model.layers.{i}.block_sparse_moe"

NAMES: Names = [
    *llama.ATTENTION,
    name(f"{_MOE}.gate.weight", "blocks.{i}.mlp.router.weight"),
    name(f"{_MOE}.experts.{{e}}.w1.weight", "blocks.{i}.mlp.experts.{e}.gate.weight"),
    name(f"{_MOE}.experts.{{e}}.w3.weight", "blocks.{i}.mlp.experts.{e}.up.weight"),
    name(f"{_MOE}.experts.{{e}}.w2.weight", "blocks.{i}.mlp.experts.{e}.down.weight"),
]

ALSO: Names = [name("model.layers.{i}.mlp.gate.weight", "blocks.{i}.mlp.router.weight"), *EXPERTS]
