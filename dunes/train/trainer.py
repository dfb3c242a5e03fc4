"""The step loop, as a generator: printing, saving, sampling and stopping are the caller's loop body."""

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dunes import tree
from dunes.plural import plural
from dunes.train.loss import Loss


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. `loss` is the mean over `count` targets; it is shown as it is, NaN included.

    A count that is not finite is shown as 0.
    """

    number: int
    loss: float
    count: int
    norm: float
    rate: float
    skipped: bool
    seconds: float


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite; the last good weights stand."""


class Trainer:
    """Trains any module: `for step in Trainer(model, optimizer, loss).run(batches): ...`

    `loss(model, batch)` returns (sum, count): a tensor of one element, and a number or a tensor of one.
    Gradients of `accumulate` batches are added and divided once by the count of all, then clipped to the norm
    `clip`. `rate(step)` is a share of the optimizer's learning rates. `seed` keys all randomness inside a step, so
    that what a caller draws between steps changes nothing. A step whose loss or gradient is not finite changes no
    weight and is marked, and so is one that counted nothing; `patience` of them in a row raise Diverged.
    Raises ValueError for settings that cannot be, a model without parameters, and from `run` for a loss
    or a rate that is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        accumulate: int = 1,
        clip: float | None = 1.0,
        rate: Callable[[int], float] = lambda step: 1.0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        patience: int = 10,
    ) -> None:
        _check(accumulate, clip, dtype, seed, patience)
        self.model, self.optimizer, self.loss, self.rate = model, optimizer, loss, rate
        self.accumulate, self.clip, self.dtype, self.seed, self.patience = (
            accumulate,
            clip,
            dtype,
            seed,
            patience,
        )
        self.number = 0
        self.bad = 0
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        if not all(0 <= lr < math.inf for lr in self.base):
            raise ValueError(f"the optimizer's learning rates are {self.base}; expected numbers from 0")
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("nothing to train: the model has no parameters")
        self.device = parameter.device

    @property
    def consumed(self) -> int:
        """How many batches the finished steps took: where a resumed run's batches begin."""
        return self.number * self.accumulate

    def run(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Yield after each whole step. A stream that ends inside an accumulation drops that part."""
        stream = iter(batches)
        while True:
            start = perf_counter()
            taken = [batch for _, batch in zip(range(self.accumulate), stream, strict=False)]
            if len(taken) < self.accumulate:
                return
            with tree.mode(self.model, True):
                step = self._step(taken, start)
            yield step
            if self.bad >= self.patience:
                raise Diverged(
                    f"{_trouble(step)} for {plural(self.bad, 'step')} in a row, up to step {step.number}; "
                    "the weights are those before them. A lower learning rate or a look at the data may help"
                )

    def _step(self, batches: list[Any], start: float) -> Step:
        rate = self._rate()
        buffers = [(b, b.clone()) for b in self.changing]
        # The one place where the host waits for the device.
        loss, counted, size = torch.stack(self.gradients(batches)).tolist()
        if counted < 0:
            raise ValueError(f"the loss of step {self.number + 1} counted {counted:g} targets; expected 0 or more")
        good = counted > 0 and all(map(math.isfinite, (loss, counted, size)))
        if good:
            for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = base * rate
            self.optimizer.step()
        else:
            for buffer, before in buffers:
                buffer.copy_(before)
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1
        self.bad = 0 if good else self.bad + 1
        count = int(counted) if math.isfinite(counted) else 0
        return Step(self.number, loss, count, size, rate, not good, perf_counter() - start)

    def _rate(self) -> float:
        """The share of the learning rates for the step to come."""
        rate = float(self.rate(self.number))
        if not 0 <= rate < math.inf:
            raise ValueError(f"rate({self.number}) is {rate}; expected a share of the learning rate, 0 or more")
        return rate

    @property
    def changing(self) -> list[Tensor]:
        """The buffers that a forward may write to: not those of a quantized base, say, which is `constant`."""
        modules = [m for m in self.model.modules() if not getattr(m, "constant", False)]
        return [b for m in modules for b in m.buffers(recurse=False)]

    def gradients(self, batches: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Leave a step's gradients, divided by the count and clipped, in the parameters.

        Returns the mean loss, the count and the norm before clipping (float64, not yet waited for).
        """
        total, count = self._summed(batches)
        return total / count, count, self._normalise(count)

    def _summed(self, batches: list[Any]) -> tuple[Tensor, Tensor]:
        """Add up the gradients of the summed losses; returns the sums of loss and count (float64)."""
        total = count = torch.zeros((), dtype=torch.float64, device=self._wide)
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            with _keyed(self.device, (int(self.seed), self.number, i)), self._precision():
                loss, counted = _pair(self.loss(self.model, _moved(batch, self.device)))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            elif counted != 0:
                raise ValueError(
                    "the loss has no gradient: it depends on no weight that is trained, or lost its graph"
                )
            total = total + loss.detach().to(total)
            count = count + counted.to(count)
        return total, count

    @property
    def _wide(self) -> torch.device:
        return torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPU has no float64

    def _normalise(self, count: Tensor) -> Tensor:
        """Divide the gradients by the count, clip them, and return their norm before clipping."""
        grads = [_dense_part(p) for p in self.model.parameters() if p.grad is not None]
        if not grads and count != 0:
            raise ValueError("no gradient reached a parameter: does the loss depend on trained weights?")
        if not grads:
            return torch.zeros_like(count)
        norm = torch.nn.utils.get_total_norm(grads).to(count) / count
        scale = 1 / count
        if self.clip is not None:
            scale = scale * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].device, torch.float32))
        return norm

    def _precision(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the weights: the optimizer's state and two counters."""
        return {"number": self.number, "bad": self.bad, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counters = state["number"], state["bad"]
        if not all(isinstance(n, int) and n >= 0 for n in counters):
            raise ValueError(f"the trainer's state has number and bad {counters}; expected whole numbers from 0")
        self.number, self.bad = counters
        self.optimizer.load_state_dict(state["optimizer"])


def _dense_part(p: Tensor) -> Tensor:
    """The numbers of a gradient, each entry once: of a sparse one, as of some embeddings, those that it holds."""
    assert p.grad is not None, "a parameter that a gradient reached"
    if not p.grad.is_sparse:
        return p.grad
    p.grad = p.grad.coalesce()
    return p.grad._values()


def _check(accumulate: int, clip: float | None, dtype: torch.dtype, seed: int, patience: int) -> None:
    """Raises ValueError for settings that cannot be."""
    counts: dict[str, Any] = {"accumulate": accumulate, "patience": patience, "seed": seed}
    for name, value in counts.items():
        if not isinstance(value, Integral) or (name != "seed" and value < 1):
            raise ValueError(f"{name} is {value!r}; expected a whole number" + ", at least 1" * (name != "seed"))
    if clip is not None and not (_is_number(clip) and clip > 0):
        raise ValueError(f"clip is {clip!r}; expected the largest norm of the gradients, above 0, or None")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; expected bfloat16 or float16 for autocast, or float32 for none")


def _pair(result: Any) -> tuple[Tensor, Tensor]:
    """What a loss returned, as two tensors without dimensions. Raises ValueError for what is no (sum, count)."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(f"the loss returned {_described(result)}; expected a pair (sum, count), not a mean")
    loss, count = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(f"the sum that the loss returned is {_described(loss)}; expected a tensor of one element")
    if _is_number(count):
        count = torch.tensor(float(count), dtype=torch.float64)
    if not isinstance(count, Tensor) or count.numel() != 1 or count.dtype == torch.bool:
        raise ValueError(
            f"the count that the loss returned is {_described(count)}; expected one number of targets"
        )
    return loss.reshape(()), count.detach().reshape(())


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"


def _trouble(step: Step) -> str:
    """Why the step was skipped."""
    return "loss or gradient was not finite" if step.count else "the count of targets was 0 or not finite"


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device: tensors, what has a `to`, and those in tuples, lists, mappings and dataclasses."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, type):
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        items = [_moved(b, device) for b in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, MutableMapping):
        moved = copy(batch)
        for key in batch:
            moved[key] = _moved(batch[key], device)
        return moved
    if is_dataclass(batch):
        example = copy(batch)
        for field in fields(batch):
            object.__setattr__(example, field.name, _moved(getattr(batch, field.name), device))
        return example
    return batch


@contextmanager
def _keyed(device: torch.device, key: tuple[int, int, int]) -> Iterator[None]:
    """Random numbers from (seed, step, micro-batch) inside, and the generators as they were afterwards."""
    seed, step, micro = key
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + micro) % 2**63)
        yield
