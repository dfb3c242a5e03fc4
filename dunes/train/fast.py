"""A training loop for small networks with data in memory; it compiles several steps into one unit.

In a small network, the operations of a step take less time than their dispatch by Python and autograd. Here the
forward pass, backward pass and update of a few mini-batches are one graph. The rows of these mini-batches are
gathered in one operation. The equivalent plain loop is `Trainer.run` on the same batches.
"""

# Shapes: N rows, B batch, K steps in a unit.

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from time import perf_counter, process_time
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from dunes import tree
from dunes.ops.float32_products import fast_products
from dunes.ops.kernels import one_line, why_not_compiled
from dunes.progress import Line
from dunes.train.loss import Loss
from dunes.train.optim import Rule, State, rule_of
from dunes.train.trainer import Diverged, Step, Trainer, loss_pairs, seeded

PLAIN_STEPS = 4
"""Number of steps in the plain loop at the start; these steps create the optimizer state."""
TIMED_CALLS = 4
"""Number of calls of the compiled unit to time before choosing the faster loop (by processor time on a CPU)."""

Key = tuple[str, int | Tensor]
Reading = dict[Key, Any]


def fast_run(
    trainer: Trainer,
    tensors: Sequence[Tensor],
    indices: Iterable[Tensor],
    steps_per_call: int = 4,
    line: Line = lambda text: None,
) -> Iterator[Step]:
    """Run the trainer on the batches `tuple(t[index] for t in tensors)`, several steps per call; yields each step.

    `tensors` are (N, ...), on any device; `indices` are (B,), int64, all of the same size. The first steps run in
    the plain loop. Then a unit of `steps_per_call` steps is compiled, and used if it is faster than the plain
    loop; `line` is called with the choice and its reason. The unit has only one step if the loss draws random
    numbers, if the optimizer has a PyTorch scheduler, or if learning rates change after one of the first steps.
    (Rates are read once per unit.) When the first step of a unit is yielded, all steps of the unit are done. So if
    the caller stops early, up to `steps_per_call` - 1 more steps may be done; `trainer.number` counts these steps.

    The plain loop runs again if the caller changes a setting of the optimizer's groups other than "lr", the
    optimizer's state, or a parameter's `requires_grad`; `line` is called with the change. Raises ValueError for
    tensors of different lengths, and if the caller changes one of these or a learning rate between the steps of
    one unit. Also raises the errors of `Trainer.run`.
    """
    if len(lengths := {len(t) for t in tensors}) != 1:  # rows must correspond
        raise ValueError(f"tensors of {sorted(lengths)} rows; expected at least one, all of one length")
    data, stream = [t.to(trainer.device) for t in tensors], iter(indices)
    gather = lambda index: tuple(t.index_select(0, index.to(t.device)) for t in data)
    seconds, changes = list[float](), list[Key]()
    clock = _clock(trainer)
    with _watched(trainer) as draws:
        start = clock()
        for step in trainer.run(map(gather, islice(stream, PLAIN_STEPS))):
            seconds.append(clock() - start)
            before = _read(trainer)
            yield step
            changes += _changes(before, _read(trainer))
            start = clock()
    if reason := why_plain(trainer) or _describe(trainer, [key for key in changes if key[0] != "lr"]):
        line(f"plain loop: {reason}")
    elif len(seconds) == PLAIN_STEPS:
        scheduled = changes or any("initial_lr" in group for group in trainer.optimizer.param_groups)
        unit = Unit(trainer, 1 if any(draws) or scheduled else steps_per_call, any(draws))
        stream = yield from _run_units(unit, gather, stream, min(seconds[1:]), line)
    yield from trainer.run(map(gather, stream))


def _clock(trainer: Trainer) -> Callable[[], float]:
    return process_time if trainer.device.type == "cpu" else perf_counter  # unaffected by other programs


def why_plain(trainer: Trainer) -> str:
    """The reason why this trainer's steps cannot be compiled; empty if they can."""
    if rule_of(trainer.optimizer) is None:
        return f"{type(trainer.optimizer).__name__} with these settings has no rule in dunes.train.optim"
    if trainer.accumulate > 1 or trainer.ranks > 1:
        return "gradients are accumulated over several batches or ranks"
    if any(hasattr(m, name) for m in trainer.model.modules() for name in ("before_step", "after_step")):
        return "a module has a before_step or after_step"
    if trainer.device.type == "mps":
        return "not built for Apple's GPU"
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot compile a backward; 2.13 can"
    return why_not_compiled() if trainer.device.type == "cpu" else ""


class Unit:
    """K training steps compiled into one function. A call trains on K batches (K * B rows) and returns K `Step`s.

    Each step does the same as in `Trainer`: gradients are clipped, and a step whose loss or gradient is not finite
    changes no weight. The unit uses the optimizer's own state, so plain steps can precede and follow its calls.
    """

    def __init__(self, trainer: Trainer, steps: int, draws: bool) -> None:
        self.trainer, self.steps, self.draws = trainer, steps, draws
        rule = rule_of(trainer.optimizer)
        assert rule is not None, "why_plain refuses others"
        self.rule: Rule = rule
        self.read = _read(trainer)
        self.params = [p for p in trainer.parameters() if p.requires_grad]
        groups = trainer.optimizer.param_groups
        self.groups = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # The learning rate is an argument, since a constant with a new value would cause a recompilation.
        self.settings = [{k: v for k, v in group.items() if k not in ("lr", "params")} for group in groups]
        self.states: list[State] = [trainer.optimizer.state.get(p, {}) for p in self.params]
        self.buffers = trainer.buffers()
        options = _compile_options(trainer.device, draws)
        # Each unit has its own code object, since torch keeps at most eight compiled forms per code object.
        plain = Unit._steps
        copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, None, plain.__closure__)
        self._compiled = torch.compile(MethodType(copy, self), fullgraph=True, dynamic=False, options=options)

    def __call__(self, batch: tuple[Tensor, ...]) -> list[Step]:
        start, trainer = perf_counter(), self.trainer
        scales = [trainer.lr_scale_at(trainer.number + k) for k in range(self.steps)]
        rates = trainer.learning_rates()
        lrs = torch.tensor([[lr * scale for lr in rates] for scale in scales], device=trainer.device)
        with tree.mode(trainer.model, True), torch._dynamo.config.patch(trace_autograd_ops=True):
            key = int(trainer.seed), trainer.number, 0
            products = fast_products(trainer.dtype, trainer.device)
            with seeded(trainer.device, key) if self.draws else nullcontext(), products:
                values, metrics = self._compiled(batch, lrs)
        rows = values.tolist()
        means = [{name: value.tolist() for name, value in of_step.items()} for of_step in metrics]
        seconds = (perf_counter() - start) / self.steps
        pairs = zip(rows, scales, means, strict=True)
        return [trainer.finish_step(row[:3], scale, bool(row[3]), seconds, metric) for row, scale, metric in pairs]

    def _steps(self, batch: tuple[Tensor, ...], lrs: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The function to compile; returns the loss, count, gradient norm and `finite` of each step (K, 4), and
        the metrics."""
        size, values, metrics = len(batch[0]) // self.steps, [], []
        for k in range(self.steps):
            value, means = self._one(tuple(t[k * size : (k + 1) * size] for t in batch), lrs[k])
            values.append(value)
            metrics.append(means)
        return torch.stack(values), metrics

    def _one(self, batch: tuple[Tensor, ...], lrs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        trainer, before = self.trainer, [b.clone() for b in self.buffers]
        with trainer.autocast():
            pairs = loss_pairs(trainer.loss(trainer.model, batch))
        total, count = pairs["loss"]
        grads = torch.autograd.grad(total, self.params, allow_unused=True)
        with torch.no_grad():
            count = count.to(total.device, torch.float64)
            squares = [g.float().square().sum() for g in grads if g is not None]
            norm = torch.stack(squares).sum().sqrt() / count
            finite = (count > 0) & total.isfinite() & norm.isfinite()
            # One tensor, since Inductor would otherwise repeat the root and the divisions throughout the update.
            row = torch.stack([total.double() / count, count, norm, finite.double(), self._scale(norm, count)])
            finite = row[3] > 0
            self._update(grads, row[4].float(), lrs, finite)
            for buffer, old in zip(self.buffers, before, strict=True):
                buffer.copy_(torch.where(finite, buffer, old))
            means = {name: (t / n).double() for name, (t, n) in pairs.items() if name != "loss"}
            return row[:4], means

    def _scale(self, norm: Tensor, count: Tensor) -> Tensor:
        """The factor for the summed gradients: 1 / count, reduced if the gradient norm exceeds the clipping
        limit."""
        clip = self.trainer.clip
        clipped = 1.0 if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
        return clipped / count

    def _update(self, grads: Sequence[Tensor | None], scale: Tensor, lrs: Tensor, finite: Tensor) -> None:
        for p, grad, state in zip(self.params, grads, self.states, strict=True):
            if grad is None or p not in self.groups:
                continue
            i = self.groups[p]
            value, new = self.rule(p, grad * scale, state, {**self.settings[i], "lr": lrs[i]})
            p.copy_(torch.where(finite, value, p))
            for name, t in new.items():
                state[name].copy_(torch.where(finite, t, state[name]))


def _compile_options(device: torch.device, draws: bool) -> dict[str, Any]:
    from dunes.train.products import SmallProducts  # loads Inductor

    options: dict[str, Any] = {"fallback_random": True} if draws else {}
    if device.type == "cuda":
        return {**options, "triton.cudagraphs": True}
    # Calling kernels from C++ instead of Python saves a tenth of a small step's time. The settings in `start` make
    # later processes start faster. `vec_isa_ok` skips a test of vector instructions (1 s); any compiler that can
    # compile torch's headers passes the test. `autocast` lets Inductor cache graphs that call autocast.
    autocast = {f"torch.amp.autocast_mode._{name}_autocast": "dunes 1" for name in ("enter", "exit")}
    start = {"cpp.vec_isa_ok": True, "unsafe_marked_cacheable_functions": autocast}
    return {**options, **start, "cpp_wrapper": True, "post_grad_custom_post_pass": SmallProducts()}


def _run_units(
    unit: Unit, gather: Callable[[Tensor], tuple[Tensor, ...]], stream: Iterator[Tensor], plain: float, line: Line
) -> Generator[Step, None, Iterator[Tensor]]:
    """Yields the steps of complete units; returns the remaining indices for the plain loop."""
    trainer, seconds, compiling = unit.trainer, list[float](), 0.0
    clock = _clock(trainer)
    while True:
        read = _read(trainer)
        if reason := _describe(trainer, [key for key in _changes(unit.read, read) if key[0] != "lr"]):
            line(f"plain loop: {reason}; call fast_run again to compile")
            return stream
        if len(group := [*islice(stream, unit.steps)]) < unit.steps:
            return chain(group, stream)
        start, begin = clock(), perf_counter()
        try:
            steps = unit(gather(torch.cat(group)))
        except (Diverged, ValueError):
            raise
        except Exception as error:  # an error of the compiler; the unit has not run
            if seconds and type(error).__name__ != "FailOnRecompileLimitHit":  # raised before the unit runs
                raise
            line(f"plain loop: torch.compile cannot compile this step: {one_line(error)}")
            return chain(group, stream)
        seconds.append((clock() - start) / unit.steps)
        compiling = compiling or perf_counter() - begin
        for step in steps:
            if step is steps[-1] is not steps[0]:
                _check_unchanged(trainer, read, steps)
            yield step
            trainer.raise_if_diverged(step)
        if len(seconds) == 1 + TIMED_CALLS:
            fast = min(seconds[1:])
            steps_take = f"{1e3 * fast:.2f} ms per step, the plain loop {1e3 * plain:.2f}"
            times = f"{steps_take} (processor time on a CPU), after {compiling:.1f} s of compiling"
            if fast > plain:
                line(f"plain loop: the compiled loop takes {times}")
                return stream
            line(f"compiled loop, {unit.steps} steps in a call: {times}")


def _read(trainer: Trainer) -> Reading:
    """Read the inputs of a compiled step that the caller may change between steps.

    Group settings have keys (name, group number). `requires_grad` and the `id()` of the optimizer's state for a
    parameter have keys (name, parameter).
    """
    optimizer, groups = trainer.optimizer, enumerate(trainer.optimizer.param_groups)
    read: Reading = {(name, i): _plain(value) for i, group in groups for name, value in group.items()}
    for p in trainer.parameters():
        read["requires_grad", p], read["state", p] = p.requires_grad, id(optimizer.state.get(p))
    return read


def _plain(value: Any) -> Any:
    """The value of a group's setting, in a form that `==` can compare."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [*map(id, value)] if isinstance(value, list) else value


def _changes(before: Reading, after: Reading) -> list[Key]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)] if before != after else []


def _describe(trainer: Trainer, changes: Sequence[Key]) -> str:
    """Text that describes the first change in `changes`; empty if there is none."""
    for name, place in changes:
        owner = trainer.names({place}) or "a parameter" if isinstance(place, Tensor) else f"group {place}"
        return f"{name} of {owner} changed"
    return ""


def _check_unchanged(trainer: Trainer, before: Reading, steps: Sequence[Step]) -> None:
    """Raise ValueError if the caller changed an input (see `_read`) between the steps of a unit."""
    if change := _describe(trainer, _changes(before, _read(trainer))):
        last = steps[-1].number
        raise ValueError(
            f"{change} before step {last}, which one call computed with steps {steps[0].number} to {last - 1}; "
            f"change it after step {last}, or pass steps_per_call=1 to fast_run"
        )


@contextmanager
def _watched(trainer: Trainer) -> Iterator[list[bool]]:
    """Yields a list with an entry for each call of the trainer's loss: True if the call drew random numbers."""
    state = torch.cuda.get_rng_state if trainer.device.type == "cuda" else torch.get_rng_state
    draws, loss = list[bool](), trainer.loss

    def watch(loss: Loss, *arguments: Any) -> Any:
        before, result = state(), loss(*arguments)
        draws.append(not torch.equal(before, state()))
        return result

    trainer.loss = MethodType(watch, loss)  # bound to the loss, so that the trainer finds the loss's parameters
    try:
        yield draws
    finally:
        trainer.loss = loss
