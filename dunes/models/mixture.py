"""Shared code of the families with a mixture of experts."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from dunes.models.config_values import number, size
from dunes.models.names import Names, name
from dunes.parts import MoE

MAX_EXPERTS = 4096
"""Maximum number of experts, above all known models; building them takes time even on the meta device."""


def mixture(dim: int, experts: Sequence[nn.Module], top_k: int, **options: Any) -> MoE:
    """Experts with a linear router; `options` are MoE's."""
    return MoE(nn.Linear(dim, len(experts), bias=False), experts, top_k, **options)


def expert_width(dim: int, experts: int) -> int:
    """Width of an expert such that all experts together are about as large as a LLaMA's MLP."""
    return max(32, round(dim * 8 / 3 / experts / 32) * 32)


def moe_fields(hf: dict[str, Any], balance: float) -> dict[str, Any]:
    """`experts`, `top_k` and `balance` of a Config. Raises ValueError if top_k exceeds the experts."""
    # transformers 5 writes num_local_experts where Qwen writes num_experts.
    key = "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts"
    experts, top_k = size(hf, key, largest=MAX_EXPERTS), size(hf, "num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"config.json: num_experts_per_tok is {top_k}, more than {key}, {experts}")
    zero = hf.get("router_aux_loss_coef") == 0
    return {
        "experts": experts,
        "top_k": top_k,
        "balance": 0.0 if zero else number(hf, "router_aux_loss_coef", balance),
    }


def read_moe_fields(moe: MoE) -> dict[str, Any]:
    """`experts`, `top_k` and `balance` of a built layer."""
    return {"experts": len(moe.experts), "top_k": moe.top_k, "balance": moe.balance}


_EXPERTS = "blocks.{i}.mlp.experts.{e}"

EXPERTS: Names = [
    name("model.layers.{i}.mlp.experts.gate_up_proj", f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"),
    name("model.layers.{i}.mlp.experts.down_proj", f"{_EXPERTS}.down.weight"),
]
"""Stacked weights of all experts, as in transformers 5."""
