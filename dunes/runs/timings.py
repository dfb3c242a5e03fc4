"""Wall-clock time of a run, by phase."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Timings:
    """Seconds by phase: `with timings("saves"):` adds the elapsed time to a phase, at a microsecond per use."""

    seconds: Counter[str] = field(default_factory=Counter)
    start: float = field(default_factory=lambda: monotonic())

    @property
    def elapsed(self) -> float:
        """Seconds since this object was created."""
        return monotonic() - self.start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(phase, perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase; negative ones subtract time that is counted elsewhere."""
        self.seconds[phase] += seconds  # type: ignore[assignment]

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with the time to fetch each added to the phase."""
        stream = iter(items)
        while True:
            with self(phase):
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item


def lines(seconds: Mapping[str, float]) -> list[str]:
    """A plain table of phases with their seconds and shares."""
    total = sum(seconds.values()) or 1.0
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    width = max(map(len, seconds), default=0)
    return [f"{phase:{width}}  {time_spent:8.1f} s  {time_spent / total:6.1%}" for phase, time_spent in longest]
