"""Which hidden neurons of an MLP belong together, by their weights or by what they do for calibration text."""

# Shapes: N items (neurons or sequences), E groups, H hidden neurons, W those of an expert, S sequences, T tokens.

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.progress import each

ROUNDS, ROWS = 50, 8
DECIDED = 0.4
"""The share of a split that is done when the neurons are chosen."""


def balanced_clusters(rows: Tensor, groups: int, draw: torch.Generator) -> Tensor:
    """A group (N,) for each row, by k-means over their directions with groups of equal size."""
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
    """A group (N,) for each item by its scores (N, E), the same number in each.

    Greedy: the pair that is best compared with the item's other scores first, where there is room. A rest
    that cannot be divided goes to the groups with the best scores.
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
    """The importance of each neuron for groups of the sequences `ids` (S, T): (E, H) by place.

    It is the sum over tokens of the absolute value of activation times gradient of the loss. Sequences are grouped
    by the importance of the last MLP's neurons for them.
    """
    with tree.mode(model, False), torch.enable_grad():
        parts = [_sequence_importances(model, mlps, part) for part in each(torch.split(ids, ROWS), end=DECIDED)]
    sequences = {place: torch.cat([part[place] for part in parts]) for place in mlps}
    labels = balanced_clusters(sequences[[*mlps][-1]], groups, draw)
    return {
        place: torch.zeros(groups, scores.shape[1]).index_add(0, labels, scores)
        for place, scores in sequences.items()
    }


def _sequence_importances(model: nn.Module, mlps: Mapping[str, Any], ids: Tensor) -> dict[str, Tensor]:
    """The importance (S, H) of each neuron for each sequence, by place."""
    active: dict[str, Tensor] = {}

    def remember(place: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            x = inputs[0]
            active[place] = x if x.requires_grad else x.detach().requires_grad_()  # in a frozen model
            return active[place]

        return hook

    hooks = [mlp.down.register_forward_pre_hook(remember(place)) for place, mlp in mlps.items()]
    try:
        ids = ids.to(next(model.parameters()).device)
        logits = model(ids)[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        grads = torch.autograd.grad(loss, [*active.values()])
    finally:
        for hook_handle in hooks:
            hook_handle.remove()
    return {
        place: (x.detach() * grad).float().abs().sum(1).cpu()
        for (place, x), grad in zip(active.items(), grads, strict=True)
    }


def private_neurons(scores: Tensor, width: int) -> Tensor:
    """For each group the `width` neurons (E, W) with the highest scores (E, H); groups may want the same ones."""
    return scores.topk(width, 1).indices


def shared_neurons(scores: Tensor, width: int) -> Tensor:
    """Neurons (experts, W), each in one expert: first those that most groups want, then the groups' own.

    `scores` (E, H) are of the groups; there are H / `width` experts in all.
    """
    groups, hidden = scores.shape
    scores = scores / scores.sum(1, keepdim=True).clamp(min=1e-30)
    wanted = torch.zeros_like(scores).scatter(1, private_neurons(scores, width), 1.0).sum(0)
    order = (wanted + scores.sum(0) / (groups + 1)).argsort(descending=True, stable=True)
    shared, rest = order[: hidden - groups * width], order[hidden - groups * width :]
    own = rest[balanced_assignment(scores[:, rest].T * hidden).argsort(stable=True)]
    return torch.cat([shared, own]).view(-1, width)
