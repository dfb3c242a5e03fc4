"""The tasks of every side, and the protocol of a side. Standard library only, as each side has its own Python.

A side is a script with a table of tasks: for each its settings (the first is float32, whose output is compared)
and a function. It is run as

    python SIDE.py                              # prints its settings, as JSON
    python SIDE.py WORK.json TASK SETTING       # runs the task, and prints its result on the last line

`decode`, `prefill` and `first` are functions (work, setting) -> answer, where answer(ids, new) returns `new` ids
decoded greedily after `ids`. `decode16` and `decode64` are the same for several prompts of one length:
answer(prompts, new) returns the new ids of each. The rate of `decode` is for the tokens after the first one: the
time to the first token is subtracted. `train` is a function (work, setting, watch) that trains from the folder's
weights, calls `watch` with each step's loss, and stops if it returns True.

`first` is timed from outside: a new process imports the library, loads the model, prints the first id, and ends.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

COMPARED = 6  # losses to compare, the last after five updates
BATCHES = {"decode16": 16, "decode64": 64}
PACKAGES = ("torch", "transformers", "litgpt", "lightning", "llama-cpp-python", "peft")


@dataclass(frozen=True)
class Work:
    """The inputs of all tasks, as token ids."""

    folder: str  # of the model, in Hugging Face's layout
    threads: int
    prompt: list[int]  # decode: so many new tokens after this
    new: int
    prompts: list[list[int]]  # prefill: one token after each
    rows: list[list[int]]  # decode16 and decode64: so many new tokens after the first ones of these
    row_new: int
    text: str  # first: one token after this
    text_ids: list[int]
    batches: list[list[list[int]]]  # train: rows of one token more than are trained on
    lr: float
    betas: tuple[float, float]
    decay: float  # of matrices; vectors have none
    clip: float
    seconds: float  # how long a setting is timed


Answer = Callable[[Sequence[int], int], list[int]]
BatchAnswer = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
Tasks = dict[str, tuple[Sequence[str], Callable[..., Any]]]
Process = tuple[Sequence[str], Mapping[str, str], Callable[[str], list[int]]]
"""A command, its environment, and the ids in what it printed after the prompt."""


def read(path: str | Path) -> Work:
    return Work(**json.loads(Path(path).read_text()))


def answering(work: Work, answer: Any, task: str) -> dict[str, Any]:
    """Output of the first call, and the median seconds of later calls."""
    asked = pieces(work, task)
    start = time.perf_counter()
    output = flatten([answer(*piece) for piece in asked])
    first = [(asked[0][0], 1)] if task == "decode" else []
    flatten([answer(*piece) for piece in first])
    warm, times, firsts = time.perf_counter(), [], []
    while not times or time.perf_counter() - warm < work.seconds:
        times.append(seconds_of(answer, *asked[len(times) % len(asked)]))
        firsts += [seconds_of(answer, *piece) for piece in first]
    tokens = len(work.prompts[0]) if task == "prefill" else len(output)
    row = {"output": output, "rate": tokens / median(times), "warmup": warm - start}
    if first:
        row |= {"with_prompt": row["rate"], "rate": (tokens - 1) / (median(times) - median(firsts))}
    return row


def seconds_of(answer: Any, *asked: Any) -> float:
    before = time.perf_counter()
    answer(*asked)
    return time.perf_counter() - before


def pieces(work: Work, task: str) -> list[tuple[Any, int]]:
    """Arguments of the calls of a task, in order."""
    if task == "prefill":
        return [(prompt, 1) for prompt in work.prompts]
    return [(work.rows[: BATCHES[task]], work.row_new) if task in BATCHES else (work.prompt, work.new)]


def flatten(answers: Any) -> list[int]:
    return [i for a in answers for i in flatten(a)] if isinstance(answers, list) else [int(answers)]


def starting(work: Work, process: Process, seen: Path) -> dict[str, Any]:
    """The first id of a new process, which is not timed when it runs first: it fills caches."""
    warmup = 0.0 if seen.exists() else first_output(work, *process)[1]
    seen.touch()
    output, seconds = first_output(work, *process)
    return {"output": output, "rate": 1 / seconds, "seconds": seconds, "warmup": warmup}


def first_output(
    work: Work, command: Sequence[str], environment: Mapping[str, str], read_ids: Callable[[str], list[int]]
) -> tuple[list[int], float]:
    """The ids that a process prints, and the seconds from its start to the first one."""
    start, output = time.perf_counter(), b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | dict(environment)) as process:
        assert process.stdout is not None
        while len(output) <= len(work.text.encode()) and (more := os.read(process.stdout.fileno(), 1 << 16)):
            output += more
        seconds = time.perf_counter() - start
        output += process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}")
    return read_ids(output.decode()), seconds


def print_first(work: Work, answer: Answer) -> None:
    """Print the text, as a command line does, and the id after it."""
    print(work.text, end="", flush=True)
    print(answer(work.text_ids, 1)[0], flush=True)


def own_process(work: Work, setting: str) -> Process:
    """This script again, as the process that is timed."""
    return (
        (sys.executable, sys.argv[0], sys.argv[1], "print first", setting),
        {},
        lambda out: [int(out[len(work.text) :])],
    )


def versions() -> dict[str, str]:
    """The versions of the libraries in this Python."""
    present = {}
    for package in PACKAGES:
        try:
            present[package] = version(package)
        except PackageNotFoundError:
            continue
    return present


class Watch:
    """Keeps the first losses and when each step ended; says when it has seen enough."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.losses, self.ends = seconds, [], [time.perf_counter()]

    def __call__(self, loss: float) -> bool:
        """Record a step's loss; True if training should stop."""
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


def main(tasks: Tasks, process: Callable[[Work, str], Process] = own_process) -> None:
    """Run the command line; `process` makes the process of the task `first`."""
    if len(sys.argv) == 1:
        print(json.dumps({task: list(settings) for task, (settings, _) in tasks.items()}))
        return
    path, task, setting = sys.argv[1:]
    work = read(path)
    make = tasks["first" if task == "print first" else task][1]
    if task == "print first":
        print_first(work, make(work, setting))
        return
    if task == "train":
        row = training(work, lambda watch: make(work, setting, watch))
    elif task == "first":
        seen = Path(path).parent / f"{Path(sys.argv[0]).stem} {setting}"
        row = starting(work, process(work, setting), seen)
    else:
        row = answering(work, make(work, setting), task)
    print(json.dumps(row | {"versions": versions()}))
