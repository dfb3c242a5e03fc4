"""Qwen3 with a mixture of experts in every block. https://arxiv.org/abs/2505.09388"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama, mixtral, qwen3
from dunes.models.config_values import check_supported, flag, size
from dunes.models.llama import IGNORED_NAMES
from dunes.models.mixtral import EXPERTS, expert_width, experts_to_hf, moe_fields, read_moe_fields
from dunes.models.names import Names, name
from dunes.parts import Decoder, MoE

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; `hidden` is the width of one expert, and each token is routed to `top_k` of the `experts`.

    With `renormalise`, the weights of a token's experts are scaled to sum to one. `balance` is the coefficient of
    the load-balancing loss in training.
    """

    experts: int = 8
    top_k: int = 2
    renormalise: bool = True
    balance: float = 0.001

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch. Its 8 narrow experts are together about as large as LLaMA's MLP."""
        return replace(super().from_size(vocab, dim, depth, context_length), hidden=expert_width(dim, cls.experts))


def moe(config: Config) -> MoE:
    return mixtral.moe(config, renormalise=config.renormalise)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, qwen3.attention, moe)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    moe = model.blocks[0].mlp
    config_fields = llama.read_fields(model, context_length, moe.experts[0])
    return Config(**config_fields, renormalise=moe.renormalise, **read_moe_fields(moe))


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    required = {"decoder_sparse_step": 1, "use_sliding_window": False, "mlp_bias": False, "mlp_only_layers": []}
    check_supported(hf | {"mlp_only_layers": hf.get("mlp_only_layers") or []}, required)
    config_fields = llama.config_fields(hf | {"intermediate_size": size(hf, "moe_intermediate_size")})
    return Config(**config_fields, renormalise=flag(hf, "norm_topk_prob"), **moe_fields(hf, balance=0.001))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json.

    The number of experts is written twice: as `num_experts` and as `num_local_experts`.
    """
    return qwen3.to_hf(config) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.hidden,
        "num_experts": config.experts,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.renormalise,
        "router_aux_loss_coef": config.balance,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **experts_to_hf(config),
    }


_MLP, _OURS = "model.layers.{i}.mlp", "blocks.{i}.mlp"

NAMES: Names = [
    *llama.ATTENTION,
    *qwen3.HEAD_NORMS,
    name(f"{_MLP}.gate.weight", f"{_OURS}.router.weight"),
    *[
        name(f"{_MLP}.experts.{{e}}.{p}_proj.weight", f"{_OURS}.experts.{{e}}.{p}.weight")
        for p in ("gate", "up", "down")
    ],
]

ALIASES: Names = EXPERTS
