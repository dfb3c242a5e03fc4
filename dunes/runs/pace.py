"""A single warning, with the reason, for a run that is far slower than estimated."""

import math
import os
from statistics import fmean
from time import perf_counter, process_time

from dunes.runs.run import Run
from dunes.train import Step
from dunes.units import format_count, plural

SLOW = 0.5
"""Fraction of the estimated rate, or of the threads' processor time, below which a run is slow."""
WATCHED = 10
"""Steps to time before a warning."""
SMALL_STEP = 1_000
"""Tokens per step below which fixed costs, which are not estimated, may dominate."""


class PaceCheck:
    """Call `check.warning(step)` after each step: it returns a warning once if the run is slow, else ""."""

    def __init__(self, run: Run) -> None:
        self.run, self.warned = run, False
        self.tokens = list[float]()
        self._start: tuple[float, float] | None = None

    def warning(self, step: Step) -> str:
        run, config = self.run, self.run.config
        self._start = self._start or (perf_counter(), process_time())  # after a step that may have compiled
        self.tokens.append(step.count)
        if self.warned or len(run.pace) < WATCHED or run.trainer.device.type != "cpu":
            return ""
        tokens, share = fmean(self.tokens[-len(run.pace) :]), self._processor_share()
        rate = tokens / fmean(run.pace)
        estimated = config.rate if config.rate and tokens >= SMALL_STEP else 0.0
        if rate >= SLOW * estimated if estimated else share >= SLOW or _load() <= _cores():
            return ""
        self.warned = True
        estimate = f", where {format_count(estimated)} were estimated" if estimated else ""
        ends = "takes longer" if config.steps else f"makes fewer steps in its {plural(config.minutes, 'minute')}"
        return f"warning: {format_count(rate)} tokens/s{estimate}: {self._reason(share)}; the run {ends}"

    def _processor_share(self) -> float:
        """Processor time since the first step, as a fraction of the time available to the run's threads."""
        assert self._start is not None, "set by the first step"
        wall, own = perf_counter() - self._start[0], process_time() - self._start[1]
        return own / (wall * self._usable)

    @property
    def _usable(self) -> int:
        """Processors that the run's threads can use."""
        return min(self.run.config.threads or 1, _cores())

    def _reason(self, share: float) -> str:
        threads = self.run.config.threads or 1
        if share > (1 + SLOW) / 2:
            return "not for other programs: the processor is slower than when it was measured (heat, power saving)"
        left = f"{share * self._usable:.1f} processors to its {plural(threads, 'thread')}"
        return f"other programs leave {left} (load {_load():.1f})"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float:
    """Average number of running processes in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.inf
