"""Sparse upcycling: replace dense MLPs by mixtures of their copies, with equal outputs until experts are trained.

Sparse upcycling https://arxiv.org/abs/2212.05055. Fine-grained, with virtual groups
https://arxiv.org/abs/2410.07524; here only the down projections are scaled, since a gated MLP is not homogeneous
in its other matrices. Drop-Upcycling https://arxiv.org/abs/2502.19261. An entry of CHANGES, see `changes.py`.
"""

# Shapes: E experts, G the granularity, D width.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import dense_mlp
from dunes.augment.change import Change, generator
from dunes.augment.options import Upcycle
from dunes.progress import each

VERSION = 1


def decide(model: nn.Module, options: Upcycle) -> Change:
    """The record of the change: every setting, and the width of the experts at each place.

    Each MLP is cut into `granularity` pieces, and each piece is copied into `experts` / `granularity` experts. The
    pieces of one copy have equal router rows, so that tokens are routed to complete copies. Only with `drop`,
    which reinitialises neurons, do the model's outputs change. Raises ValueError for invalid options.
    """
    request, granularity, drop = options.request(), options.granularity, options.drop
    dense_mlp.require_experts(options.experts, options.top_k)
    if granularity < 1:
        raise ValueError(f"granularity is {granularity}; expected 1 or more pieces")
    for name, value in (("experts", options.experts), ("top_k", options.top_k)):
        if value % granularity:
            nearest = max(granularity, round(value / granularity) * granularity)
            raise ValueError(
                f"{name} is {value}, granularity {granularity}; expected a multiple, like {nearest}, since a "
                "token needs every piece of an MLP"
            )
    if not 0 <= drop < 1:
        raise ValueError(f"drop is {drop}; expected a fraction from 0 to below 1")
    mlps = dense_mlp.find_mlps(model, request["where"])
    places = {}
    for place, mlp in mlps.items():
        width = dense_mlp.require_division(place, mlp.down.in_features, granularity, "granularity")
        places[place] = {"width": width}
    return Change("upcycle", VERSION, request, places, tuple(f"{place}.router.*" for place in places))


def describe(change: Change) -> str:
    """One sentence for users about the experts."""
    experts, top_k, pieces, drop = (change.request[k] for k in ("experts", "top_k", "granularity", "drop"))
    kind = "copies of the MLP" if pieces == 1 else f"{experts // pieces} copies of each {pieces}th of the MLP"
    anew = f", with {drop:.0%} of their neurons drawn anew" if drop else ""
    return f"{experts} experts in each layer, {top_k} for each token: {kind}{anew}"


def shape(model: nn.Module, change: Change) -> None:
    """Replace the MLPs. Raises ValueError, before anything is changed, if the change does not fit the model."""
    request, mlps = change.request, dense_mlp.find_mlps(model, {*change.places})
    dense_mlp.require_experts(request["experts"], request["top_k"])
    for place in tree.find(model, {*change.places}):
        widths = [change.places[place.name]["width"]] * request["experts"]
        moe = dense_mlp.new_mixture(mlps[place.name], widths, request["top_k"], request["balance"])
        setattr(place.parent, place.key, moe)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights and initialise the routers; then, with `drop`, reinitialise neurons.

    Raises ValueError, and restores the MLPs, if the outputs of the copies differ from theirs.
    """
    mlps, request = dense_mlp.dense_mlps(model, change.places, weights), change.request
    pieces = request["granularity"]
    for place, moe in each(dense_mlp.mixtures(model, mlps).items(), end=dense_mlp.FILLED):
        for e, expert in enumerate(moe.experts):
            dense_mlp.copy_neurons(expert, mlps[place], _piece(expert, e % pieces), pieces)
        rows = torch.randn(len(moe.experts) // pieces, moe.router.in_features, generator=_draw(request, place))
        moe.router.weight.copy_(dense_mlp.ROUTER_STD * rows.repeat_interleave(pieces, 0))
    dense_mlp.require_equality(model, mlps)
    for place, moe in dense_mlp.mixtures(model, mlps).items() if request["drop"] else ():
        for e, expert in enumerate(moe.experts):
            redraw_neurons(expert, request["drop"], _draw(request, place, e))


def _piece(expert: Any, index: int) -> slice:
    width = expert.down.in_features
    return slice(index * width, (index + 1) * width)


def _draw(request: Mapping[str, Any], *key: Any) -> torch.Generator:
    return generator(request["seed"], "upcycle", *key)


def redraw_neurons(expert: Any, share: float, draw: torch.Generator) -> None:
    """Reinitialise this share of an expert's neurons, normally distributed with the old mean and deviation."""
    hidden = expert.down.in_features
    neurons = torch.randperm(hidden, generator=draw)[: round(share * hidden)]
    for name, layer in expert.named_children():
        rows = layer.weight.T if name == "down" else layer.weight
        old = rows[neurons].float()
        if old.numel() > 1:
            new = torch.randn(old.shape, generator=draw).to(old.device) * old.std() + old.mean()
            rows[neurons] = new.to(rows.dtype)
