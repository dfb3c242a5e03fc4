"""Read a training state, and compare it with the run that resumes from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

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

    Raises ValueError with the folder if they cannot be made. The state's digests detect damage, but not edits.
    """
    state = checkpoint.load_state(folder)
    with invalid_state(folder):
        return state | {
            "config": config_class.of(state["config"]),
            "schedule": [Record(*pair) for pair in state["schedule"]],
            "best": read_score(state["best"]),
            "last": read_score(state["last"]),
        }


@contextmanager
def invalid_state(folder: Path) -> Iterator[None]:
    """Turn errors caused by a state's content into a ValueError with the folder and a remedy."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error if type(error) is ValueError else f"not the state of a run: {error!r:.200}"
        raise ValueError(f"{folder}: {reason}; remove this state to resume from an older one") from None


def read_score(values: Any) -> Score | None:
    """The `Score` stored as a list of three values, or `PreferenceScore` as one of eight; None for None."""
    if values is None:
        return None
    return PreferenceScore(*values) if len(values) == len(fields(PreferenceScore)) else Score(*values)


def check_tensors(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless stored tensors have these names, shapes and dtypes: a copy would broadcast."""
    if unmatched := sorted(expected.keys() ^ stored.keys()):
        difference = f"{unmatched[0]} is in only one of them ({len(unmatched)} such names)"
        raise ValueError(f"the state belongs to another model: {difference}")
    for name, tensor in stored.items():
        shape, dtype = expected[name].shape, expected[name].dtype
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            difference = f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(shape)} {dtype}"
            raise ValueError(f"the state belongs to another model: {difference}")


def shard_optimizer(optimizer: Optimizer) -> None:
    """Shard the tensors of a loaded optimizer state in the same way as the parameters."""
    for each in getattr(optimizer, "optimizers", [optimizer]):
        for p, entry in each.state.items():
            entry.update({name: ranks.part(t, p) for name, t in entry.items() if t.shape == p.shape})
