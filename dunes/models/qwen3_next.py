"""Qwen3-Next: gated delta rules, gated attention in every fourth layer, and experts with a shared expert.

https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, https://arxiv.org/abs/2412.06464
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from torch import nn

from dunes.models import llama, mixtral, qwen3_moe
from dunes.models.config_values import but_every, check_supported, flag, layer_types, quotient, rotary_share, size
from dunes.models.mixtral import moe_fields, read_moe_fields
from dunes.models.names import Names, convolution, name, per_head
from dunes.parts import Decoder, MoE, RMSNorm, Rotary
from dunes.parts.attention import GatedAttention
from dunes.parts.layers import WeightedGatedMLP, ZeroCenteredRMSNorm
from dunes.parts.position import PartialRotary
from dunes.parts.recurrent import GatedDeltaNet

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_moe.Config):
    """Qwen3-MoE's config; attention rotates `rotary_dim` dimensions of each head, and has no biases.

    A layer with True in `recurrent` has, in place of attention, a `GatedDeltaNet` with `value_heads`, `key_heads`,
    `value_dim`, `key_dim` and a convolution of `width` tokens. `shared_hidden` is the width of the shared expert.
    """

    rotary_dim: int
    recurrent: tuple[bool, ...]
    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    width: int = 4
    shared_hidden: int

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch, like Qwen3-MoE's. If the number of heads is even, every two heads
        share keys.

        Every fourth layer and the last layer have attention.
        """
        base = vars(qwen3_moe.Config.from_size(vocab, dim, depth, context_length))
        heads, width, recurrent = base["heads"], base["head_dim"], (*but_every(4, depth - 1), False)
        shared = heads if heads % 2 else heads // 2
        sizes = {"value_heads": heads, "key_heads": shared, "value_dim": width, "key_dim": width}
        sizes |= {"kv_heads": shared, "rotary_dim": width // 4, "shared_hidden": base["hidden"]}
        return cls(**base | sizes, recurrent=recurrent)


def attention(config: Config, layer: int) -> nn.Module:
    if config.recurrent[layer % len(config.recurrent)]:
        return GatedDeltaNet(
            *(config.dim, config.value_heads, config.key_heads),
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            norm=RMSNorm(config.value_dim, config.eps),
            width=config.width,
        )
    rotary = Rotary(config.rotary_dim, config.rope_base, config.scaling)
    return GatedAttention(
        *(config.dim, config.heads, config.kv_heads),
        head_dim=config.head_dim,
        position=rotary if config.rotary_dim == config.head_dim else PartialRotary(rotary),
        q_norm=ZeroCenteredRMSNorm(config.head_dim, config.eps),
        k_norm=ZeroCenteredRMSNorm(config.head_dim, config.eps),
    )


def moe(config: Config) -> MoE:
    shared = WeightedGatedMLP(config.dim, config.shared_hidden)
    return mixtral.moe(config, renormalise=config.renormalise, shared=[shared])


def norm(config: Config) -> ZeroCenteredRMSNorm:
    return ZeroCenteredRMSNorm(config.dim, config.eps)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, moe, partial(llama.block, norm=norm), norm)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part.

    If a model has no attention or no GatedDeltaNet, the sizes of the missing one are from `from_size`.
    """
    attns, moe = [block.attn for block in model.blocks], model.blocks[0].mlp
    recurrent = tuple(isinstance(attn, GatedDeltaNet) for attn in attns)
    full = [attn for attn in attns if not isinstance(attn, GatedDeltaNet)]
    fields = llama.read_fields(model, context_length, moe.experts[0], full) | read_moe_fields(moe)
    fields |= {"renormalise": moe.renormalise, "shared_hidden": moe.shared[0].down.in_features}
    for attn in full[:1]:
        fields["rotary_dim"] = getattr(attn.position, "rotary", attn.position).head_dim
    for net in [attn for attn in attns if isinstance(attn, GatedDeltaNet)][:1]:
        fields |= {"value_heads": net.heads, "key_heads": net.key_heads, "value_dim": net.value_dim}
        fields |= {"key_dim": net.key_dim, "width": net.convolution.weight.shape[1]}
    fields["recurrent"] = recurrent
    return replace(Config.from_size(fields["vocab"], fields["dim"], fields["depth"], context_length), **fields)


SIZES = {"width": "linear_conv_kernel_dim", "shared_hidden": "shared_expert_intermediate_size"}
SIZES |= {f"{part}_heads": f"linear_num_{part}_heads" for part in ("key", "value")}
SIZES |= {f"{part}_dim": f"linear_{part}_head_dim" for part in ("key", "value")}


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    required = {"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False, "mlp_bias": False}
    check_supported(hf | {"mlp_only_layers": hf.get("mlp_only_layers") or []}, required)
    hf = {"head_dim": 256} | hf | {"intermediate_size": size(hf, "moe_intermediate_size")}
    quotient(hf, "linear_num_value_heads", "linear_num_key_heads")
    default = but_every(size(hf, "full_attention_interval", 4), size(hf, "num_hidden_layers"))
    fields: dict[str, Any] = {field: size(hf, key) for field, key in SIZES.items()}
    fields |= {"recurrent": layer_types(hf, "linear_attention", default)}
    fields |= llama.config_fields(hf, partial=0.25) | moe_fields(hf, balance=0.001)
    return Config(**fields, renormalise=flag(hf, "norm_topk_prob", True))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf, share = qwen3_moe.to_hf(config), rotary_share(config.rotary_dim, config.head_dim)
    return hf | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "partial_rotary_factor": share,
        "rope_parameters": hf["rope_parameters"] | {"partial_rotary_factor": share},
        "layer_types": ["linear_attention" if r else "full_attention" for r in config.recurrent],
        **{key: getattr(config, field) for field, key in SIZES.items()},
    }


def refusal(config: Config) -> str:
    """The reason why transformers cannot run a forward with this config; "" if it can."""
    return "no layer has attention, which the cache of transformers needs" if all(config.recurrent) else ""


_LAYER, _OURS = "model.layers.{i}", "blocks.{i}"
_NET, _SHARED = f"{_LAYER}.linear_attn", f"{_LAYER}.mlp.shared_expert"

NAMES: Names = [
    name(f"{_NET}.out_proj.weight", f"{_OURS}.attn.out.weight", beside=f"{_OURS}.attn.project.weight"),
    name(f"{_LAYER}.self_attn.o_proj.weight", f"{_OURS}.attn.out.weight", beside=f"{_OURS}.attn.q.weight"),
    name(f"{_NET}.in_proj_qkvz.weight", f"{_OURS}.attn.project.weight"),
    name(f"{_NET}.in_proj_ba.weight", f"{_OURS}.attn.rates.weight"),
    *convolution(f"{_NET}.conv1d", f"{_OURS}.attn.convolution"),
    name(f"{_NET}.A_log", f"{_OURS}.attn.log_rate"),
    name(f"{_NET}.dt_bias", f"{_OURS}.attn.step"),
    name(f"{_NET}.norm.weight", f"{_OURS}.attn.norm.weight"),
    *per_head([name(f"{_LAYER}.self_attn.q_proj.weight", f"{_OURS}.attn.q.weight", f"{_OURS}.attn.gate.weight")]),
    *(n for n in qwen3_moe.NAMES if not n.theirs.endswith(("q_proj.weight", "o_proj.weight", "bias"))),
    name(f"{_SHARED}_gate.weight", f"{_OURS}.mlp.shared.0.router.weight"),
    *[name(f"{_SHARED}.{p}_proj.weight", f"{_OURS}.mlp.shared.0.{p}.weight") for p in ("gate", "up", "down")],
]

ALIASES: Names = qwen3_moe.ALIASES

IGNORED_NAMES = (
    *llama.IGNORED_NAMES,
    *(n.theirs.replace("model.", "mtp.") for n in [*NAMES, *ALIASES] if n.theirs.startswith("model.")),
    *("mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"),
)
"""LLaMA's ignored names, and tensors for multi-token prediction, which transformers also ignores."""
