"""The learning rate schedule as a pure function of the step and of recorded decisions.

Warmup, constant, linear decay (https://arxiv.org/abs/2405.18392). A record says where the decay starts and where
the run ends. A run of a given number of steps has its record from the start; a run of a given time gets one from a
clock while it trains, and a correction near the end. The clock affects the learning rate only through these
records, so a resumed run with the same records repeats exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Record:
    """The learning rate decays from step `begin` and reaches its minimum after `end` steps."""

    begin: int
    end: int


@dataclass
class Schedule:
    """The factor of the learning rate at each step (0, 1, 2, ...), and when to stop.

    It rises linearly for `warmup` steps, and at the end decays linearly to `lowest`, a share of the full rate.
    Raises ValueError for a negative warmup or a share outside 0 to 1.
    """

    warmup: int = 0
    lowest: float = 0.0
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.warmup >= 0:
            raise ValueError(f"warmup is {self.warmup}; expected a number of steps from 0")
        _check_share("lowest", self.lowest)

    @classmethod
    def steps(cls, total: int, warmup: int = 0, decay: float = 0.5, lowest: float = 0.0) -> "Schedule":
        """A schedule of `total` steps that decays over the last `decay`, a share of all steps."""
        _check_share("decay", decay)
        return cls(warmup, lowest, [Record(total - round(total * decay), total)])

    def lr_scale(self, step: int) -> float:
        """The factor of the learning rate at this step."""
        warmup = min(1.0, (step + 1) / (self.warmup + 1))
        return min(warmup, self._decayed(step, self.records))

    def _decayed(self, step: int, records: Sequence[Record]) -> float:
        active = [r for r in records if r.begin <= step]
        if not active:
            return 1.0
        last = active[-1]
        height = self._decayed(last.begin, active[:-1])
        remaining = max(0.0, (last.end - step) / max(1, last.end - last.begin))
        return self.lowest + (height - self.lowest) * remaining

    def is_over(self, step: int) -> bool:
        """Whether the run ends after `step` steps."""
        return bool(self.records) and step >= self.records[-1].end


@dataclass
class Clock:
    """Adds records to a schedule so that the run ends `seconds` after its start.

    Call `update` after each step. It records the start of the decay when its time has come, and corrects the end
    once, half-way through the decay.
    """

    schedule: Schedule
    seconds: float
    decay: float = 0.5

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; expected a time above 0")
        _check_share("decay", self.decay)

    def update(self, step: int, elapsed: float) -> None:
        """`step` steps are done `elapsed` seconds after the start, with everything in between included."""
        records = self.schedule.records
        decay_start = (1 - self.decay) * self.seconds
        if not records and elapsed >= decay_start:
            records.append(Record(step, self._end(step, elapsed, elapsed / max(1, step))))
        elif len(records) == 1 and elapsed >= (decay_start + self.seconds) / 2:
            # The decay started at its time, so the time since then is that of its steps.
            pace = (elapsed - decay_start) / max(1, step - records[0].begin)
            records.append(Record(step, self._end(step, elapsed, pace)))

    def _end(self, step: int, elapsed: float, pace: float) -> int:
        return step + max(1, round((self.seconds - elapsed) / max(pace, 1e-9)))


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is {share}; expected a share from 0 to 1")
