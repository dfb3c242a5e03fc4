"""Gemma 3 without images: Gemma 2 with norms on queries and keys, no caps, and a window in five of six layers.

https://arxiv.org/abs/2503.19786
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from dunes.models import gemma2, qwen3
from dunes.models.config_values import check_supported, rope_fields, size
from dunes.models.llama import IGNORED_NAMES, refusal
from dunes.models.names import Names
from dunes.parts import Attention, Decoder, Rotary
from dunes.parts.layers import ZeroCenteredRMSNorm
from dunes.parts.position import UNSCALED

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "refusal", "to_hf"]

FULL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    """Gemma 2's config; `local_base` is the base of rotary positions in layers with a window."""

    softcap: float | None = None
    logit_softcap: float | None = None
    local_base: float = 10_000.0

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config of this width and depth for training from scratch; windows are half the context length."""
        config = super().from_size(vocab, dim, depth, context_length)
        windows = tuple(max(1, context_length // 2) if (i + 1) % min(6, depth) else None for i in range(depth))
        return replace(config, softcap=None, logit_softcap=None, windows=windows)


def attention(config: Config, layer: int) -> Attention:
    q_norm, k_norm = (ZeroCenteredRMSNorm(config.head_dim, config.eps) for _ in "qk")
    local = config.windows[layer % len(config.windows)] is not None
    positions = {"position": Rotary(config.head_dim, config.local_base)} if local else {}
    return gemma2.attention(config, layer, q_norm=q_norm, k_norm=k_norm, **positions)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return gemma2.build(config, attention)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    rotary = {block.attn.window is None: block.attn.position for block in model.blocks}
    full, local = rotary.get(True), rotary.get(False)
    fields = gemma2.read_fields(model, context_length) | ({"local_base": local.base} if local else {})
    return Config(**fields | ({"rope_base": full.base, "scaling": full.scaling} if full else {}))


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    pattern, full, local = size(hf, "sliding_window_pattern", 6), _rope(hf, FULL, 1e6), _rope(hf, LOCAL, 1e4)
    if local["scaling"] != UNSCALED:
        raise ValueError(f"config.json: rotary positions of layers with a window are scaled by {local['scaling']}")
    check_supported(hf, {"attn_logit_softcapping": None})
    flat = {k: v for k, v in hf.items() if k not in ("rope_parameters", "rope_scaling")}
    fields = gemma2.config_fields(flat, [(i + 1) % pattern != 0 for i in range(size(hf, "num_hidden_layers"))])
    return Config(**fields | full, local_base=local["rope_base"])


def _rope(hf: dict[str, Any], kind: str, base: float) -> dict[str, Any]:
    """The rotary settings of one kind of layer; transformers 5 writes them as an object in `rope_parameters`.

    Settings missing in this object are read from the top level, as in older files: `rope_local_base_freq` is the
    base of layers with a window, and `rope_theta` and `rope_scaling` apply to the other layers.
    """
    nested = hf.get("rope_parameters") or {}
    own, scaling = (nested.get(kind) if isinstance(nested, dict) else None) or {}, hf.get("rope_scaling") or {}
    if not isinstance(nested, dict) or nested.keys() - {FULL, LOCAL} or not isinstance(own, dict):
        raise ValueError(
            f"config.json: rope_parameters is {str(nested)[:60]}; expected objects {FULL} and {LOCAL}"
        )
    if not isinstance(scaling, dict):
        raise ValueError(f"config.json: rope_scaling is a {type(scaling).__name__}; it must be an object")
    top, more = ("rope_theta", scaling) if kind == FULL else ("rope_local_base_freq", {})
    others = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling")}
    rope = {"rope_theta": hf.get(top), **own, **more, "truncate": True}  # transformers ignores `truncate` here
    return rope_fields(others | {"rope_parameters": rope}, base)


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json, with the keys of transformers 4 and 5."""
    hf = gemma2.to_hf(config) | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    local = {"rope_type": "default", "rope_theta": config.local_base}
    rope = {FULL: hf["rope_parameters"], LOCAL: local}
    return hf | {"rope_parameters": rope, "rope_local_base_freq": config.local_base}


NAMES: Names = [*gemma2.NAMES, *qwen3.HEAD_NORMS]
