"""Wall-clock time of a run, by phase."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Timings:
    """`with timings("saves"):` adds the elapsed seconds to that phase. Costs a microsecond per use."""

    seconds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(what, perf_counter() - start)

    def add(self, what: str, seconds: float) -> None:
        """Add seconds to a phase; negative ones remove what was counted elsewhere."""
        self.seconds[what] += seconds  # type: ignore[assignment]

    def each(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """The items, timing how long each takes to arrive."""
        stream = iter(items)
        while True:
            with self(what):
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item


def lines(seconds: Mapping[str, float]) -> list[str]:
    """A plain table of phases with their seconds and shares."""
    total = sum(seconds.values()) or 1.0
    most = sorted(seconds.items(), key=lambda item: -item[1])
    wide = max(map(len, seconds), default=0)
    return [f"{what:{wide}}  {taken:8.1f} s  {taken / total:6.1%}" for what, taken in most]
