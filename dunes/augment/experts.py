"""Split dense MLPs into experts, each with a part of the hidden neurons (LLaMA-MoE).

https://arxiv.org/abs/2406.16554. The number of parameters stays the same (plus routers), but each token uses fewer
parameters. The loss is much higher until the model is trained. This module is registered in the table `CHANGES` in
`changes.py`.
"""

# Shapes: E experts or groups, H hidden neurons, W neurons of an expert, S sequences, T tokens, D width, I inputs,
# N items (neurons or sequences).

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment import upcycle
from dunes.augment.change import Change, generator, modules_at, put_modules
from dunes.augment.options import Experts
from dunes.parts.moe import NoisyGate
from dunes.progress import each

VERSION = 1
RESTORES = True
ROUNDS = 50
ROWS = 8
"""Number of sequences in one forward."""
DECIDED = 0.4
"""Progress, from 0 to 1, after choosing the neurons and before filling the experts."""


def decide(model: nn.Module, options: Experts, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the neurons of each expert, shared experts first.

    For a split by importance, the sequences of `ids` (S, T) int64 are clustered into groups, one per routed
    expert. Without shared experts, an expert gets the neurons most important to its group, and a neuron may be in
    several experts. With shared experts, each neuron is in one expert, and shared experts get the neurons that
    rank high in the largest number of groups. The outputs of routed experts are multiplied by the number of routed
    experts. If each neuron is in one expert, the shared experts plus the mean of the routed experts then equal the
    dense MLP. With `scale="official"`, this factor is divided by `top_k`. Raises ValueError for invalid options.
    """
    request = options.request()
    _check_request(request, ids)
    mlps = upcycle.find_mlps(model, request["where"])
    for place, mlp in mlps.items():
        upcycle.require_division(place, mlp.down.in_features, options.experts, "experts")
    neurons = _choose_neurons(model, mlps, ids, request)
    places = {place: {"neurons": rows.sort(-1).values.tolist()} for place, rows in neurons.items()}
    return Change("experts", VERSION, request, places, tuple(f"{place}.router.**" for place in places))


def _check_request(request: Mapping[str, Any], ids: Tensor | None) -> None:
    experts, shared, by_importance = request["experts"], request["shared"], request["split"] == "importance"
    if not 0 <= shared <= max(0, experts - 2) or (shared and not by_importance):
        raise ValueError(
            f"shared is {shared} of {experts} experts, split {request['split']!r}; expected 0, or with "
            f"'importance' up to {experts - 2}"
        )
    upcycle.require_experts(experts - shared, request["top_k"])
    if by_importance != (ids is not None):
        raise ValueError(f"split is {request['split']!r}; calibration text is for 'importance', which needs it")
    if ids is not None and (ids.dim() != 2 or len(ids) < experts or ids.shape[1] < 2):
        raise ValueError(
            f"the calibration text is too short: ids of shape {tuple(ids.shape)}; expected at least {experts} "
            "sequences, one for each expert, of at least 2 tokens"
        )


def _choose_neurons(
    model: nn.Module, mlps: Mapping[str, Any], ids: Tensor | None, request: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Neuron indices of the experts, (E, W) by MLP name; with `ids`, neurons are chosen by importance."""
    neurons, experts, shared, seed = {}, request["experts"], request["shared"], request["seed"]
    if ids is not None:
        groups = importances(model, mlps, ids, experts - shared, generator(seed, "experts"))
        choose = shared_neurons if shared else private_neurons
        return {place: choose(scores, scores.shape[1] // experts) for place, scores in groups.items()}
    for place, mlp in each(mlps.items(), end=DECIDED):
        draw = generator(seed, "experts", place)
        if request["split"] == "random":
            neurons[place] = torch.randperm(mlp.down.in_features, generator=draw).view(experts, -1)
        else:
            rows = getattr(mlp, "gate", mlp.up).weight.detach().float().cpu()
            neurons[place] = balanced_clusters(rows, experts, draw).argsort(stable=True).view(experts, -1)
    return neurons


def describe(change: Change) -> str:
    """One sentence that tells users the number and width of the experts, and how neurons are split."""
    experts, top_k, shared, split = (change.request[k] for k in ("experts", "top_k", "shared", "split"))
    always = f", {shared} of them for every token and" if shared else ","
    width = len(next(iter(change.places.values()))["neurons"][0])
    return (
        f"{experts} experts of {width} neurons in each layer{always} {top_k} chosen for each token: split {split}"
    )


def shape(model: nn.Module, change: Change) -> None:
    """Replace the MLPs by mixtures. Raises ValueError, before any change, if the record does not fit the model."""
    request, mlps = change.request, upcycle.find_mlps(model, {*change.places})
    settings = {key: request[key] for key in ("top_k", "balance", "shared")}
    settings["gate"] = NoisyGate if request["gate"] == "noisy" else None
    widths = {place: [len(row) for row in change.places[place]["neurons"]] for place in mlps}
    put_modules(model, {p: upcycle.new_mixture(mlps[p], widths[p], **settings) for p in mlps})


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the neurons into the experts and initialise the routers.

    If each neuron is in exactly one expert, the joined experts are compared with the original MLPs. If outputs
    differ, the MLPs are restored and ValueError is raised.
    """
    mlps = upcycle.dense_mlps(model, change.places, weights)
    stds = {"weight": upcycle.ROUTER_STD, "noise.weight": 0.0}
    for place, moe in each(modules_at(model, mlps).items(), DECIDED, upcycle.FILLED):
        for expert, scale, rows in _experts(moe, change, place):
            upcycle.copy_neurons(expert, mlps[place], rows, scale)
        for expert in moe.shared or ():
            if expert.down.bias is not None:
                expert.down.bias.zero_()  # the routed experts add the bias, once, since routing weights sum to 1
        draw = generator(change.request["seed"], "experts router", place)
        for name, matrix in moe.router.named_parameters():
            std = stds.get(name, matrix.shape[1] ** -0.5)
            matrix.copy_(std * torch.randn(matrix.shape, generator=draw))
    if is_partition(change):
        upcycle.require_equality(model, mlps, lambda place, moe: _joined(moe, _experts(moe, change, place)))


def is_partition(change: Change) -> bool:
    """True if each neuron belongs to exactly one expert."""
    return bool(change.request["split"] != "importance" or change.request["shared"])


def _factor(change: Change) -> float:
    """The factor by which the outputs of routed experts are multiplied."""
    routed: int = change.request["experts"] - change.request["shared"]
    return routed / (1 if change.request["scale"] == "unbiased" else int(change.request["top_k"]))


def _experts(moe: Any, change: Change, place: str) -> list[tuple[Any, float, Tensor]]:
    """The experts of a mixture: tuples of (expert, factor of the outputs, neuron indices (W,))."""
    neurons, factor = torch.tensor(change.places[place]["neurons"]), _factor(change)
    experts = [*((e, 1.0) for e in moe.shared or ()), *((e, factor) for e in moe.experts)]
    return [(expert, scale, rows) for (expert, scale), rows in zip(experts, neurons, strict=True)]


@torch.no_grad()
def undo(model: nn.Module, change: Change) -> None:
    """Join the experts into dense MLPs, which equal the original MLPs bit for bit if the experts were not trained.

    Raises ValueError if a neuron may be in several experts or in none. Also raises ValueError unless the factor by
    which the split multiplied the outputs is a power of two, since any other factor has rounded the weights.
    """
    if not is_partition(change):
        raise ValueError("split by importance without shared experts: some neurons are in several experts or none")
    if math.frexp(_factor(change))[0] != 0.5:
        raise ValueError(
            f"multiplying by {_factor(change):g} rounded the experts' weights; only a power of two can be "
            "undone; load the model from before the change"
        )
    for place in tree.find(model, {*change.places}):
        moe: Any = place.module
        setattr(place.parent, place.key, _joined(moe, _experts(moe, change, place.name)))


def _joined(moe: Any, experts: list[tuple[Any, float, Tensor]]) -> nn.Module:
    """A dense MLP with the neurons of all experts."""
    mlp: nn.Module = upcycle.new_mlp(moe.experts[0], sum(len(rows) for _, _, rows in experts))
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


def balanced_clusters(rows: Tensor, groups: int, draw: torch.Generator) -> Tensor:
    """Cluster rows by spherical k-means into groups of equal size; returns a group index (N,) for each row."""
    rows = F.normalize(rows, dim=1)
    centers = rows[torch.randperm(len(rows), generator=draw)[:groups]]
    labels = torch.full((len(rows),), -1)
    for _ in range(ROUNDS):
        previous, labels = labels, balanced_assignment(rows @ centers.T)
        if torch.equal(labels, previous):
            break
        sums = torch.zeros_like(centers).index_add(0, labels, rows)
        centers = F.normalize(sums, dim=1)
    return labels


def balanced_assignment(scores: Tensor) -> Tensor:
    """Assign items to E groups of equal size by their scores (N, E); returns a group index (N,) for each item.

    (item, group) pairs are sorted by score minus the item's mean score; in this order, each item joins its first
    group that is not full. If E does not divide N, the first N mod E items whose group is full still join it.
    """
    items, groups = scores.shape
    room, labels, left = [items // groups] * groups, [-1] * items, items % groups
    order = (scores - scores.mean(1, keepdim=True)).flatten().argsort(descending=True, stable=True)
    for item, group in (divmod(pair, groups) for pair in order.tolist()):
        if labels[item] < 0 and (room[group] or left):
            left -= not room[group]
            room[group] -= bool(room[group])
            labels[item] = group
    return torch.tensor(labels)


def importances(
    model: nn.Module, mlps: Mapping[str, Any], ids: Tensor, groups: int, draw: torch.Generator
) -> dict[str, Tensor]:
    """Cluster the sequences `ids` (S, T) int64 into E groups; return each neuron's importance, (E, H) by MLP name.

    The importance of a neuron is the sum over a group's tokens of |activation · gradient of the loss|. Sequences
    are clustered by the importance of the neurons in the last MLP.
    """
    downs, parts = {place: mlp.down for place, mlp in mlps.items()}, {place: list[Tensor]() for place in mlps}
    with tree.mode(model, False), torch.enable_grad():
        for part in each(torch.split(ids, ROWS), end=DECIDED):
            for place, product in input_gradients(model, part, downs).items():
                parts[place].append(product.abs().sum(1).cpu())
    scores = {place: torch.cat(sums) for place, sums in parts.items()}
    labels = balanced_clusters(scores[[*mlps][-1]], groups, draw)
    return {place: torch.zeros(groups, s.shape[1]).index_add(0, labels, s) for place, s in scores.items()}


def input_gradients(model: nn.Module, ids: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Inputs of these layers times the loss's gradients with respect to them: (S, T, I) float32 by layer name.

    Layers that the forward does not call are missing in the result.
    """
    active: dict[str, Tensor] = {}

    def remember(place: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            x = inputs[0]
            active[place] = x if x.requires_grad else x.detach().requires_grad_()  # in a frozen model
            return active[place]

        return hook

    with ExitStack() as hooks:
        for place, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(remember(place)))
        ids = ids.to(next(model.parameters()).device)
        logits = model(ids)[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        grads = torch.autograd.grad(loss, [*active.values()], allow_unused=True)
    pairs = zip(active.items(), grads, strict=True)
    return {place: (x.detach() * grad).float() for (place, x), grad in pairs if grad is not None}


def private_neurons(scores: Tensor, width: int) -> Tensor:
    """For each group, the `width` neurons (E, W) with the highest scores (E, H); groups may share neurons."""
    return scores.topk(width, 1).indices


def shared_neurons(scores: Tensor, width: int) -> Tensor:
    """Put each neuron into one expert; returns indices (experts, W): shared experts, then one expert per group.

    `scores` (E, H) are the importances by group. Shared experts get the neurons that are in the top W of the
    largest number of groups. The number of experts, shared ones included, is H / `width`.
    """
    groups, hidden = scores.shape
    scores = scores / scores.sum(1, keepdim=True).clamp(min=1e-30)
    votes = torch.zeros_like(scores).scatter(1, private_neurons(scores, width), 1.0).sum(0)
    order = (votes + scores.sum(0) / (groups + 1)).argsort(descending=True, stable=True)
    shared, rest = order[: hidden - groups * width], order[hidden - groups * width :]
    private = rest[balanced_assignment(scores[:, rest].T * hidden).argsort(stable=True)]
    return torch.cat([shared, private]).view(-1, width)
