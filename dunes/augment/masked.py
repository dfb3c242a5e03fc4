"""A linear layer whose zero weights stay zero in training."""

from collections.abc import Collection

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
    if places:
        tree.replace(model, {*places}, lambda linear: _converted(linear, MaskedLinear), reach="inner")


def unmask_linears(model: nn.Module) -> None:
    """Replace all masked layers by `nn.Linear`, so that zeros are trained again."""
    if places := masked_places(model):
        tree.replace(model, {*places}, lambda linear: _converted(linear, nn.Linear), reach="inner")


def masked_places(model: nn.Module) -> list[str]:
    """Places of the masked layers."""
    return [p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), MaskedLinear)]


def _converted(linear: nn.Module, kind: type[nn.Linear]) -> nn.Linear:
    """A linear layer of this class with the same parameters."""
    assert isinstance(linear, nn.Linear)
    with torch.device("meta"):
        other = kind(linear.in_features, linear.out_features, linear.bias is not None)
    other.weight, other.bias = linear.weight, linear.bias
    return other.train(linear.training)
