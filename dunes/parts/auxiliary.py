"""Losses that parts add to the model's own in training, such as the balance of a mixture of experts.

A part with such losses has a method `auxiliary_losses(recorded, real) -> {name: loss}`. While a loss is
computed in training, its attribute `recorded` is a list, to which its forward appends what the method needs.
"""

# Shapes: N tokens.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


def auxiliary_losses(recorded: Recorded, real: Tensor | None = None) -> dict[str, Tensor]:
    """The mean of each named loss over the parts that recorded something for it.

    `real` (N,) excludes padding; each call of a part must then be of the same N tokens.
    """
    losses: dict[str, list[Tensor]] = {}
    for part, tensors in recorded.items():
        for name, loss in part.auxiliary_losses(tensors, real).items() if tensors else ():
            losses.setdefault(name, []).append(loss)
    return {name: torch.stack(same).mean() for name, same in losses.items()}
