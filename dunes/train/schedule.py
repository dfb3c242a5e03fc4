"""The learning rate schedule: a pure function of the step and of recorded decisions.

The schedule is warm-up, constant rate, linear decay (https://arxiv.org/abs/2405.18392). A record contains the step
at which the decay starts and the step at which the run ends. A run with a fixed number of steps has one record
from the start. In a run with a time limit, a clock adds records during training. The clock affects the learning
rate only through these records and the length of the warm-up. So a resumed run with the same records and warm-up
repeats the same rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

PACED = 2
"""Number of steps after which the pace (seconds per step) is known."""
WARMUP_SHARE = 5
"""The clock shortens the warm-up to at most 1 / WARMUP_SHARE of the expected steps."""
MARGIN = 50
"""During the last 1 / MARGIN of the run's time, the clock changes the planned end only when time is up."""


@dataclass(frozen=True)
class Record:
    """The learning rate decays from step `begin` on, and is 0 after `end` steps, when the run ends."""

    begin: int
    end: int


@dataclass
class Schedule:
    """The factor on the learning rate at each step (0, 1, 2, ...), and the end of the run.

    The factor rises linearly for `warmup` steps to 1, and at the end decays linearly to 0.
    """

    warmup: int = 0
    records: list[Record] = field(default_factory=list)

    @classmethod
    def steps(cls, total: int, warmup: int = 0, decay: float = 0.5) -> "Schedule":
        """A schedule of `total` steps; the factor decays during the last `decay` * `total` steps."""
        return cls(warmup, [Record(total - round(total * decay), total)])

    def lr_scale(self, step: int) -> float:
        """The factor on the learning rate at this step."""
        warmup = min(1.0, (step + 1) / (self.warmup + 1))
        return min(warmup, self._decayed(step, self.records))

    def _decayed(self, step: int, records: Sequence[Record]) -> float:
        active = [r for r in records if r.begin <= step]
        if not active:
            return 1.0
        last = active[-1]
        height = self._decayed(last.begin, active[:-1])
        remaining = max(0.0, (last.end - step) / max(1, last.end - last.begin))
        return height * remaining

    def is_over(self, step: int) -> bool:
        """True if the run ends after `step` steps."""
        return bool(self.records) and step >= self.records[-1].end


@dataclass
class Clock:
    """Adds records to a schedule so that the run ends `seconds` after its start.

    The first step starts at `begin` seconds. Call `update` after each step. Once the pace is known, the clock
    shortens a warm-up that is longer than a fifth of the steps. When the decay has to start, the clock adds a
    record. Each time that half of the remaining time has passed, the clock adds another record with a corrected
    end, so that the run ends in time even if its pace changes.
    """

    schedule: Schedule
    seconds: float
    decay: float = 0.5
    begin: float = 0.0
    _since: tuple[int, float] | None = None
    """The pace is measured from this step and time on: the end of the first step, or the last record.

    The first step is not measured, since it loads code.
    """

    def update(self, step: int, elapsed: float) -> None:
        """Update the schedule after `step` steps and `elapsed` seconds of the run."""
        records, left = self.schedule.records, self.seconds - elapsed
        first, start = self._since or (step, elapsed)
        self._since = first, start
        pace = (elapsed - start) / (step - first) if step > first else (elapsed - self.begin) / max(1, step)
        if step == PACED:
            total = step + max(0.0, left) / max(pace, 1e-9)
            self.schedule.warmup = min(self.schedule.warmup, int(total / WARMUP_SHARE))
        if self._is_due(step, elapsed, first, start):
            end = step + max(1, round(left / max(pace, 1e-9)))
            if not records or end != records[-1].end:
                records.append(Record(step, end))
            self._since = step, elapsed

    def _is_due(self, step: int, elapsed: float, first: int, start: float) -> bool:
        """True if a record is due: the decay starts, half of the remaining time or steps has passed, or time is
        up."""
        records, left = self.schedule.records, self.seconds - elapsed
        if not records:
            return elapsed - self.begin >= (1 - self.decay) * (self.seconds - self.begin)
        if left < self.seconds / MARGIN:
            return left <= 0 and not self.schedule.is_over(step + 1)
        return elapsed - start >= left or 1 < records[-1].end - step <= step - first
