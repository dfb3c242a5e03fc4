"""Mixtral 8x7B: Mistral with a mixture of experts in place of each MLP. https://arxiv.org/abs/2401.04088

Other families with experts reuse `mixture`, `moe_fields`, `read_moe_fields` and `EXPERTS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from dunes.models import llama, mistral
from dunes.models.config_values import check_supported, number, size
from dunes.models.llama import IGNORED_NAMES
from dunes.models.names import Names, name
from dunes.parts import Decoder, MoE

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]

MAX_EXPERTS = 4096
"""Maximum number of experts. Known models have fewer; building more would take long even on the meta device."""


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
        """A config for training from scratch. Its 8 narrow experts are together about as large as LLaMA's MLP."""
        config = replace(super().from_size(vocab, dim, depth, context_length), window=None)
        return replace(config, hidden=expert_width(dim, config.experts))


def mixture(dim: int, experts: Sequence[nn.Module], top_k: int, bias: bool = False, **options: Any) -> MoE:
    """A mixture of these experts with a linear router; `options` are further arguments of `MoE`."""
    return MoE(nn.Linear(dim, len(experts), bias), experts, top_k, **options)


def expert_width(dim: int, experts: int) -> int:
    """The width of an expert at which all experts together are about as large as LLaMA's MLP."""
    return max(32, round(dim * 8 / 3 / experts / 32) * 32)


def moe_fields(hf: dict[str, Any], balance: float) -> dict[str, Any]:
    """The fields `experts`, `top_k` and `balance` of a Config, read from a config.json.

    The argument `balance` is the default of the field `balance`. Raises ValueError if top_k exceeds the number of
    experts.
    """
    # num_experts in Qwen's files, but num_local_experts from transformers 5; n_routed_experts in DeepSeek's.
    names = ("n_routed_experts", "num_local_experts")
    key = next((name for name in names if hf.get(name) is not None), "num_experts")
    experts, top_k = size(hf, key, largest=MAX_EXPERTS), size(hf, "num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"config.json: num_experts_per_tok is {top_k}, more than {key}, {experts}")
    zero = hf.get("router_aux_loss_coef") == 0
    return {
        "experts": experts,
        "top_k": top_k,
        "balance": 0.0 if zero else number(hf, "router_aux_loss_coef", balance),
    }


def experts_to_hf(config: Any) -> dict[str, Any]:
    """The setting in config.json that transformers needs to run experts of this width; empty if none is needed.

    By default, transformers uses `F.grouped_mm`, which needs rows whose size is a multiple of 16 bytes.
    """
    return {"experts_implementation": "eager"} if config.dim % 8 or config.hidden % 8 else {}


def read_moe_fields(moe: MoE) -> dict[str, Any]:
    """The fields `experts`, `top_k` and `balance` of a Config, read from a built layer."""
    return {"experts": len(moe.experts), "top_k": moe.top_k, "balance": moe.balance}


def moe(config: Any, **options: Any) -> MoE:
    """A mixture of experts. `config` has `experts`, `top_k` and `balance`; `options` are passed to `MoE`."""
    experts = [llama.mlp(config) for _ in range(config.experts)]
    return mixture(config.dim, experts, config.top_k, balance=config.balance, **options)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, mistral.attention, moe)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    block = model.blocks[0]
    config_fields = llama.read_fields(model, context_length, block.mlp.experts[0])
    return Config(**config_fields, window=block.attn.window, **read_moe_fields(block.mlp))


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, required={"router_jitter_noise": 0.0})
    return Config(
        **mistral.config_fields({"sliding_window": None} | hf, base=1_000_000.0), **moe_fields(hf, balance=0.001)
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    return mistral.to_hf(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance,
        "router_jitter_noise": 0.0,
        **experts_to_hf(config),
    }


_MOE = "model.layers.{i}.block_sparse_moe"

NAMES: Names = [
    *llama.ATTENTION,
    name(f"{_MOE}.gate.weight", "blocks.{i}.mlp.router.weight"),
    name(f"{_MOE}.experts.{{e}}.w1.weight", "blocks.{i}.mlp.experts.{e}.gate.weight"),
    name(f"{_MOE}.experts.{{e}}.w3.weight", "blocks.{i}.mlp.experts.{e}.up.weight"),
    name(f"{_MOE}.experts.{{e}}.w2.weight", "blocks.{i}.mlp.experts.{e}.down.weight"),
]

_EXPERTS = "blocks.{i}.mlp.experts.{e}"

EXPERTS: Names = [
    name("model.layers.{i}.mlp.experts.gate_up_proj", f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"),
    name("model.layers.{i}.mlp.experts.down_proj", f"{_EXPERTS}.down.weight"),
]
"""Weight names in transformers 5, which stacks the weights of all experts of a layer in one tensor."""

ALIASES: Names = [name("model.layers.{i}.mlp.gate.weight", "blocks.{i}.mlp.router.weight"), *EXPERTS]
