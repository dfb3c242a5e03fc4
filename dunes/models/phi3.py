"""Phi-3: Mistral with joined matrices in files (q, k and v; gate and up of the MLP). https://arxiv.org/abs/2404.14219

The modules are Mistral's, or LLaMA's if there is no window, and `checkpoint.save` saves them as such.
"""

from typing import Any

from dunes.models import llama, mistral
from dunes.models.config_values import check_supported
from dunes.models.llama import IGNORED_NAMES
from dunes.models.mistral import Config, build, read
from dunes.models.names import Names
from dunes.parts.position import UNSCALED

__all__ = ["IGNORED_NAMES", "NAMES", "Config", "build", "from_hf", "read", "to_hf"]


def from_hf(hf: dict[str, Any]) -> Config:
    """Convert a Hugging Face config.json to a Config. Raises ValueError for unsupported settings."""
    check_supported(hf, dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0))
    config = Config(**mistral.config_fields({"sliding_window": None} | hf))
    if config.scaling != UNSCALED:
        raise ValueError(f"config.json: rotary scaling {config.scaling} is not supported in a phi3")
    return config


def to_hf(config: Config) -> dict[str, Any]:
    """Convert a Config to the content of a Hugging Face config.json."""
    return mistral.to_hf(config) | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": None,
    }


_PARTS = {part.rpartition(".")[0] for rule in llama.JOINED for part in rule.ours}

NAMES: Names = [*(n for n in llama.NAMES if n.ours[0].rpartition(".")[0] not in _PARTS), *llama.JOINED]
