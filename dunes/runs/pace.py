"""A run that is far slower than estimated says so once, and why."""

import os
from statistics import fmean
from time import perf_counter, process_time

from dunes.runs.run import Run
from dunes.train import Step
from dunes.units import format_count, plural

SLOW = 0.5
"""A run is slow below this share of its estimated rate, or of the processor time of its threads."""
WATCHED = 10
"""Steps after which it is known."""


class PaceCheck:
    """`check.warning(step)` after each step: a warning the first time that the run is slow, else empty.

    Training that is compiled meanwhile is no reason: the caller leaves those steps out.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.warned = run, False
        self.tokens = list[float]()
        self._start = perf_counter(), process_time()

    def warning(self, step: Step) -> str:
        run, config = self.run, self.run.config
        self.tokens.append(step.count)
        if self.warned or len(run.pace) < WATCHED or run.trainer.device.type != "cpu":
            return ""
        rate = fmean(self.tokens[-len(run.pace) :]) / fmean(run.pace)
        share = self._processor_share()
        if rate >= SLOW * config.rate if config.rate else share >= SLOW:
            return ""
        self.warned = True
        estimate = f", where {format_count(config.rate)} were estimated" if config.rate else ""
        ends = "takes longer" if config.steps else f"makes fewer steps in its {plural(config.minutes, 'minute')}"
        return f"warning: {format_count(rate)} tokens/s{estimate}: {self._reason(share)}; the run {ends}"

    def _processor_share(self) -> float:
        """The share of the time of its threads that this process computed, since the first step."""
        wall, own = (now - then for now, then in zip((perf_counter(), process_time()), self._start, strict=True))
        return own / (wall * (self.run.config.threads or 1))

    def _reason(self, share: float) -> str:
        threads = self.run.config.threads or 1
        if share > (1 + SLOW) / 2:
            return "the processor itself is slower than when it was measured (heat, power saving, memory)"
        load = f" (load {os.getloadavg()[0]:.1f})" if hasattr(os, "getloadavg") else ""
        return f"other programs leave {share * threads:.1f} processors to its {plural(threads, 'thread')}{load}"
