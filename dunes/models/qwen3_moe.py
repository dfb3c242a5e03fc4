"""Qwen3 with a mixture of experts in every block. https://arxiv.org/abs/2505.09388"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import llama, qwen3
from dunes.models.experts import EXPERTS, mixture, moe_sizes, moe_sizes_of, narrow
from dunes.models.llama import IGNORED
from dunes.models.names import Names, name
from dunes.models.words import flag, hf_config, size
from dunes.parts import Decoder, MoE

__all__ = ["ALSO", "IGNORED", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """Sizes as LLaMA's, of which `hidden` is one expert's; a token goes to `top_k` of the `experts`.

    With `renormalise` the weights of a token's experts add up to one. `balance` weighs the loss that
    spreads the tokens over the experts, in training.
    """

    experts: int = 8
    top_k: int = 2
    renormalise: bool = True
    balance: float = 0.001

    @classmethod
    def sized(cls, vocab: int, dim: int, depth: int, context: int) -> Self:
        """For training from scratch: eight narrow experts, together about as large as one LLaMA's MLP."""
        return replace(super().sized(vocab, dim, depth, context), hidden=narrow(dim, cls.experts))


def moe(config: Config) -> MoE:
    experts = [llama.mlp(config) for _ in range(config.experts)]
    return mixture(config.dim, experts, config.top_k, renormalise=config.renormalise, balance=config.balance)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, qwen3.attention, moe)


def read(model: Any, context: int) -> Config:
    """The sizes, read off a built model. Raises AttributeError where the model has other parts."""
    moe = model.blocks[0].mlp
    sizes = llama.sizes_of(model, context, moe.experts[0])
    return Config(**sizes, renormalise=moe.renormalise, **moe_sizes_of(moe))


def from_hf(hf: dict[str, Any]) -> Config:
    """From the keys of a config.json. Raises ValueError for what is not supported."""
    refused = {"decoder_sparse_step": 1, "use_sliding_window": False, "mlp_bias": False, "mlp_only_layers": []}
    hf_config(hf | {"mlp_only_layers": hf.get("mlp_only_layers") or []}, refused)
    sizes = llama.sizes(hf | {"intermediate_size": size(hf, "moe_intermediate_size")})
    return Config(**sizes, renormalise=flag(hf, "norm_topk_prob"), **moe_sizes(hf, balance=0.001))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of a config.json that say the same, with both names for the number of experts."""
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

ALSO: Names = EXPERTS
