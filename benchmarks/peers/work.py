"""The work that every side does, and how a side answers. Standard library only: each has a Python of its own.

A side is a script with a table of tasks: for each its settings (the first is float32, that which
is compared) and a function. It is run as

    python SIDE.py                              # says its settings, as JSON
    python SIDE.py WORK.json TASK SETTING       # does the task, and says on its last line what came out

`decode` and `prefill` are functions (work, setting) -> answer, where answer(ids, new) gives so many
new ids after the others, the likeliest each time. `train` is a function (work, setting, watch) that
trains from the folder's weights, tells `watch` each step's loss, and stops when that says so.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

COMPARED = 6  # losses: that of the sixth step comes from weights that five steps made


@dataclass(frozen=True)
class Work:
    """What is done; ids throughout."""

    folder: str  # of the model, in Hugging Face's layout
    threads: int
    prompt: list[int]  # decode: so many new tokens after this
    new: int
    prompts: list[list[int]]  # prefill: one token after each
    batches: list[list[list[int]]]  # train: rows of one token more than are trained on
    lr: float
    betas: tuple[float, float]
    decay: float  # of matrices; vectors have none
    clip: float
    seconds: float  # how long a setting is timed


Answer = Callable[[Sequence[int], int], list[int]]
Tasks = dict[str, tuple[Sequence[str], Callable[..., Any]]]


def read(path: str | Path) -> Work:
    return Work(**json.loads(Path(path).read_text()))


def answering(work: Work, answer: Answer, task: str) -> dict[str, Any]:
    """What came out the first time, and the median seconds of a piece after that."""
    asked = [(work.prompt, work.new)] if task == "decode" else [(p, 1) for p in work.prompts]
    start = time.perf_counter()
    output = [list(map(int, answer(*piece))) for piece in asked]
    warm, times = time.perf_counter(), []
    while len(times) < 3 or time.perf_counter() - warm < work.seconds:
        before = time.perf_counter()
        answer(*asked[len(times) % len(asked)])
        times.append(time.perf_counter() - before)
    tokens = work.new if task == "decode" else len(work.prompts[0])
    ids = [i for row in output for i in row]
    return {"output": ids, "rate": tokens / median(times), "warmup": warm - start}


class Watch:
    """Keeps the first losses and when each step ended; says when it has seen enough."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.losses, self.ends = seconds, [], [time.perf_counter()]

    def __call__(self, loss: float) -> bool:
        """Whether training should stop, after a step with this loss before it."""
        self.losses += [float(loss)] if len(self.losses) < COMPARED else []
        self.ends.append(time.perf_counter())
        return len(self.ends) > COMPARED and self.ends[-1] - self.ends[3] > self.seconds

    def row(self, tokens: int) -> dict[str, Any]:
        """The first two steps warm up."""
        times = [b - a for a, b in pairwise(self.ends)]
        return {"output": self.losses, "rate": tokens / median(times[2:]), "warmup": times[0] + times[1]}


def training(work: Work, train: Callable[[Watch], None]) -> dict[str, Any]:
    watch = Watch(work.seconds)
    train(watch)
    return watch.row(len(work.batches[0]) * (len(work.batches[0][0]) - 1))


def batches(work: Work) -> Iterator[Any]:
    """Tensors of ids, without end."""
    import torch

    yield from cycle([torch.tensor(rows) for rows in work.batches])


def groups(work: Work, model: Any) -> list[dict[str, Any]]:
    """A model's parameters as AdamW gets them."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) is wide] for wide in (True, False))
    return [{"params": matrices, "weight_decay": work.decay}, {"params": vectors, "weight_decay": 0.0}]


def main(tasks: Tasks) -> None:
    """Answer the command line."""
    if len(sys.argv) == 1:
        print(json.dumps({task: list(settings) for task, (settings, _) in tasks.items()}))
        return
    path, task, setting = sys.argv[1:]
    work, make = read(path), tasks[task][1]
    if task == "train":
        row = training(work, lambda watch: make(work, setting, watch))
    else:
        row = answering(work, make(work, setting), task)
    print(json.dumps(row))
