"""What a piece of work holds in memory: seen while it is done, or foreseen on tensors that have no data."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from dunes import measure, tree
from dunes.measure import Allocations
from dunes.parts import Checkpointed, Decoder, cache_for
from dunes.train import Trainer, muon
from dunes.train.loss import Loss

Build = Callable[[], Decoder]

STARTED = measure.resident_memory() + 190e6
"""Bytes of Python and torch: what there is now, and the code and workspaces that come with the first steps."""

HOLES = 0.45
"""Of what the steps of training take, as much again lies unused between it: glibc's heap after some steps."""


@dataclass(frozen=True)
class Shape:
    """What the memory of a step depends on beside the model; `dtype` is that of matrix products."""

    batch: int
    context: int
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False


def nats(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that runs train with: windows of ids (B, T + 1)."""
    assert isinstance(model, Decoder), "runs build nothing else"
    return model.loss(batch[:, :-1], batch[:, 1:])


def windows(shape: Shape) -> Tensor:
    """A batch of that shape, for `nats`."""
    return torch.zeros(shape.batch, shape.context + 1, dtype=torch.long)


class TrainSetup(NamedTuple):
    """What a step is made of beside the model."""

    optimizer: Callable[[nn.Module], Optimizer] = muon
    loss: Loss = nats
    batch: Callable[[Shape], Any] = windows


def training(
    build: Build,
    shape: Shape,
    foreseen: bool = True,
    learning: TrainSetup = TrainSetup(),  # noqa: B008  (frozen)
) -> Allocations:
    """The allocations of a training step, the second one: the optimizer has its averages then.

    `foreseen`: on tensors without data, in a fraction of a second and no memory, with the same result.
    """
    with _tensors(foreseen):
        model = build()
        if shape.checkpointing:
            tree.replace(model, "blocks.*", Checkpointed)
        trainer = Trainer(model, learning.optimizer(model), learning.loss, dtype=shape.dtype)
        batch = learning.batch(shape)
        _step(trainer, batch)
        with measure.allocations(model) as log:
            _step(trainer, batch)
    return log


def inference(build: Build, shape: Shape, foreseen: bool = True) -> Allocations:
    """The allocations of a prompt of `context` tokens and one more token after it, with their cache."""
    with _tensors(foreseen):
        model = build_with_dtype(shape.dtype, build).eval()
        ids = torch.zeros(shape.batch, shape.context - 1, dtype=torch.long)
        with measure.allocations(model) as log, torch.no_grad():
            cache = cache_for(model, shape.batch, shape.context, measure.device())
            for new in (ids, ids[:, :1]):
                real = torch.ones_like(new, dtype=torch.bool)
                model(new, positions=cache.start(real), cache=cache, last=1)
    return log


def build_with_dtype(dtype: torch.dtype, build: Build) -> Decoder:
    """The model with weights of that type; fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def process(log: Allocations, learned: int) -> dict[str, float]:
    """Bytes of a process that trains, by what holds them; `learned` are those of the weights that it changes."""
    parts: dict[str, float] = {str(kind): size for (kind,), size in log.by("kind").items()}
    if measure.device().type == "cuda":
        return parts
    weights, averages = (log.by("kind", moment=0).get((kind,), 0) for kind in ("parameters", "optimizer"))
    parts["Python and torch"] = STARTED
    parts["fragmentation"] = HOLES * (log.peak - weights)
    parts["copies for saving"] = 3 * learned + averages
    return parts


def largest(parts: Mapping[str, float]) -> str:
    """How much it is in all, and its largest parts, in words."""
    first = sorted(parts.items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in first)
    return f"this run needs about {sum(parts.values()) / 1e9:.1f} GB, including {words}"


def _step(trainer: Trainer, batch: Any) -> None:
    """A step as the trainer does it, but for the look at its result, which has no data here."""
    trainer.gradients([batch])
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _tensors(foreseen: bool) -> Iterator[None]:
    with FakeTensorMode() if foreseen else nullcontext(), torch.device(measure.device()):
        yield
