"""A linear layer whose zero weights stay zero in training."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree


class MaskedLinear(nn.Linear):
    """A pruned linear layer: weights that are zero before an optimizer step are zero after it.

    The trainer calls `before_step` and `after_step`; a training loop of your own must call them, too. It computes
    and is saved like `nn.Linear`.
    """

    structure_name = "Linear"  # the mask is no part of the structure
    keeps_zeros = True  # also with adapters on top
    _zeros: Tensor | None = None

    @torch.no_grad()
    def before_step(self) -> None:
        """Store the mask of zeros, if the weight is trainable."""
        if self.weight.requires_grad:
            self._zeros = self.weight == 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Set the stored zeros again."""
        if self._zeros is not None:
            self.weight.masked_fill_(self._zeros, 0)
            self._zeros = None


def mask_linears(model: nn.Module, places: Collection[str]) -> None:
    """Replace the dense linear layers at these places, inside any wrappers, by `MaskedLinear`.

    Raises ValueError, before anything is changed, for a place without a dense linear layer.
    """
    linears = {p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), nn.Linear)}
    if missing := sorted({*places} - linears):
        raise ValueError(f"{missing[0][:200]}: this model has no such dense linear layer")
    _convert_linears(model, places, MaskedLinear)


def unmask_linears(model: nn.Module) -> None:
    """Replace all masked layers by `nn.Linear`, so that zeros are trained again."""
    _convert_linears(model, masked_places(model), nn.Linear)


def masked_places(model: nn.Module) -> list[str]:
    """Places of the masked layers."""
    return [p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), MaskedLinear)]


def _convert_linears(model: nn.Module, places: Collection[str], cls: type[nn.Linear]) -> None:
    make: Any = lambda linear: linear_of(linear.weight, linear.bias, linear.training, cls)
    if places:
        tree.replace(model, {*places}, make, reach="inner")


def linear_of(
    weight: nn.Parameter, bias: nn.Parameter | None, training: bool, cls: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """A linear layer of this class with these parameters."""
    rows, columns = weight.shape
    with torch.device("meta"):
        linear = cls(columns, rows, False)
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear.train(training)
