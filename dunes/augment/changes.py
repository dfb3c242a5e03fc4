"""The table of all changes to a built model, and functions that make, repeat and undo them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from dunes.augment import expand, experts, lora, lora_experts, narrow, prune, quantization, routing, upcycle
from dunes.augment.change import Change, Part
from dunes.augment.options import OPTIONS

Tensors: TypeAlias = Mapping[str, Tensor]
"""Entries of a state dict."""

CHANGES: dict[str, Any] = {
    "expand": expand,
    "experts": experts,
    "lora": lora,
    "lora-experts": lora_experts,
    "narrow": narrow,
    "prune": prune,
    "quantize": quantization,
    "routing": routing,
    "upcycle": upcycle,
}
"""The entries by name. Each is a module with

- `VERSION`, which rises when an older record would give another model,
- `decide(model, options) -> Change`, with options of its class in OPTIONS, which may read weights and, with
  calibration text as `ids`, run the model, and changes nothing,
- if it is made block by block, `solve(model, change, ids) -> Iterator[Part]`: for each of `change.parts()`
  it changes the weights while they are still dense, as by calibration, and yields the completed record and, by
  place, further arguments of `fill`. Each part is shaped and filled before the next is solved,
- `shape(model, change)`, which changes the structure and reads no value (also on the meta device),
- if new weights are computed, `fill(model, change, weights)` with the state dict before the change, or
  `fill(model, change, weights, solved)` with the state dict after `solve`,
- if more calibration text than usual is of use, `calibration_tokens(model) -> int`,
- if a user should see the decisions, `describe(change) -> str`, one sentence,
- and if it can be undone, `undo(model, change)`; `RESTORES = True` if that restores the weights bit for bit.
"""


Spill: TypeAlias = Callable[[Tensors], Tensors]
"""Writes the tensors of a finished part to disk and returns memory-mapped tensors of the same values."""


def apply_change(model: nn.Module, name: str, *, spill: Spill | None = None, **request: Any) -> Change:
    """Change the model in place, and return the record of the change.

    `request` are the options of the change and, if it reads calibration text, `ids` (S, T) int64. `spill` gets
    each finished part of a change that is made block by block. Raises ValueError for invalid options, before
    anything is changed. If a change fails midway, as by inputs that are not finite, earlier blocks stay changed:
    load the model again.
    """
    try:
        return make_change(model, decide_change(model, name, **request), request.get("ids"), spill)
    except AttributeError as error:  # of a module, such as a user's own
        place = next((place for place, module in model.named_modules() if module is error.obj), None)
        if place is None:
            raise
        raise ValueError(
            f"{place or 'the model'} is {type(error.obj).__name__}, which has no {error.name}: the change {name} "
            "is not made to such a part"
        ) from None


def decide_change(model: nn.Module, name: str, **request: Any) -> Change:
    """The record of a change with these options, which is not made yet. Raises ValueError for invalid options."""
    text = {"ids": ids} if (ids := request.pop("ids", None)) is not None else {}
    change: Change = CHANGES[name].decide(model, OPTIONS[name](**request), **text)
    return change


def make_change(model: nn.Module, change: Change, ids: Tensor | None = None, spill: Spill | None = None) -> Change:
    """Make a decided change, its structure and its initial weights, and return its record.

    If the change is solved for, on calibration text `ids` (S, T) int64, the record is completed by the solver.
    """
    entry, places = _entry(change), dict[str, Any]()
    for part in entry.solve(model, change, ids) if hasattr(entry, "solve") else [Part(change)]:
        _make_part(model, entry, part, spill)
        places |= part.change.places
    return replace(change, places={name: places[name] for name in change.places})


def _make_part(model: nn.Module, entry: Any, part: Part, spill: Spill | None) -> None:
    """Shape and fill one part of a change, and let `spill` store the tensors of its block."""
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
    """Change the structure of the model as recorded; its weights are loaded afterwards.

    Raises ValueError for an unknown change, and for a record that does not fit the model.
    """
    with _undamaged(change):
        _entry(change).shape(model, change)


@contextmanager
def _undamaged(change: Change) -> Iterator[None]:
    """Turn errors from a value of the record that does not fit the model into ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the record of the change {change.name} is damaged: {error!r}") from None


def undo_change(model: nn.Module, change: Change) -> None:
    """Undo a change, exactly if its entry RESTORES. Raises ValueError if it cannot be undone or is damaged."""
    if not hasattr(entry := _entry(change), "undo"):
        raise ValueError(f"the change {change.name} cannot be taken back; load the model as it was before")
    with _undamaged(change):
        entry.undo(model, change)


def _entry(change: Change) -> Any:
    entry = CHANGES.get(change.name)
    if entry is None or not 1 <= change.version <= entry.VERSION:
        raise ValueError(
            f"the change {change.name[:80]!a} of version {change.version} is not known; it needs a newer dunes"
        )
    return entry


def attach(model: nn.Module, **request: Any) -> Change:
    """Add an untrained LoRA adapter to linear layers of the model and activate it; returns the record.

    `request` are fields of `options.Lora`. Nothing is frozen: `change.new` are globs of the new parameters, and
    `tree.freeze(model, ["**", *(f"!{new}" for new in change.new)])` leaves only these trainable. Raises ValueError
    for invalid options, before anything is changed.
    """
    return apply_change(model, "lora", **request)


def quantize(model: nn.Module, **request: Any) -> Change:
    """Quantize linear layers, inside their wrappers if they have any; returns the record.

    `request` are fields of `options.Quantize` and calibration text `ids` (S, T) int64. Raises ValueError for
    invalid options, before anything is changed.
    """
    return apply_change(model, "quantize", **request)
