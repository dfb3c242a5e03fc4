"""Reading and checking a training state before resuming from it: digests detect damage, not edits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dunes import checkpoint
from dunes.runs.config import RunConfig
from dunes.runs.evaluate import Score
from dunes.train import Record


def read_state(folder: Path, config_class: type[RunConfig]) -> dict[str, Any]:
    """The state in a folder `step-000123`, with config (of class `config_class`), scores and schedule as objects.

    Raises ValueError that names the folder and the first invalid entry.
    """
    state = checkpoint.load_state(folder)
    if isinstance(state.get("trainer"), dict):
        state |= {name: state["trainer"].get(name) for name in ("number", "bad", "optimizer")}
    for name, (expected, fits) in FIELDS.items():
        if name not in state or not fits(state[name]):
            raise wrong_state(folder, f"{name} is {repr(state.get(name))[:60]}; expected {expected}")
    if state["number"] != int(folder.name.removeprefix("step-")):
        raise wrong_state(folder, f"it belongs to step {state['number']}")
    try:
        config = config_class.of(state["config"])
    except ValueError as error:
        raise wrong_state(folder, str(error)) from None
    scores = {name: state[name] and Score(*state[name]) for name in ("best", "last")}
    return state | scores | {"config": config, "schedule": [Record(*pair) for pair in state["schedule"]]}


def wrong_state(folder: Path, words: str) -> ValueError:
    """An error about an invalid state, with the remedy."""
    return ValueError(f"{folder}: {words}; remove this state to resume from an older one")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def is_score(value: Any) -> bool:
    """[loss_sum, tokens, bytes]; the loss of a diverged model may be NaN."""
    return value is None or (
        isinstance(value, list) and len(value) == 3 and type(value[0]) is float and value[1] > 0
        and all(map(_is_count, value[1:]))
    )  # fmt: skip


def _is_records(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(_is_count(begin) and _is_count(end) and begin <= end for begin, end in value)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(tensor, Tensor) for tensor in value.values())


_SCORE = ("[loss_sum, tokens, bytes] or null", is_score)
_TENSORS = ("tensors by their names", _is_tensors)
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "config": ("the run's config", lambda v: isinstance(v, dict)),
    "fingerprints": ("fingerprints of the data", lambda v: isinstance(v, dict)),
    "weights": _TENSORS,
    "best_weights": _TENSORS,
    "number": ("the number of steps", _is_count),
    "bad": ("a number of steps", _is_count),
    "optimizer": ("an optimizer's state", lambda v: isinstance(v, dict)),
    "schedule": ("pairs of steps", _is_records),
    "elapsed": ("seconds", lambda v: _is_number(v) and v >= 0),
    "timings": ("seconds by name", lambda v: isinstance(v, dict) and all(map(_is_number, v.values()))),
    "best": _SCORE,
    "last": _SCORE,
    "best_step": ("a number of steps", _is_count),
    "checks_since_best": ("a number of checks", _is_count),
}
"""The entries of a state, in words and as checks."""


def check_tensors(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless names, shapes and dtypes are equal and all stored values are finite."""
    if odd := sorted(expected.keys() ^ stored.keys()):
        raise ValueError(
            f"the state belongs to another model: {odd[0]} is in only one of them ({len(odd)} such names)"
        )
    for name, tensor in stored.items():
        _check_tensor(name, tensor, expected[name])


def _check_tensor(name: str, tensor: Tensor, expected: Tensor) -> None:
    for what in ("shape", "dtype"):
        if getattr(tensor, what) != getattr(expected, what):
            actual, wanted = getattr(tensor, what), getattr(expected, what)
            raise ValueError(f"the state belongs to another model: the {what} of {name} is {actual}, not {wanted}")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} contains values that are not finite")


def check_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the state is valid for this optimizer."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        _check_part(optimizer, state)
        return
    for number, part in enumerate(parts):
        _check_part(part, state.get(str(number)))


def _check_part(optimizer: Optimizer, state: Any) -> None:
    """Check one optimizer: its groups, and for each parameter the same entries of its own shape."""
    fresh = optimizer.state_dict()["param_groups"]
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise ValueError("an optimizer's state is missing")
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(fresh) or not all(map(_same_options, fresh, groups)):
        raise ValueError("the optimizer's groups are not those of this run")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries: dict[int, Any] = state["state"]
    names = {tuple(entry) if isinstance(entry, dict) else () for entry in entries.values()}
    if not entries.keys() <= {*range(len(parameters))} or len(names) > 1:
        raise ValueError(f"the optimizer's parameters have different entries: {sorted(names, key=len)[:2]}")
    for index, entry in entries.items():
        for name, value in entry.items():
            _check_entry(f"the optimizer's {name} of parameter {index}", value, parameters[index])


def _check_entry(name: str, value: Any, parameter: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {repr(value)[:60]}; expected a tensor")
    if value.dim() and value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} contains values that are not finite")


def _same_options(fresh: dict[str, Any], stored: Any) -> bool:
    """Whether a group has the same parameters, and options of the same types."""
    if not isinstance(stored, dict) or stored.get("params") != fresh["params"]:
        return False
    options = [(value, stored[name]) for name, value in fresh.items() if name != "params" and name in stored]
    return "lr" in stored and all(_same_type(*pair) for pair in options)


def _same_type(fresh: Any, stored: Any) -> bool:
    """Whether an option has the same type. Kernel options (a bool or None) may differ between machines."""
    if _is_number(fresh):
        return _is_number(stored)
    if isinstance(fresh, tuple):
        return isinstance(stored, tuple) and len(fresh) == len(stored) and all(map(_same_type, fresh, stored))
    return stored is None or type(stored) is type(fresh) or isinstance(stored, bool)
