"""Whole architectures, one file each: Config, build(config), read(model, context), from_hf, to_hf, NAMES."""

from types import ModuleType
from typing import Any

from dunes.models import arcee, gpt2, llama, qwen3

FAMILIES: dict[str, ModuleType] = {"arcee": arcee, "llama": llama, "qwen3": qwen3, "gpt2": gpt2}


def family_of(hf: dict[str, Any]) -> str:
    """The name of the family that a config.json describes. Raises ValueError if there is none here."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    return str(kind)


def spellings(family: str):
    return [*FAMILIES[family].NAMES, *getattr(FAMILIES[family], "ALSO", ())]
