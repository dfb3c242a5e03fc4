"""What the families with a mixture of experts share."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from dunes.models.config_values import number, size
from dunes.models.names import Names, name
from dunes.parts import MoE

MAX_EXPERTS = 4096
"""No known model has more experts; each is a module, which takes time to build even on the meta device."""


def mixture(dim: int, experts: Sequence[nn.Module], top_k: int, **options: Any) -> MoE:
    """Experts with a linear router; `options` are MoE's."""
    return MoE(nn.Linear(dim, len(experts), bias=False), experts, top_k, **options)


def expert_width(dim: int, experts: int) -> int:
    """The width of an expert if all of them together are about as large as the MLP of a LLaMA."""
    return max(32, round(dim * 8 / 3 / experts / 32) * 32)


def moe_fields(hf: dict[str, Any], balance: float) -> dict[str, Any]:
    """`experts`, `top_k` and `balance` of a Config. Raises ValueError if top_k exceeds the experts."""
    # transformers 5 gives the first name to what Qwen calls the second.
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
    """The same fields of a built layer."""
    return {"experts": len(moe.experts), "top_k": moe.top_k, "balance": moe.balance}


_EXPERTS = "blocks.{i}.mlp.experts.{e}"

EXPERTS: Names = [
    name("model.layers.{i}.mlp.experts.gate_up_proj", f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"),
    name("model.layers.{i}.mlp.experts.down_proj", f"{_EXPERTS}.down.weight"),
]
"""All experts' weights stacked, as transformers 5 holds them in memory."""
