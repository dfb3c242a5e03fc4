"""Qwen2 and Qwen2.5: LLaMA with biases on queries, keys and values. https://arxiv.org/abs/2407.10671

transformers 5 opens the tokenizer of such a folder with Qwen's own pre-tokenization instead of the file's, unless
loaded as PreTrainedTokenizerFast.
"""

from typing import Any

from dunes.models import llama
from dunes.models.config_values import check_supported, refuse_mixed_windows
from dunes.models.llama import IGNORED_NAMES, NAMES, Config, read
from dunes.parts import Attention, Decoder

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def attention(config: Config) -> Attention:
    return llama.attention(config, bias=True, out_bias=False)


def build(config: Config) -> Decoder:
    """An untrained model of this size."""
    return llama.build(config, attention)


def from_hf(hf: dict[str, Any]) -> Config:
    """The Config of a config.json. Raises ValueError for unsupported settings."""
    refuse_mixed_windows(hf)
    check_supported(hf, required={"mlp_bias": False})
    # Its three biases are always present and have no key.
    return Config(**llama.config_fields(hf | {"attention_bias": False}))


def to_hf(config: Config) -> dict[str, Any]:
    """The keys of the config.json of this Config."""
    hf = llama.to_hf(config) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    del hf["attention_bias"], hf["mlp_bias"]
    return hf | {"use_sliding_window": False, "sliding_window": None}
