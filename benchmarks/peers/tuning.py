"""The finetuning task of both sides, and the protocol of a side. Standard library only, as `work.py`.

A side is a script with its settings (the first is float32, whose losses are compared) and a function `tune(tuning,
task, setting, watch)`, which trains the adapter in `adapter/` on the batches of the task, calls `watch` with each
step's loss, and stops if it returns True. A batch is rows of (ids, targets, positions), padded with 0, -100 and -1
to equal lengths.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from work import COMPARED

TASKS = ("unpacked", "packed")
WARM = 3  # steps that are not timed

Batch = list[list[list[int]]]


@dataclass(frozen=True)
class Tuning:
    """The finetuning task. `examples` are ids with masks of targets; `batches` are made from them, by task."""

    folder: str
    adapter: str
    threads: int
    context: int
    seed: int
    rows: dict[str, int]
    examples: list[tuple[list[int], list[bool]]]
    batches: dict[str, list[Batch]]
    lr: float
    betas: tuple[float, float]
    clip: float
    seconds: float


class Watch:
    """Keeps the first losses and when each step ended; says when it has seen enough, which is whole passes."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        self.tokens, self.seconds = tokens, seconds
        self.losses: list[float] = []
        self.started = (resident(forget=True), time.perf_counter())
        self.ends: list[float] = []
        self.worked: list[float] = []

    def __call__(self, loss: float) -> bool:
        self.losses += [float(loss)] if len(self.losses) < COMPARED else []
        self.ends.append(time.perf_counter())
        self.worked.append(time.process_time())
        steps = len(self.ends) - WARM
        whole = steps > 0 and steps % len(self.tokens) == 0
        return whole and len(self.losses) == COMPARED and self.ends[-1] - self.ends[WARM - 1] > self.seconds

    def row(self) -> dict[str, Any]:
        """Tokens without padding per second and per processor second (which other processes affect less), seconds
        to the end of the second step, and bytes."""
        passes = (len(self.ends) - WARM) // len(self.tokens)
        rate = passes * sum(self.tokens) / (self.ends[-1] - self.ends[WARM - 1])
        worked = self.worked[-1] - self.worked[WARM - 1]
        before, start = self.started
        peak = resident("VmHWM")
        return {
            "output": self.losses,
            "rate": rate,
            "rate_by_cpu": passes * sum(self.tokens) / worked,
            "warmup": self.ends[1] - start,
            "peak": peak,
            "grown": peak - before,
        }


def resident(key: str = "VmRSS", forget: bool = False) -> int:
    """Bytes that this process holds, or the most it held (since `forget`); 0 where that is not told."""
    with suppress(OSError, StopIteration):
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024
    return 0


def main(
    settings: dict[str, Sequence[str]], tune: Callable[[Tuning, str, str, Callable[[], Watch]], Watch]
) -> None:
    """Answer the command line: `SIDE.py` alone, or `SIDE.py TUNING.json TASK SETTING`."""
    if len(sys.argv) == 1:
        print(json.dumps(settings))
        return
    path, task, setting = sys.argv[1:]
    tuning = Tuning(**json.loads(Path(path).read_text()))
    tokens = [sum(p >= 0 for _, _, positions in rows for p in positions) for rows in tuning.batches[task]]
    # Memory is counted from the moment at which the side has loaded what it trains.
    print(json.dumps(tune(tuning, task, setting, lambda: Watch(tokens, tuning.seconds)).row()))
