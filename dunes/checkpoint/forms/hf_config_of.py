"""The Hugging Face config of a built model, derived from its modules alone."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from dunes.models import FAMILIES
from dunes.units import plural


class HfConfig(NamedTuple):
    """A family and its config: `FAMILIES[family].build(config)` builds exactly the model."""

    family: str
    config: Any


class ModuleRow(NamedTuple):
    """Everything that determines what a module computes, except the values of its weights."""

    place: str
    class_name: str
    attributes: dict[str, str]
    tensors: dict[str, tuple[int, ...]]


def hf_config_of(model: nn.Module, context_length: int) -> HfConfig | str:
    """The family and config that build exactly this model, or the first difference from the closest one."""
    reasons = [(-1, "it is not a stack of attention blocks")]
    for family, module in FAMILIES.items():
        try:
            config = module.read(model, context_length)
            with torch.device("meta"):
                rebuilt = module.build(config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            reasons.append((0, f"not {family}: {' '.join(str(error).split())}"))
            continue
        if (difference := _first_difference(model, rebuilt)) is None:
            return HfConfig(family, config)
        equal_rows, reason = difference
        reasons.append((equal_rows, f"not {family}: {reason}"))
    return max(reasons, key=lambda reason: reason[0])[1]


def _first_difference(model: nn.Module, rebuilt: nn.Module) -> tuple[int, str] | None:
    """The number of equal modules before the first that differs, and the difference."""
    actual, expected = list(module_rows(model)), list(module_rows(rebuilt))
    for i, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a != b:
            changed, original = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
            return i, f"{a.place or 'the model'} is {changed}, not {original}"
    n, m = len(actual), len(expected)
    return None if n == m else (min(n, m), f"{plural(n, 'module')}, not {m}")


def _stable_repr(value: Any) -> str:
    """A repr that is the same in every process: sets are sorted, addresses removed."""
    text = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """Names, classes, plain attributes and shapes of every module; two models with equal rows are the same."""
    for place, module in model.named_modules():
        plain = {k: _stable_repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        tensors = {**module._parameters, **module._buffers}
        shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
        yield ModuleRow(place, type(module).__qualname__, plain, shapes)
