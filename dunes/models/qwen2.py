"""Qwen2 and Qwen2.5: LLaMA with biases on queries, keys and values. https://arxiv.org/abs/2407.10671

For a Qwen2 folder, transformers 5 ignores the pre-tokenization in the tokenizer file and applies Qwen's own. To
use the file's pre-tokenization, load the tokenizer as PreTrainedTokenizerFast.
"""

from typing import Any

from dunes.models import llama
from dunes.models.config_values import check_supported, refuse_mixed_windows
from dunes.models.llama import IGNORED_NAMES, NAMES, Config, read
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def attention(config: Config, layer: int) -> Attention:
    return llama.attention(config, layer, bias=True, out_bias=False)


def build(config: Config) -> Decoder:
    """Build the model of this config, untrained."""
    return llama.build(config, attention)


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    refuse_mixed_windows(hf)
    check_supported(hf, required={"mlp_bias": False})
    # Queries, keys and values always have biases; no setting removes them.
    return Config(**llama.config_fields(hf | {"attention_bias": False}))


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    hf = llama.to_hf(config) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    del hf["attention_bias"], hf["mlp_bias"]
    return hf | {"use_sliding_window": False, "sliding_window": None}
