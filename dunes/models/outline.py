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


def parameters(family: str, config: Any) -> int:
    """How many numbers the weights of a model hold, whatever its depth.

    Blocks are alike, so models of one and of two blocks tell how much each adds.
    """
    one, two = (tree.count(outline(family, replace(config, depth=depth))) for depth in (1, 2))
    return one + int(config.depth - 1) * (two - one)
