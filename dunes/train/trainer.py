"""The training loop as a generator: the caller's loop body prints, saves, samples and stops."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from numbers import Real
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dunes import tree
from dunes.cores import share_cores
from dunes.measure import ranks
from dunes.ops.float32_products import fast_products
from dunes.train.loss import Loss
from dunes.units import format_count, plural

FORMAT = 2
"""Format version of `Trainer.state_dict`."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step. `loss` is the mean over `count` targets, and may be NaN.

    `grad_norm` is the gradient norm before clipping, `lr_scale` is the factor on the learning rates, and `skipped`
    is True if the weights did not change. A count that is not finite is reported as 0. `metrics` contains the
    means of the loss's metrics: floats, and lists of floats for vectors.
    """

    number: int
    loss: float
    count: int
    grad_norm: float
    lr_scale: float
    skipped: bool
    seconds: float
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Diverged(RuntimeError):
    """Raised when too many steps in a row were skipped; the skipped steps did not change the weights."""


class Trainer:
    """Trains any module: `for step in Trainer(model, optimizer, loss).run(batches): ...`

    `loss(model, batch)` returns (sum, count): the sum is a tensor of one element, the count a tensor of one
    element or a number. An optional third element maps names to metrics: pairs (sum, count) of scalars or of
    vectors. `Step.metrics` contains their means. Gradients of `accumulate` batches are added, divided once by the
    total count, then clipped to the norm `clip`. `lr_scale(step)` is a factor on the learning rates of the
    optimizer's groups during that step. Between steps, the groups' rates are unscaled, so PyTorch's schedulers and
    `group["lr"] = x` can be used in the loop body. `seed` seeds all randomness inside a step; random numbers drawn
    between steps do not affect a step. Gradients are computed for the parameters of the model, of the optimizer,
    and of a loss that is a module. If parameters have a gradient but are in no group of the optimizer, a
    UserWarning lists them once. If a step's loss or gradient is not finite, or its count is 0, the step changes no
    weight and is marked as skipped. After `patience` skipped steps in a row, Diverged is raised. Unless a step is
    skipped, the modules' methods `before_step` and `after_step` are called before and after the update. For
    example, `after_step` may mask pruned weights again. With several ranks of torch.distributed, the model must be
    sharded by `fully_shard`. Sums and counts are then over the batches of all ranks. Gradients are synchronised
    once per step, in the backward pass of its last batch. Raises ValueError for invalid settings and for a model
    without parameters. `run` raises ValueError for an invalid loss, learning rate or `lr_scale`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        accumulate: int = 1,
        clip: float | None = 1.0,
        lr_scale: Callable[[int], float] = lambda step: 1.0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        patience: int = 10,
    ) -> None:
        _check(accumulate, clip, dtype)
        self.model, self.optimizer, self.loss, self.lr_scale = model, optimizer, loss, lr_scale
        self.accumulate, self.clip, self.dtype = accumulate, clip, dtype
        self.seed, self.patience, self.number, self.bad_steps = seed, patience, 0, 0
        self.deterministic = False
        """If True, forward and backward passes use deterministic algorithms where PyTorch has them."""
        self._warned: set[Tensor] = set()
        self.learning_rates()
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("nothing to train: the model has no parameters")
        self.device = parameter.device
        self.rank, self.ranks = ranks.rank(), ranks.count()
        self.sync = getattr(model, "set_requires_gradient_sync", None)
        if self.ranks > 1 and not self.sync:
            raise ValueError(
                f"torch.distributed has {self.ranks} ranks, but the model is not sharded over them; call "
                "torch.distributed.fsdp.fully_shard(model) before building the optimizer"
            )
        self._check_groups([])

    def learning_rates(self) -> list[float]:
        """The current learning rates of the optimizer's groups, without `lr_scale`.

        Raises ValueError for an invalid learning rate.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if not all(hasattr(lr, "__float__") and 0 <= float(lr) < math.inf for lr in rates):
            raise ValueError(f"the optimizer's learning rates are {rates}; expected numbers from 0")
        return [float(lr) for lr in rates]

    def parameters(self) -> list[Tensor]:
        """All parameters of the model, of a loss that is a module, and of the optimizer's groups, without
        duplicates."""
        groups = (group["params"] for group in self.optimizer.param_groups)
        every = chain(*(m.parameters() for m in self._modules().values()), *groups)
        return [*{id(p): p for p in every}.values()]  # `id` is faster than a tensor's hash

    def buffers(self) -> list[Tensor]:
        """The buffers that a step may change, in the model and in a loss that is a module."""
        return [b for m in self._modules().values() for b in mutable_buffers(m).values()]

    def _modules(self) -> dict[str, nn.Module]:
        loss: Any = self.loss
        while not isinstance(loss, nn.Module) and (part := getattr(loss, "func", getattr(loss, "__self__", None))):
            loss = part  # from a partial to its function, from a bound method to its object
        modules = {"": self.model, "loss": loss}
        return {name: m for name, m in modules.items() if isinstance(m, nn.Module)}

    @property
    def consumed(self) -> int:
        """Number of batches that the finished steps consumed; a resumed run starts with the next batch."""
        return self.number * self.accumulate

    def run(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Train on the batches; yields a `Step` after each step.

        The last batches are dropped if they are fewer than `accumulate`.
        """
        share_cores()
        stream = iter(batches)
        while True:
            start = perf_counter()
            micro_batches = [batch for _, batch in zip(range(self.accumulate), stream, strict=False)]
            if len(micro_batches) < self.accumulate:
                return
            with tree.mode(self.model, True), fast_products(self.dtype, self.device):
                step = self._step(micro_batches, start)
            yield step
            self.raise_if_diverged(step)

    def raise_if_diverged(self, step: Step) -> None:
        """Raise Diverged if at least `patience` steps in a row were skipped; `step` is the last of these steps."""
        if self.bad_steps >= self.patience:
            why = "loss or gradient was not finite" if step.count else "the count of targets was 0 or not finite"
            raise Diverged(
                f"{why} for {plural(self.bad_steps, 'step')} in a row, up to step "
                f"{step.number}; the weights are as before these steps; lower the learning rate or check the data"
            )

    def _step(self, batches: list[Any], start: float) -> Step:
        scale = self.lr_scale_at(self.number)
        self.learning_rates()
        buffers = [(b, b.clone()) for b in self.buffers()]
        means, targets, grad_norm = self.gradients(batches)
        # The only synchronisation of host and device in a step.
        count, norm, loss, *values = _to_host([targets, grad_norm, *means.values()])
        finite = count > 0 and all(map(math.isfinite, (loss, count, norm)))
        if finite:
            self.update(scale)
        else:
            for buffer, before in buffers:
                buffer.copy_(before)
        self.clear_gradients()
        metrics = dict(zip([*means][1:], values, strict=True))
        return self.finish_step((loss, count, norm), scale, finite, perf_counter() - start, metrics)

    def finish_step(
        self, values: Sequence[float], scale: float, finite: bool, seconds: float, metrics: Mapping[str, Any]
    ) -> Step:
        """Count a step and return its `Step`. `values` are the loss, the count and the gradient norm.

        Raises ValueError for a negative count.
        """
        loss, count, norm = values
        number = self.number + 1
        if count < 0:
            raise ValueError(f"the loss of step {number} counted {count:g} targets; expected 0 or more")
        self.number, self.bad_steps = number, 0 if finite else self.bad_steps + 1
        targets = int(count) if math.isfinite(count) else 0
        return Step(number, loss, targets, norm, scale, not finite, seconds, metrics)

    def update(self, scale: float = 1.0) -> None:
        """Call `before_step`, apply the gradients with learning rates multiplied by `scale`, then call
        `after_step`."""
        self._call("before_step")
        with _scaled_rates(self.optimizer, scale):
            self.optimizer.step()
        with torch.no_grad():
            self._call("after_step")

    def _call(self, name: str) -> None:
        """Call the method `name` of each module that has it."""
        for module in self.model.modules():
            if method := getattr(module, name, None):
                method()

    def lr_scale_at(self, number: int) -> float:
        """The factor on the learning rates after `number` steps. Raises ValueError for an invalid factor."""
        scale = float(self.lr_scale(number))
        if not 0 <= scale < math.inf:
            raise ValueError(f"lr_scale({number}) is {scale}; expected a finite factor of at least 0")
        return scale

    def gradients(self, batches: list[Any]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Compute a step's gradients, divided by the count and clipped, and store them in the parameters' `grad`.

        Returns the means of "loss" and of the metrics, the count, and the norm before clipping. The results are
        float64 tensors; the host does not wait for the device.
        """
        with deterministic_algorithms() if self.deterministic else nullcontext():
            sums = self._accumulate(batches)
        count = sums["loss"][1]
        return {name: total / n for name, (total, n) in sums.items()}, count, self._normalise(count)

    def _accumulate(self, batches: list[Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """Accumulate the gradients of the summed losses of these batches.

        Returns pairs (sum, count) of "loss" and of the metrics, over all ranks (float64).
        """
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.clear_gradients()
        for i, batch in enumerate(batches, len(batches) * self.rank):
            if self.sync:
                self.sync((i + 1) % len(batches) == 0)
            with seeded(self.device, (int(self.seed), self.number, i)), self.autocast():
                pairs = loss_pairs(self.loss(self.model, _to_device(batch, self.device)))
            loss, number = pairs["loss"]
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            elif number != 0:
                raise ValueError("the loss has no gradient: it depends on no trained parameter, or was detached")
            for name, pair in pairs.items():
                total, count = (t.detach().to(self._float64_device, torch.float64) for t in pair)
                earlier = sums.get(name, (0.0, 0.0))
                sums[name] = earlier[0] + total, earlier[1] + count
        for t in chain.from_iterable(sums.values()):
            ranks.all_reduce(t)
        return sums

    @property
    def _float64_device(self) -> torch.device:
        return torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPU has no float64

    def clear_gradients(self) -> None:
        """Set the gradients of all trained parameters to None."""
        for p in self.parameters():
            p.grad = None

    def _normalise(self, count: Tensor) -> Tensor:
        """Divide the gradients by the count, clip them, and return their norm before clipping."""
        params = [p for p in self.parameters() if p.grad is not None]
        self._check_groups(params)
        grads = [_grad_values(p) for p in params]
        if not grads and count != 0:
            raise ValueError("no parameter received a gradient: does the loss depend on trained parameters?")
        if not grads:
            return torch.zeros_like(count)
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # FSDP averages the gradients of the ranks.
        norm, scale = norm.to(count) * self.ranks / count, self.ranks / count
        if self.clip is not None:
            scale = scale * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        for device in {g.device for g in grads}:
            torch._foreach_mul_([g for g in grads if g.device == device], scale.to(device, torch.float32))
        return norm

    def _check_groups(self, params: list[Tensor]) -> None:
        """Warn once about parameters in `params` that are in no group of the optimizer.

        With several ranks, raises ValueError if a parameter in a group is not sharded.
        """
        grouped = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        if self.ranks > 1 and not all(hasattr(p, "full_tensor") for p in grouped.values()):
            raise ValueError(
                "the optimizer has parameters that are not sharded, so each rank would train its own; make them "
                "parameters of the model before torch.distributed.fsdp.fully_shard(model)"
            )
        if missing := {p for p in params if id(p) not in grouped} - self._warned:
            self._warned |= missing
            warnings.warn(
                f"{self.names(missing)}: trainable and with a gradient, but in no group of the optimizer, so not "
                "trained; add it with optimizer.add_param_group, or freeze it with requires_grad_(False)",
                stacklevel=6,  # the caller's loop
            )

    def names(self, params: Set[Tensor]) -> str:
        """Text with the names of up to eight of these parameters, in the model or in a loss that is a module."""
        named = (m.named_parameters(prefix) for prefix, m in self._modules().items())
        names = [name for name, p in chain(*named) if p in params]
        return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for the loss in the trainer's dtype: autocast, or nothing in float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def __repr__(self) -> str:
        model = f"{type(self.model).__name__} of {format_count(sum(p.numel() for p in self.model.parameters()))}"
        optimizer, dtype = type(self.optimizer).__name__, str(self.dtype).removeprefix("torch.")
        return f"Trainer({model} parameters, {optimizer}, {dtype}, after step {self.number})"

    def state_dict(self) -> dict[str, Any]:
        """The training state without the weights: the optimizer's state dict, and the numbers of steps and of
        skipped steps in a row."""
        counters = {"number": self.number, "bad": self.bad_steps}
        return {"format": FORMAT, **counters, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, including its learning rates, as PyTorch's optimizers do.

        Raises ValueError for a state of another format, and for invalid learning rates.
        """
        if (number := state.get("format")) != FORMAT:
            raise ValueError(f"the trainer's state has format {number!r}, not {FORMAT}; start the run again")
        self.optimizer.load_state_dict(state["optimizer"])
        self.number, self.bad_steps = state["number"], state["bad"]
        self.learning_rates()


@contextmanager
def _scaled_rates(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Multiply the groups' learning rates by `scale` inside the `with` block, and restore them afterwards."""
    rates = [(group, group["lr"], group["lr"] * scale) for group in optimizer.param_groups]
    for group, _, scaled in rates:
        group["lr"] = scaled
    try:
        yield
    finally:
        for group, lr, scaled in rates:
            if group["lr"] is scaled:  # otherwise, a hook of the optimizer changed the rate
                group["lr"] = lr


def mutable_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that training may change, by name. A module's attribute `mutable_buffers`, if any, lists the buffers
    that training may change."""
    buffers: dict[str, Tensor] = {}
    for place, module in model.named_modules():
        named, mutable = module.named_buffers(place, recurse=False), getattr(module, "mutable_buffers", None)
        buffers |= {name: b for name, b in named if mutable is None or name.rpartition(".")[2] in mutable}
    return buffers


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> int:
    """Cast frozen linear layers to `dtype`, the dtype of autocast; returns the number of cast layers.

    Training under autocast gives the same results as without the cast, bit for bit. The weights are rounded in
    place; if the original weights are needed, save them or compute their digest before. A quantized layer keeps
    its codes; only the dtype to which it dequantizes changes. Trainable weights are not changed. Norms and
    embeddings are cast only if `dtype` is float32, since a forward pass without autocast needs a single dtype.
    """
    count = 0
    if dtype == torch.float32:
        others = [m for m in model.modules() if not tree.linear(tree.innermost(m))]
        for p in [p for m in others for p in m.parameters(recurse=False) if not p.requires_grad]:
            p.data = p.data.to(dtype)
    for place in tree.places(model):
        base = tree.innermost(place.module)
        weight = getattr(base, "weight", None)
        if not tree.linear(base) or any(p.requires_grad for p in base.parameters()):
            continue
        if isinstance(weight, Tensor) and weight.dtype != dtype:
            for p in base.parameters():
                p.data = p.data.to(dtype)
            count += 1
        elif weight is None and hasattr(base, "dtype") and base.dtype != dtype:
            base.dtype = dtype  # type: ignore[assignment]
            count += 1
    return count


def _grad_values(p: Tensor) -> Tensor:
    """The values of a parameter's gradient; for a sparse gradient (nn.Embedding with sparse=True), the coalesced
    values."""
    assert p.grad is not None, "a parameter with a gradient"
    if not p.grad.is_sparse:
        return p.grad
    p.grad = p.grad.coalesce()
    return p.grad._values()


def _check(accumulate: int, clip: float | None, dtype: torch.dtype) -> None:
    """Raise ValueError for invalid settings of a Trainer."""
    if accumulate < 1 or (clip is not None and not clip > 0):
        raise ValueError(f"accumulate is {accumulate}, clip {clip}; expected 1 or more, and None or above 0")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; expected float32, or bfloat16 or float16 for autocast")


def _to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """The values of the tensors: floats, or lists of floats."""
    host = torch.cat([t.flatten() for t in tensors]).cpu()
    parts = torch.split(host, [t.numel() for t in tensors])
    return [part.view(t.shape).tolist() for part, t in zip(parts, tensors, strict=True)]


def loss_pairs(result: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (sum, count), by name, in the result of a loss: "loss" (0-dim tensors) and the metrics.

    Raises ValueError for an invalid result.
    """
    parts: Any = result if isinstance(result, (tuple, list)) and len(result) in (2, 3) else (result, None)
    loss, count, *metrics = parts
    if not isinstance(count, bool) and isinstance(count, Real):
        count = torch.tensor(float(count), dtype=torch.float64)
    values = isinstance(loss, Tensor) and isinstance(count, Tensor) and loss.numel() == count.numel() == 1
    if not values or not loss.is_floating_point() or count.dtype == torch.bool or "loss" in dict(*metrics):
        value = " ".join(repr(result).split())[:200]
        raise ValueError(
            f"the loss returned {value}; expected (sum, count), not a mean, or (sum, count, metrics): a tensor of "
            "one element, a number of targets, and pairs (sum, count) by names other than loss"
        )
    return {"loss": (loss.reshape(()), count.detach().reshape(())), **dict(*metrics)}


def _to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to the device: a tensor, an object with a method `to`, or a container of tensors and objects.

    A container is a tuple, list, mapping or dataclass.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        items = [_to_device(b, device) for b in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, MutableMapping):
        mapping = copy(batch)
        for key in batch:
            mapping[key] = _to_device(batch[key], device)
        return mapping
    if is_dataclass(batch):
        record = copy(batch)
        for field in fields(batch):
            object.__setattr__(record, field.name, _to_device(getattr(batch, field.name), device))
        return record
    return batch


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use deterministic algorithms inside the `with` block, and restore the caller's setting afterwards.

    An operation without a deterministic algorithm warns; if the caller enabled errors, the operation raises one.
    """
    if torch.are_deterministic_algorithms_enabled():  # the caller may have enabled errors
        yield
        return
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=before)


@contextmanager
def seeded(device: torch.device, key: tuple[int, int, int]) -> Iterator[None]:
    """Seed the generators with (seed, step, micro-batch) inside the `with` block, and restore them afterwards."""
    seed, step, micro = key
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + micro) % 2**63)
        yield
