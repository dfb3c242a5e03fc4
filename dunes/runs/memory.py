"""Memory of training and inference, measured on real tensors or estimated on fake tensors."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from dunes import measure, tree
from dunes.measure import Allocations, ranks
from dunes.parts import Checkpointed, Decoder, cache_for
from dunes.train import Trainer, muon
from dunes.train.loss import Loss, next_token_loss

Build = Callable[[], Decoder]

PROCESS = measure.resident_memory() + 190e6
"""Bytes that Python and torch need: resident memory after import, plus code and workspaces of the first steps."""

FRAGMENTATION = 0.45
"""Memory lost to fragmentation if all weights are trained, as a fraction of the allocations in glibc's heap.
Training an adapter loses hardly any memory, since it allocates little except activations."""

MOST_LOST = 0.3e9
"""Maximum memory in bytes lost to fragmentation. Training a model of 135M parameters, with 2 GB in the heap, loses
hardly more."""

MEASURED_TOKENS = 1024
"""Maximum number of tokens in a timed micro-batch, unless two rows have more."""


@dataclass(frozen=True)
class Shape:
    """Shape of a training batch; `dtype` is for autocast, `checkpointing` turns on activation checkpointing."""

    batch: int
    context: int
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False


class TrainSetup(NamedTuple):
    """Functions for a training step: build the optimizer, compute the loss, make a batch (of zeros)."""

    optimizer: Callable[[nn.Module], Optimizer] = muon
    loss: Loss = next_token_loss
    batch: Callable[[Shape], Any] = lambda shape: torch.zeros(shape.batch, shape.context + 1, dtype=torch.long)


TRAINING = TrainSetup()
"""The setup of `dunes train`."""


def train_allocations(
    build: Build, shape: Shape, estimated: bool = True, setup: TrainSetup = TRAINING, number: int | None = None
) -> Allocations:
    """Allocations of the second training step; the first step creates the optimizer state.

    If `estimated` is true, fake tensors give the same result in a fraction of a second without using memory. The
    allocations are those of rank 0 of `number` ranks (by default, the ranks of this run); `shape.batch` counts the
    rows of one rank.
    """
    with ranks.fake_ranks(number or ranks.count()), _tensors(estimated):
        model = build()
        if shape.checkpointing:
            tree.replace(model, "blocks.*", Checkpointed)
        ranks.shard(model, model.blocks)
        trainer = Trainer(model, setup.optimizer(model), setup.loss, dtype=shape.dtype)
        batch = setup.batch(shape)
        _step(trainer, batch)
        with measure.allocations(model) as log:
            _step(trainer, batch)
    return log


def inference_allocations(build: Build, shape: Shape, estimated: bool = True) -> Allocations:
    """Allocations while computing a prompt and one generated token with the KV cache."""
    with _tensors(estimated):
        model = build_with_dtype(shape.dtype, build).eval()
        ids = torch.zeros(shape.batch, shape.context - 1, dtype=torch.long)
        with measure.allocations(model) as log, torch.no_grad():
            cache = cache_for(model, shape.batch, shape.context, measure.device())
            for step_ids in (ids, ids[:, :1]):
                model(step_ids, cache=cache, last=1)
    return log


def build_with_dtype(dtype: torch.dtype, build: Build) -> Decoder:
    """Build the model directly in this dtype, since fake weights cannot be cast afterwards."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(default)


def process_memory(
    build: Build,
    shape: Shape,
    setup: TrainSetup = TRAINING,
    trainable: int | None = None,
    number: int | None = None,
) -> dict[str, float]:
    """Bytes that each process of a run with `number` ranks needs, by purpose, estimated on fake tensors.

    `number` is by default this run's number of ranks; `shape.batch` counts the rows of one rank. `trainable` is
    the size in bytes of the trainable weights, over all ranks; by default, all weights are trainable.
    """
    number = number or ranks.count()
    log = train_allocations(build, shape, True, setup, number)
    parts: dict[str, float] = {str(purpose): size for (purpose,), size in log.by("kind").items()}
    if measure.device().type == "cuda":
        return parts
    weights, averages = (log.by("kind", moment=0).get((purpose,), 0) for purpose in ("parameters", "optimizer"))
    parts["Python and torch"] = PROCESS
    in_heap = [a.size for a in log.live_at() if a.size <= measure.LARGE_BLOCK and a.kind != "parameters"]
    share = 1.0 if trainable is None else min(1.0, trainable / number / weights)
    parts["fragmentation"] = share * min(MOST_LOST, FRAGMENTATION * sum(in_heap))
    # The best weights are copied; a save during training copies weights and optimizer state.
    parts["copies for saving"] = 2 * (weights if trainable is None else trainable / number) + averages
    return parts


class StepCost(NamedTuple):
    """Measured cost of a step: seconds in total, seconds of the gradients, tokens, bytes of a saved training
    state."""

    seconds: float
    gradients: float
    tokens: int
    state: int


def measure_step(trainer: Trainer, batch: tuple[Tensor, ...]) -> StepCost | None:
    """Time a step whose micro-batches are all like `batch`; weights and optimizer stay unchanged.

    After a warm-up call, gradients are timed for two rows and for at most MEASURED_TOKENS tokens. The time for all
    rows is extrapolated from these two times. Two optimizer updates are made, and the second is timed. Returns
    None for several ranks, and if gradients and optimizer state do not fit into free memory.
    """
    trained = sum(p.nbytes for p in trainer.parameters() if p.requires_grad)
    if ranks.count() > 1 or 0 < measure.free_memory(trainer.device) < 3 * trained:
        return None
    buffers, (rows, width) = [(b, b.clone()) for b in trainer.buffers()], batch[0].shape
    used = min(rows, max(2, MEASURED_TOKENS // width // 2 * 2))
    micro_batches = [tuple(part[:number] for part in batch) for number in (2, 2, used)]
    with tree.mode(trainer.model, True):
        _, few, many = (_seconds(trainer, trainer.gradients, [micro_batch]) for micro_batch in micro_batches)
    per_row = (many - few) / (used - 2) if many > few and used > 2 else many / used
    for p in trainer.parameters():  # zero gradients at a learning rate of 0 change no weight
        p.grad = None if p.grad is None else torch.zeros_like(p.grad)
    _, update = (_seconds(trainer, trainer.update, 0.0) for _ in range(2))
    gradients = trainer.accumulate * (many + (rows - used) * per_row)
    states = [o.state for o in getattr(trainer.optimizer, "optimizers", [trainer.optimizer])]
    size = sum(t.nbytes for state in states for entry in state.values() for t in entry.values())
    for state in states:
        state.clear()
    for buffer, before in buffers:
        buffer.copy_(before)
    trainer.clear_gradients()
    measure.return_freed_memory()
    return StepCost(gradients + update, gradients, trainer.accumulate * rows * width, 2 * trained + size)


def _seconds(trainer: Trainer, work: Callable[[Any], object], argument: Any) -> float:
    start = perf_counter()
    work(argument)
    measure.synchronize(trainer.device)
    return perf_counter() - start


def describe_memory(parts: Mapping[str, float]) -> str:
    """A sentence with the total memory of a run and its three largest parts."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in largest)
    return f"this run needs about {sum(parts.values()) / 1e9:.1f} GB, including {listed}"


def _step(trainer: Trainer, batch: Any) -> None:
    """Do a training step without checking for finite values, because fake tensors do not support the check."""
    trainer.gradients([batch])
    trainer.update()
    trainer.clear_gradients()


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __deepcopy__(self, memo: dict[int, Any]) -> "_FakeMode":
        return self  # tensors from different fake modes cannot be mixed


@contextmanager
def _tensors(estimated: bool) -> Iterator[None]:
    mode = _FakeMode() if estimated else nullcontext()
    with warnings.catch_warnings(), mode, torch.device(measure.device()):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # from deepcopy
        yield
