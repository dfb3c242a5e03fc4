"""The learning rate as a pure function of the step and of written records.

Warm-up, plateau, linear fall (https://arxiv.org/abs/2405.18392). Where the fall begins and where the
run ends is a record. A run of so many steps has its record from the beginning; a run of so many
minutes gets it from a clock on the way, and once more when the end is near. The clock's readings
never enter the rate by any other way, so a resumed run that has the records repeats exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Record:
    """From step `begin` the rate falls, to reach its lowest when `end` steps are done."""

    begin: int
    end: int


@dataclass
class Schedule:
    """The share of the full learning rate at each step (0, 1, 2, ...), and when to stop.

    `warmup` steps rise linearly; the last part falls linearly to `lowest`, a share of the full rate.
    Raises ValueError for a warmup below 0 or a share that is none.
    """

    warmup: int = 0
    lowest: float = 0.0
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.warmup >= 0:
            raise ValueError(f"warmup is {self.warmup}; expected a number of steps from 0")
        _check_share("lowest", self.lowest)

    @classmethod
    def steps(cls, total: int, warmup: int = 0, fall: float = 0.5, lowest: float = 0.0) -> "Schedule":
        """A schedule of a known length, whose last `fall` (a share of all steps) goes down."""
        _check_share("fall", fall)
        return cls(warmup, lowest, [Record(total - round(total * fall), total)])

    def rate(self, step: int) -> float:
        """The share of the full rate for this step."""
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        return min(rising, self._fallen(step, self.records))

    def _fallen(self, step: int, records: Sequence[Record]) -> float:
        active = [r for r in records if r.begin <= step]
        if not active:
            return 1.0
        last = active[-1]
        height = self._fallen(last.begin, active[:-1])
        left = max(0.0, (last.end - step) / max(1, last.end - last.begin))
        return self.lowest + (height - self.lowest) * left

    def over(self, step: int) -> bool:
        """Whether `step` steps are all there are to do."""
        return bool(self.records) and step >= self.records[-1].end


@dataclass
class Clock:
    """Writes a schedule's records so that the run ends `seconds` after its start.

    Tell it after each step; it notes the beginning of the fall when its time has come, and corrects
    the end once, half-way down.
    """

    schedule: Schedule
    seconds: float
    fall: float = 0.5

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; expected a time above 0")
        _check_share("fall", self.fall)

    def tell(self, step: int, elapsed: float) -> None:
        """`step` steps took `elapsed` seconds since the start, all that happened between included."""
        records = self.schedule.records
        falling = (1 - self.fall) * self.seconds
        if not records and elapsed >= falling:
            records.append(Record(step, self._end(step, elapsed, elapsed / max(1, step))))
        elif len(records) == 1 and elapsed >= (falling + self.seconds) / 2:
            # The fall began when its time had come, so what it took since then is known.
            pace = (elapsed - falling) / max(1, step - records[0].begin)
            records.append(Record(step, self._end(step, elapsed, pace)))

    def _end(self, step: int, elapsed: float, pace: float) -> int:
        return step + max(1, round((self.seconds - elapsed) / max(pace, 1e-9)))


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is {share}; expected a share from 0 to 1")
