"""A model without numbers: structure and shapes, in milliseconds and no memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dunes import tree
from dunes.models import FAMILIES
from dunes.parts import Decoder


class _Unfilled(TorchFunctionMode):
    """Normal noise for a tensor without numbers is left out: torch would import its compiler for it (1.7 s)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return None if func is torch.nn.init.normal_ else func(*args, **(kwargs or {}))


def outline(family: str, config: Any) -> Decoder:
    """The model on the meta device."""
    with torch.device("meta"), _Unfilled():
        model: Decoder = FAMILIES[family].build(config)
    return model


def described(family: str, config: Any) -> tuple[int, int]:
    """How many numbers a model's weights hold, and how many tensors they are, whatever its depth and experts.

    Blocks are alike and so are experts: small models tell how much each adds.
    """
    experts = getattr(config, "experts", 1)
    small, deep, wide = _counted(family, config, 1, 1), _counted(family, config, 2, 1), None
    if experts > 1:
        wide = _counted(family, config, 1, 2)
    numbers, tensors = (
        a + (config.depth - 1) * (b - a) + config.depth * (experts - 1) * (c - a)
        for a, b, c in zip(small, deep, wide or small, strict=True)
    )
    return numbers, tensors


def _counted(family: str, config: Any, depth: int, experts: int) -> tuple[int, int]:
    mixed = {"experts": experts, "top_k": 1} if hasattr(config, "experts") else {}
    model = outline(family, replace(config, depth=depth, **mixed))
    return tree.count(model), len(list(model.parameters()))
