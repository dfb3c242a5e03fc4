"""Merging an adapter into its base weights."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import Adapted, dense, is_embedding, keeps_zeros
from dunes.augment.lora import adapted_modules
from dunes.augment.masked import MaskedLinear, linear_of


class Merged(NamedTuple):
    """The result of a merge: rounding `errors` by place, and the replaced modules with `merge(keep=True)`.

    An error is the norm of the rounding error divided by the norm of the update: about 1e-7 in float32, 0.1 and
    more in bfloat16, where an update that is small relative to the weights is mostly rounded away.
    """

    errors: dict[str, float]
    kept: dict[str, nn.Module]


@torch.no_grad()
def merge(
    model: nn.Module, adapter: str | None = None, keep: bool = False, dtype: torch.dtype | None = None
) -> Merged:
    """Merge the adapter (by default the only one) into the base weights and remove the adapter wrappers.

    A quantized base becomes dense. With `keep` the replaced modules stay in memory for `unmerge`, beside the
    merged matrices. `dtype` is the dtype of the merged matrices, by default the base's. Raises ValueError if other
    adapters share a place, as they were trained for the unmerged base.
    """
    selected = adapted_modules(model, adapter)
    for place, outer in selected.items():
        if mixtures := [n for n, a in outer.adapters.items() if a.depends_on_input and adapter in (None, n)]:
            raise ValueError(
                f"{place}: {mixtures[0]!r} is a mixture of LoRA experts, which depend on the input: no matrix "
                "equals it; use the model as it is"
            )
        if len(outer.adapters) > 1:
            raise ValueError(f"{place}: adapters {', '.join(outer.adapters)}; detach all but the one to merge")
    if adapter is None and len(names := {n for m in selected.values() for n in m.adapters}) > 1:
        raise ValueError(f"adapters {', '.join(sorted(names))} are at different places; name the one to merge")
    errors = {}
    for spot in [p for p in tree.places(model) if p.name in selected]:
        errors[spot.name], module = _merge_place(selected[spot.name], keep, dtype)
        setattr(spot.parent, spot.key, module)
    return Merged(errors, dict(selected) if keep else {})


def unmerge(model: nn.Module, merged: Merged) -> None:
    """Restore the modules from before a merge. Raises ValueError unless it was made with `keep=True`."""
    if not merged.kept:
        raise ValueError("this merge kept no modules; merge with keep=True, or load the base again")
    for place in [p for p in tree.places(model) if p.name in merged.kept]:
        setattr(place.parent, place.key, merged.kept[place.name])


def _merge_place(outer: Adapted, keep: bool, dtype: torch.dtype | None) -> tuple[float, nn.Module]:
    """The relative rounding error and the merged module."""
    (name,) = outer.adapters
    base = dense(outer.base)
    exact = outer[name].updated(outer.base)
    weight = exact.to(dtype or base.dtype)
    rounding, update = (weight.double() - exact).norm(), (exact - base.double()).norm()
    error = (rounding / update).item() if update else 0.0
    return error, _plain(outer.base, weight, keep).train(outer.training)


def _plain(base: nn.Module, weight: Tensor, keep: bool) -> nn.Module:
    if isinstance(base, nn.Linear | nn.Embedding) and not keep and base.weight.dtype == weight.dtype:
        base.weight.copy_(weight)
        return base
    parameter = nn.Parameter(weight, any(p.requires_grad for p in base.parameters()))
    if not is_embedding(base):
        cls = MaskedLinear if keeps_zeros(base) else nn.Linear
        return linear_of(parameter, getattr(base, "bias", None), base.training, cls)
    with torch.device("meta"):
        plain = nn.Embedding(*weight.shape)
    plain.weight = parameter
    return plain
