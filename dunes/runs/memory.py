"""What a piece of work holds in memory: seen while it is done, or foreseen on tensors that have no data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dunes import measure, tree
from dunes.measure import Allocations
from dunes.parts import Checkpointed, Decoder, cache_for
from dunes.train import Trainer, muon

Build = Callable[[], Decoder]


@dataclass(frozen=True)
class Shape:
    """What the memory of a step depends on beside the model; `dtype` is that of matrix products."""

    batch: int
    context: int
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False


def training(build: Build, shape: Shape, foreseen: bool = True) -> Allocations:
    """The allocations of a training step with Muon, the second one: the optimizer has its averages then.

    `foreseen`: on tensors without data, in a fraction of a second and no memory, with the same result.
    """
    with _tensors(foreseen):
        model = build()
        if shape.checkpointing:
            tree.replace(model, "blocks.*", Checkpointed)
        trainer = Trainer(model, muon(model), nats, dtype=shape.dtype)
        batch = torch.zeros(shape.batch, shape.context + 1, dtype=torch.long)
        _step(trainer, batch)
        with measure.allocations(model) as log:
            _step(trainer, batch)
    return log


def inference(build: Build, shape: Shape, foreseen: bool = True) -> Allocations:
    """The allocations of a prompt of `context` tokens and one more token after it, with their cache."""
    with _tensors(foreseen):
        model = _in(shape.dtype, build).eval()
        ids = torch.zeros(shape.batch, shape.context - 1, dtype=torch.long)
        with measure.allocations(model) as log, torch.no_grad():
            cache = cache_for(model, shape.batch, shape.context, measure.device())
            for new in (ids, ids[:, :1]):
                real = torch.ones_like(new, dtype=torch.bool)
                model(new, at=cache.start(real), cache=cache, last=1)
    return log


def _in(dtype: torch.dtype, build: Build) -> Decoder:
    """The model with weights of that type; fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def nats(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that runs train with: windows of ids (B, T + 1)."""
    assert isinstance(model, Decoder), "runs build nothing else"
    return model.nats(batch[:, :-1], batch[:, 1:])


def _step(trainer: Trainer, batch: Tensor) -> None:
    """A step as the trainer does it, but for the look at its result, which has no data here."""
    trainer.gradients([batch])
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _tensors(foreseen: bool) -> Iterator[None]:
    with FakeTensorMode() if foreseen else nullcontext(), torch.device(measure.device()):
        yield
