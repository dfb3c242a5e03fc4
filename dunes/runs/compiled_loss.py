"""Compile the loss of a run into one graph. https://docs.pytorch.org/docs/stable/torch.compiler.html

The loss is compiled in the first step. The choice to compile is stored in the run's state. The choice does not
depend on measured speeds, so that the same command gives the same losses. Compiled code runs in deterministic
mode, since Inductor's threads would otherwise add to gradients in varying order.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from dunes import measure
from dunes.ops.kernels import one_line, why_not_compiled
from dunes.progress import Line
from dunes.runs.autosize import flops
from dunes.runs.saving import append_metrics
from dunes.runs.task import Run
from dunes.train.loss import Loss

GAIN = 0.12
"""Fraction of a step's time that a compiled loss saves."""
COMPILING = 45.0
"""Seconds to compile the loss."""
WORTH = 2.0
"""A loss is compiled if this saves more than WORTH times COMPILING, as in a run of more than 12.5 minutes."""

NOMINAL = 30e9
"""Assumed FLOP/s per thread, used to estimate the duration of a run with fixed steps."""

COMPILER_BYTES = 0.7e9
"""Bytes of memory that torch.compile needs in addition to the run."""

SAMPLES = 10
"""Number of batches whose shapes are compared before compiling."""


def compile_loss(run: Run, line: Line) -> None:
    """Compile the trainer's loss with `--compile on`, or in a long run with `--compile auto`.

    With `auto`, a resumed run repeats its earlier choice. `line` is called with messages for the user. Raises
    ValueError if `--compile on` is impossible.
    """
    choice = run.config.compile
    if run.schedule.is_over(run.trainer.number):
        return
    compiles = choice == "on" or (choice == "auto" and bool(pays(run) if run.compiled is None else run.compiled))
    if compiles and (reason := why_eager(run)):
        if choice == "on":
            raise ValueError(f"--compile on: {reason}")
        line(f"the loss stays eager: {reason}")
        compiles = False
    if compiles:
        line("compiling the loss in the first step, which takes about a minute")
        run.trainer.loss, run.trainer.deterministic = _compiled_or_eager(run, line), True
    if compiles or run.compiled:
        _record(run, compiles)


def pays(run: Run) -> bool:
    """True if a compiled loss saves more than WORTH times the time to compile it.

    For a run with fixed steps, the NOMINAL speed is assumed, so that the result depends only on the config.
    """
    config = run.config
    tokens = (config.steps or 0) * config.batch * config.context_length
    work = flops(run.model, config.context_length) * tokens
    seconds = work / (NOMINAL * (config.threads or 1)) if config.steps else config.seconds
    return seconds * GAIN > WORTH * COMPILING


def why_eager(run: Run) -> str:
    """The reason why the loss of this run cannot be compiled; "" if it can."""
    trainer, counted = run.trainer, run.config.counted
    if counted != "tokens":
        return f"the loss of {counted}, whose rows differ in length, is not compiled"
    if trainer.device.type != "cpu" or trainer.ranks > 1:
        return f"compiling needs a single process on a CPU; this run has {trainer.ranks} on {trainer.device.type}"
    if reason := why_not_compiled():
        return reason
    samples = islice(run.task.batches(trainer.consumed), SAMPLES)
    shapes = {tuple(t.shape for t in ([b] if isinstance(b, Tensor) else b)) for b in samples}
    if len(shapes) > 1:
        return "batches differ in length, and each length would be compiled anew"
    free = measure.free_memory(trainer.device)
    if 0 < free < COMPILER_BYTES:
        return f"compiling takes up to {COMPILER_BYTES / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"
    return ""


def compiled_loss(loss: Loss, backend: str = "inductor") -> Loss:
    """The loss as one compiled graph.

    Dropout draws the same random numbers as in the eager loss, except for packed rows, since the eager loss skips
    their padding. The graph is compiled for the first batch. Batches of other shapes run eagerly.
    """
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    fast = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend, options=options)
    stances = iter(["default"])

    def call(model: nn.Module, batch: Any) -> Any:
        with torch.compiler.set_stance(next(stances, "eager_on_recompile")):
            return fast(model, batch)

    return call


def _compiled_or_eager(run: Run, line: Line) -> Loss:
    """The compiled loss. After a call that raises an error, the trainer uses the eager loss."""
    eager, compiled = run.trainer.loss, None

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal compiled
        try:
            compiled = compiled or compiled_loss(eager)
            return compiled(model, batch)
        except Exception as error:  # an error of the loss itself is raised again by the eager call below
            line(f"the loss is eager again: {one_line(error)}")
            run.trainer.loss, run.trainer.deterministic = eager, False
            _record(run, False)
            return eager(model, batch)

    return loss


def _record(run: Run, compiled: bool) -> None:
    run.compiled = compiled
    append_metrics(run.folder, {"step": run.trainer.number, "compiled": compiled})
