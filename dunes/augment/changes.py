"""The table of all kinds of change to a model, and functions that make, repeat and undo changes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from dunes.augment import expand, experts, lora, lora_experts, prune, prune_units, quantization, routing, upcycle
from dunes.augment.change import Change, Part
from dunes.augment.options import OPTIONS
from dunes.context import prefix_errors

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by name, from a state dict."""

CHANGES: dict[str, Any] = {
    "expand": expand,
    "experts": experts,
    "lora": lora,
    "lora-experts": lora_experts,
    "narrow": prune_units,
    "prune": prune,
    "quantize": quantization,
    "routing": routing,
    "upcycle": upcycle,
}
"""Maps the name of each kind of change to a Python module that defines:

- `VERSION`: a number that is increased when new code would build another model from an existing record.
- `decide(model, options) -> Change`: decides every setting and changes nothing; `options` is an instance of the
  class in OPTIONS. This function may read weights and, if it takes calibration text `ids`, run the model.
- `solve(model, change, ids) -> Iterator[Part]`, for a change that is made block by block. For each of
  `change.parts()`, this function changes the weights while they are dense, for example by calibration, and yields
  a `Part`. `shape` and `fill` are called for each part before `solve` continues with the next part.
- `shape(model, change)`: changes the structure without reading values, so it also runs on the meta device.
- `fill(model, change, weights)`, if the change computes new weights; `weights` is the state dict before `shape`.
  With `solve`, the call is `fill(model, change, weights, part.solved)` for each part.
- `calibration_tokens(model) -> int`, if more calibration text than usual improves the result.
- `describe(change) -> str`: one sentence that tells users the decisions, if they need to know them.
- `undo(model, change)`, if the change can be undone; `RESTORES = True` if this restores the weights bit for bit.
"""


Spill: TypeAlias = Callable[[Tensors], Tensors]
"""A function that writes tensors to disk and returns memory-mapped tensors with the same names and values."""


def apply_change(model: nn.Module, name: str, *, spill: Spill | None = None, **request: Any) -> Change:
    """Change the model in place, and return the record of the change.

    `request` contains the options of the change; `ids` (S, T) int64 is the calibration text, if it is needed.
    In a change that is made block by block, `spill` is called with the tensors of each finished block. Raises
    ValueError for invalid options, before anything is changed. If a change fails midway (for example because
    inputs are not finite), earlier blocks stay changed, so load the model again.
    """
    try:
        return make_change(model, decide_change(model, name, **request), request.get("ids"), spill)
    except AttributeError as error:  # a module of the model lacks an attribute
        place = next((place for place, module in model.named_modules() if module is error.obj), None)
        if place is None:
            raise
        raise ValueError(
            f"{place or 'the model'} is {type(error.obj).__name__}, which has no {error.name}: the change {name} "
            "does not support this part"
        ) from None


def decide_change(model: nn.Module, name: str, **request: Any) -> Change:
    """Decide a change without making it, and return its record. Raises ValueError for invalid options."""
    text = {"ids": ids} if (ids := request.pop("ids", None)) is not None else {}
    change: Change = CHANGES[name].decide(model, OPTIONS[name](**request), **text)
    return change


def make_change(model: nn.Module, change: Change, ids: Tensor | None = None, spill: Spill | None = None) -> Change:
    """Make a decided change: change the structure and set the initial weights. Returns the record.

    `ids` (S, T) int64 is the calibration text. If the module in CHANGES defines `solve`, that function completes
    the record.
    """
    entry, places = _entry(change), dict[str, Any]()
    for part in entry.solve(model, change, ids) if hasattr(entry, "solve") else [Part(change)]:
        _make_part(model, entry, part, spill)
        places |= part.change.places
    return replace(change, places={name: places[name] for name in change.places})


def _make_part(model: nn.Module, entry: Any, part: Part, spill: Spill | None) -> None:
    """Call `shape` and `fill` for one part of a change, then let `spill` store the tensors of the part's block."""
    by_block, weights = hasattr(entry, "solve"), model.state_dict()
    repeat_structure(model, part.change)
    if hasattr(entry, "fill"):
        entry.fill(model, part.change, weights, *([part.solved] if by_block else []))
    if by_block and spill is not None:
        del weights
        tensors = {name: t for name, t in model.state_dict().items() if name.startswith(f"{part.name}.")}
        unexpected = model.load_state_dict(spill(tensors), strict=False, assign=True).unexpected_keys
        assert not unexpected, unexpected


def repeat_structure(model: nn.Module, change: Change) -> None:
    """Change only the structure of the model, as recorded; the caller sets or loads the weights afterwards.

    Raises ValueError for an unknown change, and for a record that does not fit the model.
    """
    with _undamaged(change):
        _entry(change).shape(model, change)


def _undamaged(change: Change) -> AbstractContextManager[None]:
    """A context that turns errors caused by a damaged record into ValueError."""
    errors = LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError
    return prefix_errors(f"the record of the change {change.name} is damaged", errors, describe=repr)


def undo_change(model: nn.Module, change: Change) -> None:
    """Undo a change, bit for bit if its entry in CHANGES has `RESTORES = True`.

    Raises ValueError for a change that cannot be undone, and for a damaged record.
    """
    if not hasattr(entry := _entry(change), "undo"):
        raise ValueError(f"the change {change.name} cannot be undone; load the model from before the change")
    with _undamaged(change):
        entry.undo(model, change)


def _entry(change: Change) -> Any:
    entry = CHANGES.get(change.name)
    if entry is None or change.version != entry.VERSION:
        known = "knows no such change" if entry is None else f"reads version {entry.VERSION}"
        raise ValueError(
            f"the change {change.name[:80]!a} has version {change.version}, and this dunes {known}; make the "
            "change again with this dunes, or update it"
        )
    return entry


def attach(model: nn.Module, **request: Any) -> Change:
    """Add an untrained LoRA adapter to linear layers of the model and activate it; return the record.

    `request` contains fields of `options.Lora`. No parameter is frozen. `change.new` contains globs of the new
    parameters; `tree.freeze(model, ["**", *(f"!{new}" for new in change.new)])` freezes all others. Raises
    ValueError for invalid options, before anything is changed.
    """
    return apply_change(model, "lora", **request)


def quantize(model: nn.Module, **request: Any) -> Change:
    """Quantize linear layers, also inside wrappers such as adapters; return the record.

    `request` contains fields of `options.Quantize`. A method that calibrates needs the text `ids` (S, T) int64.
    Raises ValueError for invalid options, before anything is changed.
    """
    return apply_change(model, "quantize", **request)
