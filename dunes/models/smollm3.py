"""SmolLM3: LLaMA in which some layers, by default every fourth, have no positions (NoPE).

https://huggingface.co/blog/smollm3, https://arxiv.org/abs/2501.18795
"""

from dataclasses import dataclass
from typing import Any, Self

from dunes.models import llama
from dunes.models.config_values import but_every, check_supported, refuse_mixed_windows, size
from dunes.models.llama import IGNORED_NAMES, NAMES
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """LLaMA's config; `rotary` is True for each layer with rotary positions."""

    rotary: tuple[bool, ...]

    @classmethod
    def from_size(cls, vocab: int, dim: int, depth: int, context_length: int) -> Self:
        """A config for training from scratch. Every fourth layer has no positions; with 2 or 3 layers, the
        last layer has none."""
        base = vars(llama.Config.from_size(vocab, dim, depth, context_length))
        return cls(**base, rotary=but_every(min(4, max(2, depth)), depth))


def attention(config: Config, layer: int) -> Attention:
    has_positions = config.rotary[layer % len(config.rotary)]
    return llama.attention(config, layer, **({} if has_positions else {"position": None}))


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention)


def read(model: Any, context_length: int) -> Config:
    """The Config of a built model. Raises AttributeError if the model lacks an expected part."""
    rotary = tuple(block.attn.position is not None for block in model.blocks)
    return Config(**llama.read_fields(model, context_length, model.blocks[0].mlp), rotary=rotary)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    hf = {"tie_word_embeddings": True} | hf
    refuse_mixed_windows(hf)
    check_supported(hf, required={"use_sliding_window": False})
    fields = llama.config_fields(hf, base=2_000_000.0)
    depth, rotary = size(hf, "num_hidden_layers"), hf.get("no_rope_layers")
    if rotary is None:
        rotary = [*map(int, but_every(size(hf, "no_rope_layer_interval", 4), depth))]
    if not isinstance(rotary, list) or len(rotary) < depth or any(flag not in (0, 1) for flag in rotary):
        raise ValueError(f"config.json: no_rope_layers is {str(rotary)[:60]}; expected 0 or 1 for each layer")
    return Config(**fields, rotary=tuple(map(bool, rotary[:depth])))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    # The default padding id of transformers may be beyond the vocabulary.
    return hf | {"no_rope_layers": [*map(int, config.rotary)], "use_sliding_window": False, "pad_token_id": None}
