"""Mixtral 8x7B: Mistral whose MLP is a mixture of experts. https://arxiv.org/abs/2401.04088"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama, mistral
from dunes.models.config_values import check_supported
from dunes.models.llama import IGNORED_NAMES
from dunes.models.mixture import EXPERTS, expert_width, mixture, moe_fields, read_moe_fields
from dunes.models.names import Names, name
from dunes.parts import Decoder, MoE

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(mistral.Config):
    """Mistral's config; `hidden` is the width of one expert, and each token is routed to `top_k` of the `experts`.

    `balance` is the coefficient of the load-balancing loss in training.
    """

    experts: int = 8
    top_k: int = 2
    balance: float = 0.001

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch: eight narrow experts, together about as large as a LLaMA's MLP."""
        config = replace(super().from_size(vocab, dim, depth, context_length), window=None)
        return replace(config, hidden=expert_width(dim, config.experts))


def moe(config: Config) -> MoE:
    experts = [llama.mlp(config) for _ in range(config.experts)]
    return mixture(config.dim, experts, config.top_k, balance=config.balance)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, mistral.attention, moe)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model has other parts."""
    block = model.blocks[0]
    config_fields = llama.read_fields(model, context_length, block.mlp.experts[0])
    return Config(**config_fields, window=block.attn.window, **read_moe_fields(block.mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """The Config of a config.json. Raises ValueError for unsupported settings."""
    check_supported(hf, required={"router_jitter_noise": 0.0})
    return Config(
        **mistral.config_fields({"sliding_window": None} | hf, base=1_000_000.0), **moe_fields(hf, balance=0.001)
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of the config.json of this Config."""
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

ALIASES: Names = [name("model.layers.{i}.mlp.gate.weight", "blocks.{i}.mlp.router.weight"), *EXPERTS]
