"""The rows of a structure: everything of a network but the values of its weights."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn


class ModuleRow(NamedTuple):
    """Everything that determines what a module computes, except the values of its weights."""

    place: str
    class_name: str
    attributes: dict[str, str]
    tensors: dict[str, tuple[int, ...]]


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """Names, classes, plain attributes and shapes of every module; two models with equal rows are the same."""
    for place, module in model.named_modules():
        plain = {k: _stable_repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        tensors = {**module._parameters, **module._buffers}
        shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
        kind = getattr(type(module), "structure_name", type(module).__qualname__)
        yield ModuleRow(place, kind, plain, shapes)


def _stable_repr(value: Any) -> str:
    """A repr that is the same in every process: sets are sorted, addresses removed."""
    text = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
