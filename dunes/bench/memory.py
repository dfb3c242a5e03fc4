"""What a step of a contestant holds in memory: foreseen, and checked against the truth."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dunes import measure
from dunes.bench.subject import Setting, Subject, of_folder, of_shape
from dunes.measure import Allocations
from dunes.runs import memory
from dunes.runs.memory import Shape
from dunes.units import format_bytes

BESIDE = 0.5e9
"""Bytes of Python and torch in the process that takes the step."""


@dataclass(frozen=True)
class Truth:
    """A real step: the most that its tensors held, and by how much the process grew, in bytes."""

    tensors: int
    grown: int


@dataclass(frozen=True)
class Foreseen:
    """A subject's step as it would be, without having been taken."""

    subject: Subject
    shape: Shape
    inference: bool
    log: Allocations

    def checked(self) -> Truth:
        """The same step with data, in a process of its own: what a process grew by does not shrink again.

        Raises ValueError if it would not fit into the memory that is free.
        """
        if (free := measure.free_memory(measure.device())) and free < self.log.peak + BESIDE:
            raise ValueError(
                f"{self.subject.name}: the step needs {format_bytes(self.log.peak)} and {format_bytes(free)} are "
                "free; leave out --check, or choose a smaller --batch"
            )
        return _truth(self)

    def record(self, truth: Truth | None) -> dict[str, Any]:
        """All of it for JSON."""
        shape = asdict(self.shape) | {"dtype": str(self.shape.dtype).removeprefix("torch.")}
        kinds = {str(kind): size for (kind,), size in self.log.by("kind").items()}
        found = {"subject": self.subject.name, **shape, "inference": self.inference, "peak": self.log.peak}
        return found | {"kinds": kinds, "allocations": len(self.log.made)} | (asdict(truth) if truth else {})


def foreseen(subject: Subject, setting: Setting, checkpointing: bool, inference: bool) -> Foreseen:
    """The step of this setting on tensors without data."""
    shape = Shape(setting.batch, setting.context, getattr(torch, setting.dtype), checkpointing)
    return Foreseen(subject, shape, inference, _work(inference)(subject.outline, shape))


def _work(inference: bool) -> Any:
    return memory.inference if inference else memory.training


GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc then returns what is freed at once: the process has what tensors hold, and no holes between them."""


def _truth(f: Foreseen) -> Truth:
    told = {
        "folder": str(f.subject.folder) if f.subject.folder else None,
        "shape": [f.subject.family, f.subject.size, f.subject.context],
        "step": [f.shape.batch, f.shape.context, str(f.shape.dtype).removeprefix("torch."), f.shape.checkpointing],
        "inference": f.inference,
    }
    command = [sys.executable, "-m", "dunes.bench.memory", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | GIVING_BACK)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:300]
        raise ValueError(f"{f.subject.name}: the step could not be taken: {why}")
    return Truth(**json.loads(done.stdout))


def _child(told: dict[str, Any]) -> Truth:
    """Take the step that was foreseen. A small one goes before, so that kernels do not count."""
    subject = of_folder(Path(told["folder"])) if told["folder"] else of_shape(*told["shape"])
    batch, context, dtype, checkpointing = told["step"]
    shape, work = Shape(batch, context, getattr(torch, dtype), checkpointing), _work(told["inference"])
    small = Shape(2, 64, shape.dtype, checkpointing)
    work(of_shape(subject.family, 300_000, 64).outline, small, foreseen=False)
    before = measure.forget_peak(measure.device())
    log = work(subject.outline, shape, foreseen=False)
    return Truth(log.peak, measure.peak_memory(measure.device()) - before)


if __name__ == "__main__":
    print(json.dumps(asdict(_child(json.loads(sys.argv[1])))))
