"""Estimate and measure the memory of one training or inference step."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint, measure
from dunes.bench.subject import Setting, Subject, of_folder, of_shape
from dunes.extra import python_command
from dunes.measure import Allocations
from dunes.models import FAMILIES
from dunes.runs import memory
from dunes.runs.memory import Shape
from dunes.runs.train_config import TrainConfig
from dunes.units import format_bytes

PROCESS_BYTES = 0.5e9
"""Memory in bytes of Python and torch in the process that runs the step."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Measured memory of a step: the peak of its tensors and the growth of the process, in bytes."""

    tensors: int
    grown: int


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated memory of a subject's step."""

    subject: Subject
    shape: Shape
    inference: bool
    log: Allocations

    def measure(self) -> MeasuredMemory:
        """Measure the memory of the step in a new process. Raises ValueError if the step exceeds free memory."""
        if (free := measure.free_memory(measure.device())) and free < self.log.peak + PROCESS_BYTES:
            raise ValueError(
                f"{self.subject.name}: the step needs {format_bytes(self.log.peak)} and {format_bytes(free)} are "
                "free; leave out --check, or choose a smaller --batch"
            )
        return _measure_in_child(self)

    def record(self, truth: MeasuredMemory | None) -> dict[str, Any]:
        """The estimate as a JSON object; unless `truth` is None, the object includes this measured memory."""
        shape = asdict(self.shape) | {"dtype": str(self.shape.dtype).removeprefix("torch.")}
        kinds = {str(kind): size for (kind,), size in self.log.by("kind").items()}
        results = {"subject": self.subject.name, **shape, "inference": self.inference, "peak": self.log.peak}
        results |= {"kinds": kinds, "allocations": len(self.log.made), "live": self.log.over_time()}
        return results | (asdict(truth) if truth else {})


def estimate_memory(subject: Subject, setting: Setting, checkpointing: bool, inference: bool) -> MemoryEstimate:
    """Estimate the memory of a step by running it with these settings on tensors without data."""
    shape = Shape(setting.batch, setting.context, getattr(torch, setting.dtype), checkpointing)
    return MemoryEstimate(subject, shape, inference, _work(inference)(subject.outline, shape))


def _work(inference: bool) -> Any:
    return memory.inference_allocations if inference else memory.train_allocations


TRIMMING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc settings that return freed memory to the system at once, so that resident memory matches the tensors."""


def _measure_in_child(f: MemoryEstimate) -> MeasuredMemory:
    request = {
        "folder": str(f.subject.folder) if f.subject.folder else None,
        "shape": [f.subject.family, f.subject.size, f.subject.context],
        "step": [f.shape.batch, f.shape.context, str(f.shape.dtype).removeprefix("torch."), f.shape.checkpointing],
        "inference": f.inference,
        "trust": checkpoint.cards_trusted(),
    }
    command, environment = python_command("-m", "dunes.bench.step_memory", json.dumps(request))
    process = subprocess.run(command, capture_output=True, text=True, env=environment | TRIMMING_MALLOC)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no error message"])[-1][:300]
        raise ValueError(f"{f.subject.name}: the step failed: {reason}")
    return MeasuredMemory(**json.loads(process.stdout))


def _measure_step(request: dict[str, Any]) -> MeasuredMemory:
    """Run the step on real tensors and measure its memory.

    A small warm-up step runs first, so that the kernels are already loaded.
    """
    subject = of_folder(Path(request["folder"])) if request["folder"] else of_shape(*request["shape"])
    batch, context, dtype, checkpointing = request["step"]
    shape, work = Shape(batch, context, getattr(torch, dtype), checkpointing), _work(request["inference"])
    small = Shape(2, 64, shape.dtype, checkpointing)
    family = subject.family if subject.family in FAMILIES else TrainConfig.family  # a function builds one size
    work(of_shape(family, 300_000, 64).outline, small, estimated=False)
    before = measure.reset_peak_memory(measure.device())
    log = work(subject.outline, shape, estimated=False)
    return MeasuredMemory(log.peak, measure.peak_memory(measure.device()) - before)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    with checkpoint.trust_cards(request["trust"]):
        print(json.dumps(asdict(_measure_step(request))))
