"""Whole architectures, one file each, and their names and configs in Hugging Face.

A family has Config, build(config), read(model, context_length), from_hf, to_hf and NAMES, and may have ALIASES
(weight names that are read but not written) and IGNORED_NAMES (tensors in its files that are no weights).
Start with `llama.Config`, `llama.build` and `initialise.initialise`; `FAMILIES` has all families by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import torch
from torch.overrides import TorchFunctionMode

from dunes import tree
from dunes.flags import Family
from dunes.models.names import Names
from dunes.parts import Decoder

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


class _SkipNormal(TorchFunctionMode):
    """Skips `normal_` on meta tensors, for which torch would import its compiler (1.7 s)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return None if func is torch.nn.init.normal_ else func(*args, **(kwargs or {}))


def build_on_meta(family: str, config: Any) -> Decoder:
    """The model of this config on the meta device: structure and shapes in milliseconds, without memory."""
    with torch.device("meta"), _SkipNormal():
        model: Decoder = FAMILIES[family].build(config)
    return model


def weight_counts(family: str, config: Any) -> tuple[int, int]:
    """Numbers of parameters and of weight tensors of a model of any depth and number of experts.

    They are extrapolated from small models, since all blocks, and all experts, are equal.
    """
    experts = getattr(config, "experts", 1)
    small, deep, wide = (_count(family, config, *sizes) for sizes in ((1, 1), (2, 1), (1, 2)))
    parameters, tensors = (
        a + (config.depth - 1) * (b - a) + config.depth * (experts - 1) * (c - a)
        for a, b, c in zip(small, deep, wide, strict=True)
    )
    return parameters, tensors


def _count(family: str, config: Any, depth: int, experts: int) -> tuple[int, int]:
    mixture = {"experts": experts, "top_k": 1} if hasattr(config, "experts") else {}
    model = build_on_meta(family, replace(config, depth=depth, **mixture))
    return tree.count(model), len(list(model.parameters()))
