"""Lines and warnings that a run shows to the user."""

import os
from collections import deque
from collections.abc import Callable
from statistics import fmean
from time import perf_counter, process_time

from torch import Tensor

from dunes import measure
from dunes.checkpoint.state import KEEP_STATES
from dunes.measure import ranks
from dunes.progress import Display
from dunes.runs.autosize import OVERHEAD_SECONDS, autocast_dtype, flops
from dunes.runs.config import RunConfig
from dunes.runs.memory import measure_step
from dunes.runs.picture import smooth
from dunes.runs.task import Run, check_tokens
from dunes.train import Step, Trainer
from dunes.units import format_bytes, format_count, format_seconds, plural

PATIENCE = 3
"""A rising loss causes a warning after at least this many validations without improvement."""
WORSE = 1.01
"""A rising loss causes a warning if it is at least this many times the best validation loss."""
SLOW = 0.5
"""Fraction of the estimated rate below which a run is slow. Without an estimate, a run is slow if it uses less
processor time than this fraction of (wall-clock time x usable threads)."""
WATCHED = 10
"""Number of steps to time before a warning about a slow run."""
HOT = "other programs are not the cause: the processor is slower than when it was measured (heat, power saving)"
SMALL_STEP = 1_000
"""Tokens per step from which a run's speed is compared with the estimate, which omits fixed costs of a step."""


def report_step(
    config: RunConfig,
    trainer: Trainer,
    batch: tuple[Tensor, ...],
    display: Display,
    fit: Callable[[float], float] = lambda per_token: 0.0,
) -> None:
    """Measure a step whose micro-batches are like `batch`, and show the run's tokens/s, steps, time and disk
    space.

    `fit(per_token)` estimates the seconds to fit the completion gate, given the seconds to evaluate a token.
    """
    if cost := measure_step(trainer, batch):
        per_token = cost.gradients / 3 / cost.tokens  # a backward pass takes twice as long as the forward pass
        outside = OVERHEAD_SECONDS + 2 * check_tokens(config) * per_token + fit(per_token)
        steps = config.steps or max(1, round((config.seconds - outside) / cost.seconds))
        rate, total = format_count(cost.tokens / cost.seconds), format_seconds(steps * cost.seconds + outside)
        disk, seconds = format_bytes((KEEP_STATES + 1) * cost.state), format_seconds(cost.seconds)
        display.detail(
            f"measured: {rate} tokens/s, {seconds} per step; {plural(steps, 'step')} in about {total}; "
            f"training states take up to {disk} of disk"
        )


def step_reporter(run: Run, display: Display) -> Callable[[Step], None]:
    """A function that reports each step to the display."""
    losses: list[float] = []
    work, unit = flops(run.model, run.config.context_length), run.config.counted.replace("tokens", "tok")
    dtype, mfu = autocast_dtype(run.config), measure.model_flops_utilization

    def report(step: Step) -> None:
        if step.skipped:
            values = f"loss {step.loss}, gradient norm {step.grad_norm}"
            display.line(f"step {step.number}: {values}; this step was skipped")
        else:
            losses[:] = [*losses[-100:], step.loss]
        parts = [
            f"step {step.number}",
            f"loss {smooth(losses)[-1]:.3f}" if losses else "",
            *(f"{name} {value:.3g}" for name, value in step.metrics.items() if isinstance(value, float)),
            f"val {run.last.criterion:.3f}{run.last.unit}" if run.last else "",
            f"lr {run.trainer.learning_rates()[0] * step.lr_scale:.2g}",
            f"{format_count(step.count / step.seconds)} {unit}/s",
            f"{mfu(work * step.count / ranks.count(), step.seconds, dtype, run.trainer.device):.0%} MFU"
            if run.config.matmul
            else "",
            f"{measure.peak_memory(run.trainer.device) / 1e9:.1f} GB",
            f"{format_seconds(round(run.seconds_left))} left",
        ]
        display.state("  ".join(filter(None, parts)), run.done(step.number))

    return report


class PaceCheck:
    """Detects a slow run. Call `check.warning(step)` after each step: it returns a warning at most once, else
    ""."""

    def __init__(self, run: Run) -> None:
        self.run, self.warned = run, False
        self.tokens = deque[int](maxlen=run.pace.maxlen)
        self._start: tuple[float, float] | None = None

    def warning(self, step: Step) -> str:
        run, config = self.run, self.run.config
        self._start = self._start or (perf_counter(), process_time())  # without the first step, which may compile
        self.tokens.append(step.count)
        if self.warned or len(run.pace) < WATCHED or run.trainer.device.type != "cpu":
            return ""
        tokens = fmean([*self.tokens][-len(run.pace) :])
        rate = tokens / fmean(run.pace)
        estimated = config.rate if config.rate and tokens >= SMALL_STEP else 0.0
        wall, processor = perf_counter() - self._start[0], process_time() - self._start[1]
        usable = min(config.threads or 1, _cores())
        share = processor / (wall * usable)
        if rate >= SLOW * estimated if estimated else share >= SLOW or os.getloadavg()[0] <= _cores():
            return ""
        self.warned = True
        allowed = f", where the measured rates of this machine allow {format_count(estimated)}"
        left = f"{share * usable:.1f} processors for the run's {plural(config.threads or 1, 'thread')}"
        reason = HOT if share > (1 + SLOW) / 2 else f"other programs leave {left} (load {os.getloadavg()[0]:.1f})"
        ends = "takes longer" if config.steps else f"makes fewer steps in its {plural(config.minutes, 'minute')}"
        measured = f"{format_count(rate)} {config.counted}/s{allowed * bool(estimated)}"
        return f"warning: {measured}: {reason}; the run {ends}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rising_loss_warning(run: Run) -> str:
    """A warning if the validation loss has been above its best for several validations; else ""."""
    if not run.best or not run.last or run.checks_since_best < PATIENCE:
        return ""
    if run.last.criterion < run.best.criterion * WORSE:
        return ""
    return (
        f"warning: validation loss is {run.last.criterion:.3f}{run.last.unit} and has been above its best "
        f"({run.best.criterion:.3f} after step {run.best_step}) for {run.checks_since_best} "
        "validations; the best weights are kept. If it jumped, lower the learning rate (now "
        f"{run.trainer.learning_rates()[0]:.2g}); if it rose slowly, train for fewer steps or on more data"
    )


def overfitting_notes(run: Run) -> list[str]:
    """A note on the saved weights if the validation loss has risen since its best; else empty."""
    if not run.best or not run.last or run.last.criterion < run.best.criterion * 1.005:
        return []
    return [
        f"validation loss was best after {plural(run.best_step, 'step')} "
        f"({run.best.criterion:.3f}{run.best.unit}) and {run.last.criterion:.3f} at the end: the weights of step "
        f"{run.best_step} were saved; a lower learning rate, fewer steps or more data would help"
    ]
