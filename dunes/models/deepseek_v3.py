"""DeepSeek V3: latent attention, and after a few dense layers mixtures with sigmoid routing and a shared expert.

https://arxiv.org/abs/2412.19437
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from dunes.models import llama
from dunes.models.config_values import check_supported, flag, number, rope_to_hf, size, yarn_scale
from dunes.models.mixtral import EXPERTS, expert_width, mixture, moe_fields, read_moe_fields
from dunes.models.names import Names, name, weight_and_bias
from dunes.parts import Decoder, Embedding, GatedMLP, MoE, Rotary
from dunes.parts.latent_attention import LatentAttention
from dunes.parts.moe import check_groups

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; of the `head_dim` dimensions of queries and keys, `rope_dim` have positions.

    `kv_rank`, `q_rank` and `value_dim` are those of `LatentAttention`. The first `dense` layers have MLPs of width
    `dense_hidden`. The others have `experts` of width `hidden` and a shared one that is `shared` times as wide;
    `factor`, `groups`, `top_groups`, `renormalise` and `balance` are those of `MoE`. With `adjacent`, adjacent
    dimensions are rotated together. With `mscale`, YaRN's factor with this weight multiplies the scores twice.
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
        """A config for training from scratch: one dense layer, then 8 narrow experts and a shared one in each."""
        base = llama.Config.from_size(vocab, dim, depth, context_length)
        fields = vars(base) | {"hidden": expert_width(dim, cls.experts), "dense_hidden": base.hidden}
        latent = {"kv_rank": max(32, round(dim / 4 / 32) * 32), "rope_dim": base.head_dim // 2}
        return cls(**fields, **latent, value_dim=base.head_dim, dense=min(1, depth - 1))


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
    names = "renormalise", "balance", "factor", "groups", "top_groups"
    return mixture(
        config.dim,
        [llama.mlp(config) for _ in range(config.experts)],
        config.top_k,
        shared=[GatedMLP(config.dim, config.shared * config.hidden)],
        biased=True,
        sigmoid=True,
        **{key: getattr(config, key) for key in names},
    )


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    blocks = [llama.block(config, attention(config), mlp(config, layer)) for layer in range(config.depth)]
    head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
    return Decoder(Embedding(config.vocab, config.dim), blocks, llama.norm(config), head)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    attn, dense, moe = model.blocks[0].attn, model.blocks[0].mlp, model.blocks[-1].mlp
    fields = llama.read_fields(model, context_length, moe.experts[0])
    q_rank = attn.q_b.in_features if hasattr(attn, "q_b") else None
    latent = {"kv_rank": attn.kv_b.in_features, "q_rank": q_rank}
    latent |= {key: getattr(attn, key) for key in ("rope_dim", "value_dim")}
    routing = {key: getattr(moe, key) for key in ("factor", "groups", "top_groups", "renormalise")}
    return Config(
        **(fields | latent | routing | read_moe_fields(moe)),
        dense=sum(not isinstance(block.mlp, MoE) for block in model.blocks),
        dense_hidden=moe.experts[0].down.in_features if isinstance(dense, MoE) else dense.down.in_features,
        shared=moe.shared[0].down.in_features // moe.experts[0].down.in_features,
        adjacent=attn.position.adjacent,
        mscale=_mscale(attn),
    )


def _mscale(attn: Any) -> float:
    """The weight from which `attention` computes the scale of the scores."""
    if attn.scale is None:
        return 0.0
    growth = math.sqrt(attn.scale * math.sqrt(attn.head_dim))
    return round((growth - 1) * 10 / math.log(attn.position.scaling.factor), 6)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    required = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    check_supported(hf, required | {"num_key_value_heads": hf["num_attention_heads"]})
    rope_dim, hidden = size(hf, "qk_rope_head_dim"), size(hf, "moe_intermediate_size")
    fields = llama.config_fields(hf | {"head_dim": rope_dim, "intermediate_size": hidden})
    mixture_fields = moe_fields(hf | {"router_aux_loss_coef": hf.get("aux_loss_alpha")}, balance=0.001)
    groups = size(hf, "n_group", 8), size(hf, "topk_group", 4)
    try:
        check_groups(mixture_fields["experts"], mixture_fields["top_k"], *groups)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    rope, dense = hf.get("rope_scaling") or hf.get("rope_parameters") or {}, hf.get("first_k_dense_replace")
    return Config(
        **(fields | mixture_fields | {"head_dim": size(hf, "qk_nope_head_dim") + rope_dim}),
        kv_rank=size(hf, "kv_lora_rank"),
        q_rank=None if hf.get("q_lora_rank") is None else size(hf, "q_lora_rank"),
        rope_dim=rope_dim,
        value_dim=size(hf, "v_head_dim"),
        dense=0 if dense == 0 else min(size(hf, "first_k_dense_replace", 3), fields["depth"]),
        dense_hidden=size(hf, "intermediate_size"),
        shared=size(hf, "n_shared_experts", 1),
        factor=number(hf, "routed_scaling_factor", 2.5),
        groups=groups[0],
        top_groups=groups[1],
        renormalise=flag(hf, "norm_topk_prob", True),
        adjacent=flag(hf, "rope_interleave", True),
        mscale=number(rope, "mscale_all_dim") if rope.get("mscale_all_dim") else 0.0,
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    rope = rope_to_hf(config.rope_base, config.scaling)
    for settings in rope.values() if config.mscale else ():
        if isinstance(settings, dict):
            settings["mscale_all_dim"] = config.mscale
    return llama.to_hf(replace(config, head_dim=config.rope_dim)) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **rope,
        "rope_interleave": config.adjacent,
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.q_rank,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "intermediate_size": config.dense_hidden,
        "first_k_dense_replace": config.dense,
        "moe_intermediate_size": config.hidden,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "n_shared_experts": config.shared,
        "n_group": config.groups,
        "topk_group": config.top_groups,
        "norm_topk_prob": config.renormalise,
        "routed_scaling_factor": config.factor,
        "aux_loss_alpha": config.balance,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


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
"""The last are those of the published layer that predicts the token after the next."""
