"""Add shared experts, loss-free balancing or a z-loss to mixtures; the model's outputs stay the same."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.change import Change
from dunes.augment.options import Routing
from dunes.parts import MLP, GatedMLP, MoE

VERSION = 1


def is_mixture(module: nn.Module) -> bool:
    return isinstance(module, MoE)


def decide(model: nn.Module, options: Routing) -> Change:
    """The record of a change for which `shape` calls `MoE.extend` with these options, for each mixture that
    `where` selects.

    Raises ValueError if `where` selects no mixture, if an option is below 0, or if all options are 0. With
    `bias_rate`, raises ValueError if a mixture already trains a selection bias. With `shared`, raises ValueError
    unless the experts are plain MLPs, without adapters or quantization.
    """
    where, shared, bias_rate = options.where, options.shared, options.bias_rate
    values = {"shared": shared, "bias_rate": bias_rate, "z_loss": options.z_loss}
    if not all(0 <= value < math.inf for value in values.values()) or not any(values.values()):
        raise ValueError(f"routing: {values}; expected numbers from 0, at least one above 0")
    places = {}
    for place in tree.find(model, where, is_mixture):
        moe = cast(MoE, place.module)
        if bias_rate and moe.bias_rate:
            raise ValueError(f"{place.name}: already has a selection bias that is trained")
        linears = [m for m in moe.experts[0].modules() if tree.linear(m)]
        is_plain = isinstance(moe.experts[0], MLP | GatedMLP) and all(type(m) is nn.Linear for m in linears)
        if shared and not is_plain:
            raise ValueError(f"{place.name}: experts are not plain MLPs; add shared experts before other changes")
        first = len(moe.shared or ())
        places[place.name] = {"shared": [*range(first, first + shared)]}
    new = tuple(f"{name}.shared.{i}.**" for name, decided in places.items() for i in decided["shared"])
    return Change("routing", VERSION, {"where": where, **values}, places, new)


def shape(model: nn.Module, change: Change) -> None:
    """Add the requested shared experts, selection bias and z-loss to the mixtures."""
    for name, decided in change.places.items():
        moe = _mixture(model, name)
        shared = [deepcopy(moe.experts[0]) for _ in decided["shared"]]
        moe.extend(change.request["z_loss"], change.request["bias_rate"], shared)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Zero the output projections of the new shared experts, which are copies of the first expert."""
    for name, decided in change.places.items():
        for i in decided["shared"]:
            for p in cast(Any, _mixture(model, name).shared)[i].down.parameters():
                p.zero_()


def _mixture(model: nn.Module, name: str) -> MoE:
    (place,) = tree.find(model, {name}, is_mixture)
    return cast(MoE, place.module)
