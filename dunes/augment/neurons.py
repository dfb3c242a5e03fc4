"""Clustering of an MLP's hidden neurons into experts, by weight or by importance for calibration text."""

# Shapes: N items (neurons or sequences), E groups, H hidden neurons, W in an expert, S sequences, T tokens.

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.progress import each

ROUNDS = 50
ROWS = 8
"""Sequences in one forward."""
DECIDED = 0.4
"""Progress, from 0 to 1, after choosing the neurons and before filling the experts."""


def balanced_clusters(rows: Tensor, groups: int, draw: torch.Generator) -> Tensor:
    """A group index (N,) for each row, by spherical k-means with groups of equal size."""
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
    """A group index (N,) for each item by its scores (N, E); the groups have equal size.

    Greedy: pairs of item and group are taken by how far their score is above the item's mean, while the group has
    room. If E does not divide N, the remaining items go to the groups with the best scores.
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
    """Importance of each neuron for each of E groups of the sequences `ids` (S, T) int64: (E, H) by place.

    Importance is the sum over tokens of |activation · gradient of the loss|. Sequences are clustered by the
    importance of the last MLP's neurons.
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
    """Inputs of these layers times the gradients of the loss (S, T, I) float32, by place of those called."""
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
    """Neurons (E, W) with the highest scores (E, H) of each group; one neuron may be in several groups."""
    return scores.topk(width, 1).indices


def shared_neurons(scores: Tensor, width: int) -> Tensor:
    """Neurons (experts, W), each in one expert: first the neurons in most groups' top W, then each group's own.

    `scores` (E, H) are by group; the number of experts, shared ones included, is H / `width`.
    """
    groups, hidden = scores.shape
    scores = scores / scores.sum(1, keepdim=True).clamp(min=1e-30)
    votes = torch.zeros_like(scores).scatter(1, private_neurons(scores, width), 1.0).sum(0)
    order = (votes + scores.sum(0) / (groups + 1)).argsort(descending=True, stable=True)
    shared, rest = order[: hidden - groups * width], order[hidden - groups * width :]
    own = rest[balanced_assignment(scores[:, rest].T * hidden).argsort(stable=True)]
    return torch.cat([shared, own]).view(-1, width)
