"""Whole architectures, one file each: Config, build(config), read(model, context), from_hf, to_hf, NAMES.

A family may also have ALSO, other spellings of its names that are read but not written, and IGNORED,
names of tensors in its files that are no weights.
"""

from types import ModuleType
from typing import Any

from dunes.models import arcee, gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from dunes.models.names import Names

FAMILIES: dict[str, ModuleType] = {
    "arcee": arcee,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gpt2": gpt2,
}


def family_of(hf: dict[str, Any]) -> str:
    """The name of the family that a config.json describes. Raises ValueError if there is none here."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"config.json: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    return kind


def spellings(family: str) -> Names:
    """Every name under which a weight of this family may be found, the one that is written first."""
    return [*FAMILIES[family].NAMES, *getattr(FAMILIES[family], "ALSO", ())]
