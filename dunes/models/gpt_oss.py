"""gpt-oss: experts with biases and clamped gates, attention with sinks, a window in every other layer.

https://arxiv.org/abs/2508.10925
"""

from dataclasses import dataclass
from typing import Any, Self

from dunes.models import llama, mixtral
from dunes.models.config_values import check_supported, layer_windows, layer_windows_to_hf, number, size
from dunes.models.llama import IGNORED_NAMES
from dunes.models.mixtral import expert_width, experts_to_hf, moe_fields, read_moe_fields
from dunes.models.names import Name, Names, halves, name, pairs, transpose, weight_and_bias
from dunes.parts import Attention, Decoder, MoE
from dunes.parts.layers import ClampedGatedMLP

__all__ = ["ALIASES", "IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config with Mixtral's experts, the windows of the layers, and the `limit` of `ClampedGatedMLP`."""

    windows: tuple[int | None, ...]
    experts: int = 8
    top_k: int = 2
    balance: float = 0.001
    limit: float = 7.0

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch; windows are half the context length, experts as wide as
        Mixtral's."""
        base = vars(llama.Config.from_size(vocab, dim, depth, context_length))
        base |= {"hidden": expert_width(dim, cls.experts), "attention_bias": True, "mlp_bias": True}
        return cls(**base, windows=tuple(None if i % 2 else max(1, context_length // 2) for i in range(depth)))


def attention(config: Config, layer: int) -> Attention:
    return llama.attention(config, layer, window=config.windows[layer % len(config.windows)], sinks=True)


def moe(config: Config) -> MoE:
    experts = [ClampedGatedMLP(config.dim, config.hidden, config.limit) for _ in range(config.experts)]
    return mixtral.mixture(config.dim, experts, config.top_k, bias=True, balance=config.balance)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention, moe)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    moe, windows = model.blocks[0].mlp, tuple(block.attn.window for block in model.blocks)
    fields = llama.read_fields(model, context_length, moe.experts[0])
    return Config(**fields, windows=windows, limit=moe.experts[0].limit, **read_moe_fields(moe))


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, required={"swiglu_alpha": 1.702, "mlp_bias": True})
    hf = {"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128} | hf
    hf |= {"rope_scaling": hf.get("rope_scaling") or hf.get("rope_parameters") or YARN, "mlp_bias": True}
    windows = layer_windows(hf, [i % 2 == 0 for i in range(size(hf, "num_hidden_layers"))])
    fields = llama.config_fields(hf, base=150_000.0) | moe_fields(hf, balance=0.001)
    return Config(**fields, windows=windows, limit=number(hf, "swiglu_limit", 7.0))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    # Without rope_scaling in the file, transformers 4 would apply the YaRN scaling of the published models.
    hf = (
        {"rope_scaling": {"rope_type": "default"}}
        | llama.to_hf(config)
        | layer_windows_to_hf(config.windows, config.context_length)
    )
    hf |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    return hf | {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance,
        "swiglu_limit": config.limit,
        **experts_to_hf(config),
    }


_MOE, _OURS = "model.layers.{i}.mlp", "blocks.{i}.mlp.experts.{e}"


def _experts(theirs: str) -> list[Name]:
    """The names of the experts' matrices, which are stored as (inputs, outputs)."""
    both = f"{_OURS}.gate.weight", f"{_OURS}.up.weight"
    return [
        name(f"{theirs}.gate_up_proj", *both, load=lambda w: halves(w.mT), save=lambda w: pairs(w).mT),
        name(f"{theirs}.down_proj", f"{_OURS}.down.weight", load=transpose, save=transpose),
    ]


_BIASES = f"{_OURS}.gate.bias", f"{_OURS}.up.bias"
NAMES: Names = [
    *llama.ATTENTION,
    name("model.layers.{i}.self_attn.sinks", "blocks.{i}.attn.sinks"),
    *weight_and_bias(f"{_MOE}.router", "blocks.{i}.mlp.router"),
    *_experts(f"{_MOE}.experts"),
    name(f"{_MOE}.experts.gate_up_proj_bias", *_BIASES, load=halves, save=pairs),
    name(f"{_MOE}.experts.down_proj_bias", f"{_OURS}.down.bias"),
]
ALIASES: Names = _experts(f"{_MOE}.experts.{{e}}")
"""Names of the experts' MXFP4 weights in published files (read by `checkpoint/formats/quantized_weights.py`)."""
