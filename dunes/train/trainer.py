"""The step loop, as a generator: printing, saving, sampling and stopping are the caller's loop body."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
    """What one step did. `loss` is the mean over `count` targets; it is shown as it is, NaN included."""

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

    `loss(model, batch)` returns (sum, count). Gradients of `accumulate` batches are added and divided
    once by the count of all, then clipped to the norm `clip`. `rate(step)` is a share of the
    optimizer's learning rates. `seed` keys all randomness inside a step, so that what a caller
    draws between steps changes nothing. A step whose loss or gradient is not finite changes no
    weight and is marked; `patience` of them in a row raise Diverged.
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
        if accumulate < 1:
            raise ValueError(f"accumulate is a number of batches, at least 1, not {accumulate}")
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
        self.device = next(model.parameters()).device

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
                    f"loss or gradient was not finite for {plural(self.bad, 'step')} in a row, up to "
                    f"step {step.number}; the weights are those before them. "
                    "A lower learning rate or a look at the data may help"
                )

    def _step(self, batches: list[Any], start: float) -> Step:
        buffers = [(b, b.clone()) for b in self.changing]
        # The one place where the host waits for the device.
        loss, counted, size = torch.stack(self.gradients(batches)).tolist()
        rate = self.rate(self.number)
        good = counted > 0 and all(x == x and abs(x) != float("inf") for x in (loss, size))
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
        return Step(self.number, loss, int(counted), size, rate, not good, perf_counter() - start)

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
            with _keyed(self.device, (self.seed, self.number, i)), self._precision():
                loss, counted = self.loss(self.model, _moved(batch, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach().to(total)
            count = count + counted.to(count)
        return total, count

    @property
    def _wide(self) -> torch.device:
        return torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPU has no float64

    def _normalise(self, count: Tensor) -> Tensor:
        """Divide the gradients by the count, clip them, and return their norm before clipping."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not grads:
            raise ValueError("no gradient reached a parameter: does the loss depend on trained weights?")
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
        self.number, self.bad = state["number"], state["bad"]
        self.optimizer.load_state_dict(state["optimizer"])


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch, its tensors on the device; tuples, lists and dicts are followed."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(b, device) for b in batch)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    return batch


@contextmanager
def _keyed(device: torch.device, key: tuple[int, int, int]) -> Iterator[None]:
    """Random numbers from (seed, step, micro-batch) inside, and the generators as they were afterwards."""
    seed, step, micro = key
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + micro) % 2**63)
        yield
