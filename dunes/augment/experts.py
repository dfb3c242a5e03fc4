"""Dense MLPs split into experts, each with a part of the hidden neurons (LLaMA-MoE).

https://arxiv.org/abs/2406.16554. The model keeps its number of parameters, of which each token activates fewer;
its loss is much higher until it is trained. An entry of CHANGES, see `changes.py`.
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
from dunes.parts.moe import NoisyGate
from dunes.progress import each

VERSION = 1
RESTORES = True


def decide(model: nn.Module, options: Experts, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the neurons of each expert, shared experts first.

    Split by importance, the sequences of `ids` (S, T) int64 are clustered into groups, one for each routed expert.
    An expert gets its group's most important neurons, possibly the same as another's; with shared experts, these
    get the neurons that most groups rank high. Outputs of routed experts are multiplied by their number, so that
    their mean is the dense MLP (`unbiased`), or by that over `top_k` (`official`). Raises ValueError if invalid.
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
    """Neurons of each expert (E, W) by place, at random or clustered by weight."""
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
    """Neurons of each expert (E, W) by place, by importance for groups of sequences."""
    shared, experts = request["shared"], request["experts"]
    groups = importances(model, mlps, ids, experts - shared, generator(request["seed"], "experts"))
    choose = private_neurons if not shared else shared_neurons
    return {place: choose(scores, scores.shape[1] // experts) for place, scores in groups.items()}


def describe(change: Change) -> str:
    """One sentence for users about the experts."""
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
    """Copy the neurons and initialise the routers.

    Raises ValueError, and restores the MLPs, if the experts' summed outputs differ from theirs. (The check is
    skipped where experts share neurons.)
    """
    mlps, factor = dense_mlp.dense_mlps(model, change.places, weights), _factor(change)
    stds = {"weight": dense_mlp.ROUTER_STD, "noise.weight": 0.0}
    for place, moe in each(dense_mlp.mixtures(model, mlps).items(), DECIDED, dense_mlp.FILLED):
        for expert, scale, rows in _experts(moe, change, place):
            dense_mlp.copy_neurons(expert, mlps[place], rows, scale)
        for expert in moe.shared or ():
            if expert.down.bias is not None:
                expert.down.bias.zero_()  # routed experts add it once, since their weights sum to one
        draw = generator(change.request["seed"], "experts router", place)
        for name, matrix in moe.router.named_parameters():
            std = stds.get(name, matrix.shape[1] ** -0.5)
            matrix.copy_(std * torch.randn(matrix.shape, generator=draw))
    if is_partition(change):
        dense_mlp.require_equality(model, mlps, lambda moe, x: _all_experts(moe, x, factor))


def _factor(change: Change) -> float:
    """The factor on the outputs of routed experts."""
    routed: int = change.request["experts"] - change.request["shared"]
    return routed / (1 if change.request["scale"] == "unbiased" else int(change.request["top_k"]))


def _experts(moe: Any, change: Change, place: str) -> list[tuple[Any, float, Tensor]]:
    """Each expert with its output scale and neuron indices (W,)."""
    neurons, factor = torch.tensor(change.places[place]["neurons"]), _factor(change)
    experts = [*((e, 1.0) for e in moe.shared or ()), *((e, factor) for e in moe.experts)]
    return [(expert, scale, rows) for (expert, scale), rows in zip(experts, neurons, strict=True)]


def is_partition(change: Change) -> bool:
    """True if each neuron belongs to exactly one expert."""
    return bool(change.request["split"] != "importance" or change.request["shared"])


def _all_experts(moe: Any, x: Tensor, factor: float) -> Tensor:
    """Unweighted, unscaled sum of all experts' outputs, which equals the dense MLP's."""
    bias = moe.experts[0].down.bias
    bias = 0 if bias is None else bias
    y: Tensor = bias + sum((expert(x) - bias) / factor for expert in moe.experts)
    for expert in moe.shared or ():
        y = y + expert(x)
    return y


@torch.no_grad()
def undo(model: nn.Module, change: Change) -> None:
    """Join the experts back into dense MLPs, bit-equal to the original ones if untrained.

    Raises ValueError if experts share neurons, or if the weights were rounded by a scale that is no power of two.
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
