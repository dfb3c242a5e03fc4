"""Validate a training state before a run resumes from it. The state's digests detect damage, but not edits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dunes import checkpoint
from dunes.evaluate.preferences import PreferenceScore
from dunes.evaluate.text_loss import Score
from dunes.measure import ranks
from dunes.runs.config import RunConfig
from dunes.train import Record


def read_state(folder: Path, config_class: type[RunConfig]) -> dict[str, Any]:
    """Read the state in a folder `step-000123`; config (of class `config_class`), scores and schedule are objects.

    Raises ValueError with the folder and the first invalid entry.
    """
    state = checkpoint.load_state(folder)
    with invalid_state(folder):
        if (step := state["trainer"]["number"]) != int(folder.name.removeprefix("step-")):
            raise ValueError(f"it belongs to step {step!r:.60}")
        if (compiled := state.get("compiled")) not in (None, True, False):
            raise ValueError(f"compiled is {compiled!r:.60}; expected true, false or null")
        return state | {
            "config": config_class.of(state["config"]),
            "fingerprints": dict(state["fingerprints"]),
            "schedule": [_read_record(*pair) for pair in state["schedule"]],
            "warmup": index(_number(state, "warmup")) if "warmup" in state else None,
            "elapsed": _number(state, "elapsed"),
            "begin": _number({"begin": 0.0} | state, "begin"),
            "timings": {phase: float(seconds) for phase, seconds in state["timings"].items()},
            "best": read_score(state["best"]),
            "last": read_score(state["last"]),
            "best_step": index(_number(state, "best_step")),
            "checks_since_best": index(_number(state, "checks_since_best")),
            "compiled": compiled,
        }


@contextmanager
def invalid_state(folder: Path) -> Iterator[None]:
    """Turn errors caused by a state's content into a ValueError with the folder and a remedy."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error if type(error) is ValueError else f"not the state of a run: {error!r:.200}"
        raise ValueError(f"{folder}: {reason}; remove this state to resume from an older one") from None


def _number(state: Mapping[str, Any], name: str) -> Any:
    if isinstance(state[name], str) or not 0 <= state[name] < 1e300:
        raise ValueError(f"{name} is {state[name]!r:.60}; expected a number from 0")
    return state[name]


def _read_record(begin: Any, end: Any) -> Record:
    if not 0 <= index(begin) <= index(end):
        raise ValueError(f"schedule has a decay from step {begin} to {end}")
    return Record(begin, end)


def read_score(values: Any) -> Score | None:
    """The `Score` stored as [loss_sum, tokens, size], or `PreferenceScore` stored as eight values; None for None.
    The loss of a diverged model may be NaN.

    Raises TypeError or ValueError for other values.
    """
    if values is None:
        return None
    more = values[3:] if len(values) == len(fields(PreferenceScore)) else ()
    loss, tokens, size = values[:3] if more else values
    if index(tokens) < 1 or index(size) < 0:
        raise ValueError(f"a score of {tokens} tokens and {size} bytes")
    if not more:
        return Score(float(loss), tokens, size)
    pairs, margins, correct, chosen, chosen_tokens = more
    if index(pairs) < 1 or index(chosen_tokens) < 0:
        raise ValueError(f"a score of {pairs} pairs and {chosen_tokens} chosen tokens")
    sums = float(margins), float(correct), float(chosen)
    return PreferenceScore(float(loss), tokens, size, pairs, *sums, chosen_tokens)


def first_difference(was: Any, now: Any) -> str:
    """Text about the first difference of two JSON values, like "config.rms_norm_eps was 1e-05, now 0.1".

    It is empty if the values are equal. A missing value counts as None.
    """
    before, after = _leaves(was), _leaves(now)
    path = next((path for path in before | after if before.get(path) != after.get(path)), None)
    return f"{path} was {before.get(path)!r:.60}, now {after.get(path)!r:.60}" if path is not None else ""


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Numbers, strings and other leaves of a JSON value, by dotted path."""
    if not isinstance(value, (Mapping, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {k: v for key, each in items for k, v in _leaves(each, f"{path}.{key}".lstrip(".")).items()}


def check_tensors(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless stored tensors have the expected names, shapes and dtypes and only finite values."""
    if unmatched := sorted(expected.keys() ^ stored.keys()):
        difference = f"{unmatched[0]} is in only one of them ({len(unmatched)} such names)"
        raise ValueError(f"the state belongs to another model: {difference}")
    for name, tensor in stored.items():
        _check_tensor(name, tensor, expected[name].shape, expected[name].dtype)


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if (tensor.shape, tensor.dtype) != (shape, dtype):
        difference = f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(shape)} {dtype}"
        raise ValueError(f"the state belongs to another model: {difference}")
    if not torch.isfinite(ranks.full(tensor)).all():
        raise ValueError(f"{name} contains values that are not finite")


def check_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise an error if the state is invalid for this optimizer. Call it inside `invalid_state`."""
    if parts := getattr(optimizer, "optimizers", None):
        for number, part in enumerate(parts):
            check_optimizer(part, state[str(number)])
        return
    for fresh, group in zip(optimizer.state_dict()["param_groups"], state["param_groups"], strict=True):
        if group["params"] != fresh["params"]:
            raise ValueError("the optimizer's groups differ from this run's")
        for name, value in fresh.items():
            if isinstance(value, (float, tuple)) and not torch.tensor(group[name]).isfinite().all():
                raise ValueError(f"the optimizer's {name} is {group[name]}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len({tuple(entry) for entry in state["state"].values()}) > 1:
        raise ValueError("the optimizer's parameters have different entries")
    for number, entry in state["state"].items():
        for name, value in entry.items():
            shape = parameters[number].shape if value.dim() else value.shape
            _check_tensor(f"the optimizer's {name} of parameter {number}", value, shape, value.dtype)


def shard_optimizer(optimizer: Optimizer) -> None:
    """Shard the tensors of a loaded optimizer state in the same way as the parameters."""
    for each in getattr(optimizer, "optimizers", [optimizer]):
        for p, entry in each.state.items():
            entry.update({name: ranks.part(t, p) for name, t in entry.items() if t.shape == p.shape})
