"""Time several workloads in alternation, so that drift of the machine's speed favours none."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import nn

from dunes import measure

LEAST = 0.2
"""Minimum seconds of a lap; shorter work is repeated within it."""


@dataclass(frozen=True)
class Work:
    """A workload to time: `run(setup())`, of which only `run` is timed.

    `then` is called with the result of `run`; its end gives a second time, the time to first token.

    One run processes `amount` of `unit` (tokens, bytes, ...) with `flops` floating-point operations and at least
    `bytes` bytes read, 0 if unknown; `model` is the model that runs, if any.
    """

    run: Callable[[Any], object]
    amount: float
    unit: str = "tokens"
    setup: Callable[[], Any] = lambda: None
    flops: float = 0.0
    bytes: float = 0.0
    model: nn.Module | None = None
    then: Callable[[Any], object] | None = None
    form: str | None = None
    """Name of the timed implementation if there are several; a column of the rows."""


@dataclass(frozen=True)
class Lap:
    """One timing: mean seconds per run over `runs`, and seconds to the first token."""

    name: str
    round: int
    seconds: float
    runs: int
    first_token: float | None = None


def race(
    works: Mapping[str, Work],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    least: float = LEAST,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Lap]:
    """Yield laps of all workloads in turn, `rounds` of each: A B, then B A, then A B.

    Alternating the order cancels a steady drift in the comparison of any two. Each workload first runs twice
    untimed, to load kernels and set the number of runs per lap. `before(name)` is called before each lap, untimed.
    """
    runs = {}
    for name, work in works.items():
        before(name)
        first, _ = [_time(work, 1, clock) for _ in range(2)][1]
        runs[name] = max(1, round(least / max(first, 1e-9)))
    for number in range(rounds):
        for name in works if number % 2 == 0 else reversed(list(works)):
            before(name)
            seconds, first_token = _time(works[name], runs[name], clock)
            yield Lap(name, number, seconds, runs[name], first_token)


def _time(work: Work, runs: int, clock: Callable[[], float]) -> tuple[float, float | None]:
    """Seconds per run without the setup, and seconds including `then`, None without it."""
    total = extended = 0.0
    for _ in range(runs):
        state = work.setup()
        start = clock()
        result = work.run(state)
        measure.synchronize(measure.device())
        total += clock() - start
        if work.then is not None:
            work.then(result)
            measure.synchronize(measure.device())
            extended += clock() - start
    return total / runs, None if work.then is None else extended / runs
