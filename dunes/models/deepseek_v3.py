"""DeepSeek V3: latent attention; a few dense MLPs, then experts with sigmoid routing and a shared expert.

https://arxiv.org/abs/2412.19437
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from dunes.models import llama
from dunes.models.config_values import check_supported, flag, number, size, yarn_scale
from dunes.models.mixtral import EXPERTS, expert_width, experts_to_hf, mixture, moe_fields, read_moe_fields
from dunes.models.names import Names, name, weight_and_bias
from dunes.parts import Decoder, Embedding, GatedMLP, MoE, Rotary
from dunes.parts.latent_attention import LatentAttention
from dunes.parts.moe import check_groups


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config. Queries and keys have `head_dim` dimensions, of which `rope_dim` encode positions.

    `kv_rank`, `q_rank` and `value_dim` are arguments of `LatentAttention`. The first `dense` layers have MLPs of
    width `dense_hidden`. Later layers have `experts` of width `hidden`, and a shared expert that is `shared` times
    as wide; `factor`, `groups`, `top_groups`, `renormalise` and `balance` are arguments of `MoE`. With `adjacent`,
    rotary positions rotate pairs of adjacent dimensions. With `mscale`, scores are multiplied by the square of
    `yarn_scale(scaling.factor, mscale)`.
    """

    kv_rank: int
    q_rank: int | None = None
    rope_dim: int
    value_dim: int
    dense: int = 1
    dense_hidden: int
    experts: int = 8
    top_k: int = 2
    shared: int = 1
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    balance: float = 0.001
    adjacent: bool = True
    mscale: float = 0.0

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch: a dense layer, then layers of 8 narrow experts and a shared one."""
        base = llama.Config.from_size(vocab, dim, depth, context_length)
        return cls(
            **vars(base) | {"hidden": expert_width(dim, cls.experts), "dense_hidden": base.hidden},
            kv_rank=max(32, round(dim / 4 / 32) * 32),
            rope_dim=base.head_dim // 2,
            value_dim=base.head_dim,
            dense=min(1, depth - 1),
        )


_ROUTING = ("renormalise", "factor", "groups", "top_groups")


def attention(config: Config) -> LatentAttention:
    growth = yarn_scale(getattr(config.scaling, "factor", 1.0), config.mscale)
    return LatentAttention(
        *(config.dim, config.heads, config.kv_rank, config.q_rank),
        nope_dim=config.head_dim - config.rope_dim,
        rope_dim=config.rope_dim,
        value_dim=config.value_dim,
        position=Rotary(config.rope_dim, config.rope_base, config.scaling, config.adjacent),
        scale=None if growth == 1 else config.head_dim**-0.5 * growth * growth,
        bias=config.attention_bias,
    )


def mlp(config: Config, layer: int) -> nn.Module:
    if layer < config.dense:
        return GatedMLP(config.dim, config.dense_hidden)
    return mixture(
        config.dim,
        [llama.mlp(config) for _ in range(config.experts)],
        config.top_k,
        shared=[GatedMLP(config.dim, config.shared * config.hidden)],
        biased=True,
        sigmoid=True,
        balance=config.balance,
        **{key: getattr(config, key) for key in _ROUTING},
    )


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    blocks = [llama.block(config, attention(config), mlp(config, layer)) for layer in range(config.depth)]
    head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
    return Decoder(Embedding(config.vocab, config.dim), blocks, llama.norm(config), head)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    attn, first, moe = model.blocks[0].attn, model.blocks[0].mlp, model.blocks[-1].mlp
    fields = llama.read_fields(model, context_length, moe.experts[0]) | read_moe_fields(moe)
    fields |= {key: getattr(attn, key) for key in ("rope_dim", "value_dim")}
    fields |= {key: getattr(moe, key) for key in _ROUTING}
    growth = 1.0 if attn.scale is None else math.sqrt(attn.scale * math.sqrt(attn.head_dim))
    factor = getattr(attn.position.scaling, "factor", math.e)
    return Config(
        **fields,
        kv_rank=attn.kv_b.in_features,
        q_rank=attn.q_b.in_features if hasattr(attn, "q_b") else None,
        dense=sum(not isinstance(block.mlp, MoE) for block in model.blocks),
        dense_hidden=fields["hidden"] if isinstance(first, MoE) else first.down.in_features,
        shared=moe.shared[0].down.in_features // fields["hidden"],
        adjacent=attn.position.adjacent,
        mscale=round((growth - 1) * 10 / math.log(factor), 6),  # the inverse of `yarn_scale`
    )


_SIZES = {"kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
_SIZES |= {"shared": "n_shared_experts", "groups": "n_group", "top_groups": "topk_group"}
_KEYS = _SIZES | {"q_rank": "q_lora_rank", "dense": "first_k_dense_replace", "dense_hidden": "intermediate_size"}
_KEYS |= {"hidden": "moe_intermediate_size", "experts": "n_routed_experts", "top_k": "num_experts_per_tok"}
_KEYS |= {"factor": "routed_scaling_factor", "renormalise": "norm_topk_prob", "balance": "aux_loss_alpha"}
_KEYS |= {"adjacent": "rope_interleave"}
"""Maps fields of `Config` to keys of a config.json; keys in `_SIZES` have no default."""
_REQUIRED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "mlp_bias": False}


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, _REQUIRED | {"num_key_value_heads": hf["num_attention_heads"]})
    hidden, sizes = size(hf, "moe_intermediate_size"), {ours: size(hf, theirs) for ours, theirs in _SIZES.items()}
    fields = llama.config_fields(hf | {"head_dim": sizes["rope_dim"], "intermediate_size": hidden})
    fields |= moe_fields(hf | {"router_aux_loss_coef": hf.get("aux_loss_alpha")}, balance=0.001) | sizes
    experts, top_k = fields["experts"], fields["top_k"]
    check_groups(experts, top_k, fields["groups"], fields["top_groups"], "config.json: ")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    dense = 0 if hf.get("first_k_dense_replace") == 0 else size(hf, "first_k_dense_replace", 3)
    return Config(
        **fields | {"head_dim": size(hf, "qk_nope_head_dim") + sizes["rope_dim"]},
        q_rank=None if hf.get("q_lora_rank") is None else size(hf, "q_lora_rank"),
        dense=min(dense, fields["depth"]),
        dense_hidden=size(hf, "intermediate_size") if dense else hidden,
        factor=number(hf, "routed_scaling_factor", 2.5),
        renormalise=flag(hf, "norm_topk_prob", True),
        adjacent=flag(hf, "rope_interleave", True),
        mscale=number(rope, "mscale_all_dim") if rope.get("mscale_all_dim") else 0.0,
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf: dict[str, Any] = llama.to_hf(replace(config, head_dim=config.rope_dim))
    for key in ("rope_scaling", "rope_parameters") if config.mscale else ():
        hf[key]["mscale_all_dim"] = config.mscale
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    own |= {"qk_nope_head_dim": config.head_dim - config.rope_dim, **_REQUIRED, **experts_to_hf(config)}
    return hf | own | {theirs: getattr(config, ours) for ours, theirs in _KEYS.items()}


def refusal(config: Config) -> str:
    """The reason why transformers cannot run a forward with this config; "" if it can."""
    single = config.experts == 1 and config.dense < config.depth
    return "it has 1 expert, but groups of experts are chosen by their 2 best" if single else ""


_ATTN, _MLP, _OURS = "model.layers.{i}.self_attn", "model.layers.{i}.mlp", "blocks.{i}"
_PARTS = ("gate", "up", "down")

NAMES: Names = [
    *llama.NAMES,
    *weight_and_bias(f"{_ATTN}.q_a_proj", f"{_OURS}.attn.q_a"),
    name(f"{_ATTN}.q_a_layernorm.weight", f"{_OURS}.attn.q_a_norm.weight"),
    name(f"{_ATTN}.q_b_proj.weight", f"{_OURS}.attn.q_b.weight"),
    *weight_and_bias(f"{_ATTN}.kv_a_proj_with_mqa", f"{_OURS}.attn.kv_a"),
    name(f"{_ATTN}.kv_a_layernorm.weight", f"{_OURS}.attn.kv_a_norm.weight"),
    name(f"{_ATTN}.kv_b_proj.weight", f"{_OURS}.attn.kv_b.weight"),
    name(f"{_MLP}.gate.weight", f"{_OURS}.mlp.router.weight"),
    name(f"{_MLP}.gate.e_score_correction_bias", f"{_OURS}.mlp.selection_bias"),
    *[name(f"{_MLP}.experts.{{e}}.{p}_proj.weight", f"{_OURS}.mlp.experts.{{e}}.{p}.weight") for p in _PARTS],
    *[name(f"{_MLP}.shared_experts.{p}_proj.weight", f"{_OURS}.mlp.shared.0.{p}.weight") for p in _PARTS],
]

ALIASES: Names = EXPERTS

IGNORED_NAMES = (*llama.IGNORED_NAMES, "model.layers.{depth}.**")
"""LLaMA's ignored names, and those of the published layer for multi-token prediction after the last block."""
