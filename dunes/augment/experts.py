"""Dense MLPs split into experts: each gets a part of the hidden neurons (LLaMA-MoE). https://arxiv.org/abs/2406.16554

The result has as many parameters as before and computes fewer; without training it is much worse. An entry of
CHANGES, see `changes.py`.
"""

# Shapes: E experts, H hidden neurons, W neurons of an expert, S sequences, T tokens, D width.

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import dense_mlp
from dunes.augment.change import Change, generator
from dunes.augment.neurons import DECIDED, balanced_clusters, importances, private_neurons, shared_neurons
from dunes.augment.options import Experts, Gate, Scale, Split
from dunes.parts.gate import NoisyGate
from dunes.progress import each

VERSION = 1
RESTORES = True


def decide(model: nn.Module, options: Experts, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the neurons of each expert, those of shared ones first.

    By importance, groups of the sequences of `ids` (S, T) decide: without shared experts the groups' most
    important neurons, of which two experts may have the same; with them, shared ones get what most groups want.
    What experts add is multiplied by the number of routed experts, which makes the mean over all of them the dense
    MLP (`unbiased`), or by that over `top_k` (`official`). Raises ValueError for invalid options.
    """
    request = options.request()
    _check_request(request, ids)
    mlps = dense_mlp.find_mlps(model, request["where"])
    for place, mlp in mlps.items():
        dense_mlp.require_division(place, mlp.down.in_features, options.experts, "experts")
    neurons = _important(model, mlps, ids, request) if ids is not None else _by_weights(mlps, request)
    places = {place: {"neurons": rows.sort(-1).values.tolist()} for place, rows in neurons.items()}
    return Change("experts", VERSION, request, places, tuple(f"{place}.router.**" for place in places))


def _check_request(request: Mapping[str, Any], ids: Tensor | None) -> None:
    experts, shared, by_importance = request["experts"], request["shared"], request["split"] == "importance"
    for name, choices in (("split", Split), ("gate", Gate), ("scale", Scale)):
        if request[name] not in get_args(choices):
            raise ValueError(f"{name} is {request[name]!r}; expected {', '.join(get_args(choices))}")
    if not 0 <= shared <= max(0, experts - 2) or (shared and not by_importance):
        raise ValueError(
            f"shared is {shared} of {experts} experts, split {request['split']!r}; expected 0, or with "
            f"'importance' up to {experts - 2}"
        )
    dense_mlp.require_experts(experts - shared, request["top_k"])
    if by_importance != (ids is not None):
        raise ValueError(
            f"split is {request['split']!r}; calibration text goes with 'importance', and only with it"
        )
    if ids is not None and (ids.dim() != 2 or len(ids) < experts or ids.shape[1] < 2):
        raise ValueError(
            f"the calibration text is too short: ids of shape {tuple(ids.shape)}; expected at least {experts} "
            "sequences, one for each expert, of at least 2 tokens"
        )


def _by_weights(mlps: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Tensor]:
    """The neurons of each expert (E, W) by place, at random or by the weights."""
    neurons, experts = {}, request["experts"]
    for place, mlp in each(mlps.items(), end=DECIDED):
        draw = generator(request["seed"], "experts", place)
        if request["split"] == "random":
            neurons[place] = torch.randperm(mlp.down.in_features, generator=draw).view(experts, -1)
        else:
            rows = getattr(mlp, "gate", mlp.up).weight.detach().float().cpu()
            neurons[place] = balanced_clusters(rows, experts, draw).argsort(stable=True).view(experts, -1)
    return neurons


def _important(
    model: nn.Module, mlps: Mapping[str, Any], ids: Tensor, request: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The neurons of each expert (E, W) by place, by their importance for groups of the sequences."""
    shared, experts = request["shared"], request["experts"]
    groups = importances(model, mlps, ids, experts - shared, generator(request["seed"], "experts"))
    choose = private_neurons if not shared else shared_neurons
    return {place: choose(scores, scores.shape[1] // experts) for place, scores in groups.items()}


def describe(change: Change) -> str:
    """The experts, in one sentence."""
    experts, top_k, shared, split = (change.request[k] for k in ("experts", "top_k", "shared", "split"))
    always = f", {shared} of them for every token and" if shared else ","
    width = len(next(iter(change.places.values()))["neurons"][0])
    return (
        f"{experts} experts of {width} neurons in each layer{always} {top_k} chosen for each token: split {split}"
    )


def shape(model: nn.Module, change: Change) -> None:
    """Replace the MLPs. Raises ValueError, before anything is changed, if the change does not fit the model."""
    request, mlps = change.request, dense_mlp.find_mlps(model, {*change.places})
    for place in tree.find(model, {*change.places}):
        widths = [len(row) for row in change.places[place.name]["neurons"]]
        router = NoisyGate if request["gate"] == "noisy" else None
        moe = dense_mlp.new_mixture(
            mlps[place.name], widths, request["top_k"], request["balance"], request["shared"], router
        )
        setattr(place.parent, place.key, moe)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the neurons, and draw the routers.

    Raises ValueError, and puts the MLPs back, if all experts together do not compute what the MLPs did (unless
    experts share neurons).
    """
    mlps, factor = dense_mlp.dense_mlps(model, change.places, weights), _factor(change)
    stds = {"weight": dense_mlp.ROUTER_STD, "noise.weight": 0.0}
    for place, moe in each(dense_mlp.mixtures(model, mlps).items(), DECIDED, dense_mlp.FILLED):
        for expert, scale, rows in _experts(moe, change, place):
            dense_mlp.copy_neurons(expert, mlps[place], rows, scale)
        for expert in moe.shared or ():
            if expert.down.bias is not None:
                expert.down.bias.zero_()  # that of the routed ones counts once, since their weights sum to one
        draw = generator(change.request["seed"], "experts router", place)
        for name, matrix in moe.router.named_parameters():
            std = stds.get(name, matrix.shape[1] ** -0.5)
            matrix.copy_(std * torch.randn(matrix.shape, generator=draw))
    if is_partition(change):
        dense_mlp.require_equality(model, mlps, lambda moe, x: _all_experts(moe, x, factor))


def _factor(change: Change) -> float:
    """What the outputs of routed experts are multiplied by."""
    routed: int = change.request["experts"] - change.request["shared"]
    return routed / (1 if change.request["scale"] == "unbiased" else int(change.request["top_k"]))


def _experts(moe: Any, change: Change, place: str) -> list[tuple[Any, float, Tensor]]:
    """Each expert with its scale and its neurons."""
    neurons, factor = torch.tensor(change.places[place]["neurons"]), _factor(change)
    experts = [*((e, 1.0) for e in moe.shared or ()), *((e, factor) for e in moe.experts)]
    return [(expert, scale, rows) for (expert, scale), rows in zip(experts, neurons, strict=True)]


def is_partition(change: Change) -> bool:
    """Whether each neuron is in one expert."""
    return bool(change.request["split"] != "importance" or change.request["shared"])


def _all_experts(moe: Any, x: Tensor, factor: float) -> Tensor:
    """The outputs of all experts without weights and scale: those of the dense MLP."""
    bias = moe.experts[0].down.bias
    bias = 0 if bias is None else bias
    y: Tensor = bias + sum((expert(x) - bias) / factor for expert in moe.experts)
    for expert in moe.shared or ():
        y = y + expert(x)
    return y


@torch.no_grad()
def undo(model: nn.Module, change: Change) -> None:
    """Put the neurons of the experts together to dense MLPs again, bit for bit if they were not trained.

    Raises ValueError if experts share neurons, and if a scale that is no power of two was rounded.
    """
    if not is_partition(change):
        raise ValueError("split by importance without shared experts: some neurons are in several experts or none")
    if math.frexp(_factor(change))[0] != 0.5:
        raise ValueError(
            f"what the experts add was multiplied by {_factor(change):g} and rounded, and only a power of two can "
            "be taken back; load the model as it was before"
        )
    for place in tree.find(model, {*change.places}):
        moe: Any = place.module
        setattr(place.parent, place.key, _joined(moe, _experts(moe, change, place.name)))


def _joined(moe: Any, experts: list[tuple[Any, float, Tensor]]) -> nn.Module:
    """One MLP with the neurons of all experts."""
    mlp: nn.Module = dense_mlp.new_mlp(moe.experts[0], sum(len(rows) for _, _, rows in experts))
    weights = dict(mlp.named_parameters())
    for expert, scale, rows in experts:
        for name, parameter in expert.named_parameters():
            if name == "down.weight":
                weights[name][:, rows] = parameter / scale
            elif name == "down.bias":
                weights[name].copy_(parameter)
            else:
                weights[name][rows] = parameter
    return mlp
