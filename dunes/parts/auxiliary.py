"""Losses that parts add to the model's own in training, such as the balance of a mixture of experts.

A part with such losses has a method `auxiliary_losses(recorded, real) -> {name: loss}`. While a loss is
computed in training, its attribute `recorded` is a list, to which its forward appends what the method needs.
A pair (sums, count) in place of a loss is a metric, which is only reported.
"""

# Shapes: N tokens.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Recorded = dict[Any, list[Tensor]]


@contextmanager
def record_auxiliary(model: nn.Module) -> Iterator[Recorded]:
    """What each part with auxiliary losses records inside; none outside of training."""
    recorded: Recorded = {m: [] for m in model.modules() if hasattr(m, "auxiliary_losses") and model.training}
    for part, tensors in recorded.items():
        part.recorded = tensors
    try:
        yield recorded
    finally:
        # Activation checkpointing runs forwards again later.
        for part in recorded:
            part.recorded = None


def auxiliary_losses(
    recorded: Recorded, real: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """The mean of each named loss over the parts that recorded something for it, and their metrics.

    Parts of several kinds, such as mixtures and LoRA experts beside them, each have their own mean, and these are
    added: each kind is balanced as it would be alone. A kind is the method that computes the losses.

    The sums of a metric are stacked over the parts, (parts, ...); where vectors have different lengths, the rest
    is -1. `real` (N,) excludes padding; each call of a part must then be of the same N tokens.
    """
    values: dict[str, list[tuple[Any, Any]]] = {}
    for part, tensors in recorded.items():
        for name, value in part.auxiliary_losses(tensors, real).items() if tensors else ():
            values.setdefault(name, []).append((type(part).auxiliary_losses, value))
    losses = {name: _sum_of_means(same) for name, same in values.items() if isinstance(same[0][1], Tensor)}
    metrics = {name: _stacked([pair for _, pair in same]) for name, same in values.items() if name not in losses}
    return losses, metrics


def _sum_of_means(values: list[tuple[Any, Tensor]]) -> Tensor:
    """The mean of the losses of each kind, added up; `values` are pairs of a kind and a loss."""
    by_kind: dict[Any, list[Tensor]] = {}
    for kind, loss in values:
        by_kind.setdefault(kind, []).append(loss)
    means = [torch.stack(losses).mean() for losses in by_kind.values()]
    return sum(means[1:], start=means[0])


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    sums = pad_sequence([total for total, _ in pairs], batch_first=True, padding_value=-1.0)
    return sums, pairs[0][1]
