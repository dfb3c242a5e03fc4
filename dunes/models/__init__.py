"""Whole architectures, one file each, and their names and configs in Hugging Face.

A family has Config, build(config), read(model, context_length), from_hf, to_hf and NAMES, and may have ALIASES
(weight names that are read but not written) and IGNORED_NAMES (tensors in its files that are no weights).
Start with `llama.Config`, `llama.build` and `initialise.initialise`; `FAMILIES` has all families by name.
"""

from importlib import import_module
from types import ModuleType
from typing import Any, get_args

from dunes.flags import Family
from dunes.models.names import Names

FAMILIES: dict[str, ModuleType] = {name: import_module(f"{__name__}.{name}") for name in get_args(Family)}
"""The file of each family of `flags.Family`, by its name here and in Hugging Face's model_type."""


def family_of(hf: dict[str, Any]) -> str:
    """The family of a config.json, by its model_type. Raises ValueError for an unknown one."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    return family


def weight_names(family: str) -> Names:
    """All weight names of a family; names that are written come first."""
    return [*FAMILIES[family].NAMES, *getattr(FAMILIES[family], "ALIASES", ())]
