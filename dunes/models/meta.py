"""Models on the meta device: structure and shapes in milliseconds, without memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dunes import tree
from dunes.models import FAMILIES
from dunes.parts import Decoder


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
    """The model of this config on the meta device."""
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
