"""Folding an adapter into the matrices beside which it stands."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import Adapted, dense, embeds
from dunes.augment.lora import wrapped


class Merged(NamedTuple):
    """What a merge did: the `errors` of rounding by place, and what stood there, if it was to be kept.

    An error is the norm of what the stored matrix lacks, as a share of the norm of the change. In float32 it is
    about 1e-7; in bfloat16 it may be 0.1 and more, for a small change of large numbers is mostly rounded off.
    """

    errors: dict[str, float]
    kept: dict[str, nn.Module]


@torch.no_grad()
def merge(
    model: nn.Module, adapter: str | None = None, keep: bool = False, dtype: torch.dtype | None = None
) -> Merged:
    """Fold the adapter (the only one, if none is named) into the base, and leave a plain tree.

    A quantized base becomes a dense one. With `keep` the wrappers are kept as they are, for `unmerge`, which
    takes the memory of the changed matrices once more. With `dtype` the changed matrices are rounded to that
    instead of to the base's. Raises ValueError where other adapters stand
    beside it: they were made for the base as it was.
    """
    found = wrapped(model, adapter)
    for place, outer in found.items():
        if len(outer.adapters) > 1:
            raise ValueError(f"{place}: adapters {', '.join(outer.adapters)}; detach all but the one to be merged")
    if adapter is None and len(names := {n for m in found.values() for n in m.adapters}) > 1:
        raise ValueError(f"adapters {', '.join(sorted(names))} are at different places; name the one to be merged")
    errors = {}
    for spot in [p for p in tree.places(model) if p.name in found]:
        errors[spot.name], module = _folded(found[spot.name], keep, dtype)
        setattr(spot.parent, spot.key, module)
    return Merged(errors, dict(found) if keep else {})


def unmerge(model: nn.Module, merged: Merged) -> None:
    """Put back what a merge has kept: the very same modules. Raises ValueError if it has kept nothing."""
    if not merged.kept:
        raise ValueError("this merge kept nothing to go back to; merge with keep=True, or load the base again")
    for place in [p for p in tree.places(model) if p.name in merged.kept]:
        setattr(place.parent, place.key, merged.kept[place.name])


def _folded(outer: Adapted, keep: bool, dtype: torch.dtype | None) -> tuple[float, nn.Module]:
    """The error of rounding, and the plain module."""
    (name,) = outer.adapters
    before = dense(outer.base)
    exact = outer[name].changed(outer.base)
    weight = exact.to(dtype or before.dtype)
    lost, change = (weight.double() - exact).norm(), (exact - before.double()).norm()
    error = (lost / change).item() if change else 0.0
    return error, _plain(outer.base, weight, keep).train(outer.training)


def _plain(base: nn.Module, weight: Tensor, keep: bool) -> nn.Module:
    if isinstance(base, nn.Linear | nn.Embedding) and not keep and base.weight.dtype == weight.dtype:
        base.weight.copy_(weight)
        return base
    with torch.device("meta"):
        plain = nn.Embedding(*weight.shape) if embeds(base) else nn.Linear(weight.shape[1], weight.shape[0], False)
    learns = any(p.requires_grad for p in base.parameters())
    plain.weight = nn.Parameter(weight, learns)
    if isinstance(plain, nn.Linear):
        plain.register_parameter("bias", getattr(base, "bias", None))
    return plain
