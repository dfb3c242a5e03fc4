"""Everything that can be wrong with an operation, tried on some inputs and printed as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from dunes import measure
from dunes.ops.faults import FAULTS, Form, NotTried, Subject, evaluate, first_line
from dunes.ops.kernels import missing_compiler
from dunes.ops.operation import Operation
from dunes.progress import print_table
from dunes.units import format_seconds


@dataclass(frozen=True)
class Check:
    name: str
    result: Literal["ok", "failed", "not tried"]
    detail: str


@dataclass(frozen=True)
class Times:
    """Median seconds of a call of reference and operation, and of one with its backward where there is one."""

    form: str
    forward: tuple[float, float]
    backward: tuple[float, float] | None


@dataclass
class Report:
    """What `check` found."""

    name: str
    checks: list[Check] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)

    def failures(self) -> list[Check]:
        return [c for c in self.checks if c.result == "failed"]

    def print(self) -> None:
        print_table(f"ops.check of {self.name}", ["", "", ""], [[c.name, c.result, c.detail] for c in self.checks])
        if self.times:
            print()
            columns = ["", "reference", "operation", "ratio", "reference, with backward", "operation", "ratio"]
            print_table("time of a call", columns, [_time_line(t) for t in self.times])


def _time_line(times: Times) -> list[str]:
    cells = [times.form]
    for pair in (times.forward, times.backward):
        cells += [*map(format_seconds, pair), f"{pair[1] / pair[0]:.2f}"] if pair else [""] * 3
    return cells


def check(
    op: Form,
    inputs: Sequence[Any],
    reference: Form | None = None,
    *,
    backend: str = "inductor",
    seconds: float = 0.2,
) -> Report:
    """Try an operation on these arguments, print what was found as a table, and return it.

    Those tensors that require a gradient are differentiated: mark them with `requires_grad_()`. `op` is an
    `Operation`, an operator of `torch.library.custom_op`, or any function; the last two need a `reference`.
    `backend` is torch.compile's; each time is measured for `seconds`, none with 0.

    Raises ValueError that names the first thing that is wrong, after all was printed.
    """
    subject = _subject(op, tuple(inputs), reference, backend)
    report = Report(subject.name, [_run(name, subject) for name in FAULTS])
    if seconds and not report.failures():
        report.times = list(_times(subject, seconds))
    report.print()
    for failure in report.failures():
        raise ValueError(f"{report.name}: {failure.name}: {failure.detail}")
    return report


def _subject(op: Form, inputs: tuple[Any, ...], reference: Form | None, backend: str) -> Subject:
    own = op.name if isinstance(op, Operation) else getattr(op, "_qualname", None)
    name = str(own or getattr(op, "__name__", op))
    reference = op.reference if isinstance(op, Operation) and reference is None else reference
    if reference is None:
        raise ValueError(f"{name}: there is nothing to compare it with; give reference=")
    if not any(isinstance(x, Tensor) for x in inputs):
        raise ValueError(f"{name}: the inputs have no tensor; give a sequence of its arguments")
    if isinstance(op, Operation) and len(inputs) != len(op.parameters):
        raise ValueError(f"{name}: {len(inputs)} inputs for {len(op.parameters)} parameters; give each its own")
    return Subject(name, op, reference, inputs, backend)


def _run(name: str, subject: Subject) -> Check:
    try:
        if name == "compiled" and (reason := _uncompilable(subject)):
            raise NotTried(reason)
        return Check(name, "ok", FAULTS[name](subject))
    except NotTried as reason:
        return Check(name, "not tried", str(reason))
    except Exception as error:  # whatever the operation raises is what is to be shown
        return Check(name, "failed", first_line(error))


def _uncompilable(subject: Subject) -> str | None:
    return missing_compiler() if subject.backend == "inductor" and subject.device.type == "cpu" else None


def _times(subject: Subject, seconds: float) -> Iterator[Times]:
    forms = subject.reference, subject.op
    yield _race("eager", subject, forms, seconds)
    if not _uncompilable(subject):
        torch.compiler.reset()
        fast = [torch.compile(form, fullgraph=True, backend=subject.backend) for form in forms]
        yield _race(f"compiled ({subject.backend})", subject, fast, seconds)


def _race(label: str, subject: Subject, forms: Sequence[Form], seconds: float) -> Times:
    arguments = subject.arguments()
    with torch.no_grad():
        forward = _medians([lambda form=form: form(*arguments) for form in forms], subject.device, seconds)
    if not any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return Times(label, forward, None)
    both = [lambda form=form: evaluate(form, arguments) for form in forms]
    return Times(label, forward, _medians(both, subject.device, seconds))


def _medians(calls: Sequence[Form], device: torch.device, seconds: float) -> tuple[float, float]:
    """The median times of two calls that take turns."""
    times: list[list[float]] = [[], []]
    for call in calls:
        call()
    end = perf_counter() + 2 * seconds
    while perf_counter() < end or len(times[1]) < 5:
        for call, into in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            measure.synchronize(device)
            into.append(perf_counter() - start)
    return median(times[0]), median(times[1])
