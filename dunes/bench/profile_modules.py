"""Measure the time of each module and of each kind of operation, forward and backward, by PyTorch's profiler."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from dunes import measure
from dunes.bench.subject import Work
from dunes.pictures import SVG, svg_boxes

MODULE = "module: "
OUTSIDE = "(outside)"
PHASES = ("forward", "backward", "optimizer")

KINDS: Mapping[str, str] = {
    "matrix products": r"(^|_)(mm|bmm|addmm|baddbmm|linear|matmul|mv|einsum|grouped_mm)$|mkldnn_linear|gemm",
    "attention": r"scaled_dot_product|flash_attention|efficient_attention",
    "softmax": r"softmax|logsumexp",
    "norms": r"rms_norm|layer_norm|group_norm|batch_norm|(^|_)norm$",
    "optimizer": r"_fused_|foreach|Optimizer",
    "random numbers": r"rand|normal|bernoulli|dropout",
    "copies": r"copy|^to$|clone|contiguous|^cat$|stack|fill|zero|ones|full|index|gather|scatter|embedding|pad",
    "views": r"view|reshape|transpose|permute|expand|^t$|empty|squeeze|flatten|detach|strided|select|slice|split",
    "autograd": r"Backward|AccumulateGrad|evaluate_function",
}
"""Regular expressions for operation names, by kind. The first match applies; an operation without a match gets the
kind "elementwise"."""


@dataclass(frozen=True)
class Entry:
    """The self time of an operation in one module and phase (such as "backward"), summed over its calls."""

    phase: str
    module: str
    kind: str
    operation: str
    seconds: float
    calls: int


@dataclass
class Report:
    """The result of a profile; `wall` is the wall-clock time in seconds."""

    entries: list[Entry] = field(default_factory=list)
    wall: float = 0.0

    @property
    def between(self) -> float:
        """Seconds during which no operation ran: Python code and waiting."""
        return max(0.0, self.wall - sum(e.seconds for e in self.entries))

    def inside(self) -> dict[str, dict[str, float]]:
        """Seconds of each module, including its submodules, by phase.

        Modules whose names differ only in a number, such as blocks, are summed. The key "" has the total; the key
        OUTSIDE has operations outside of all submodules (the loss, the optimizer, ...).
        """
        sums: dict[str, Counter[str]] = {"": Counter()}
        for entry in self.entries:
            parts = re.sub(r"\.\d+\b", "[*]", entry.module or OUTSIDE).split(".")
            for end in range(len(parts) + 1):
                sums.setdefault(".".join(parts[:end]), Counter())[entry.phase] += entry.seconds  # type: ignore[assignment]
        return {name: dict(sums[name]) for name in sorted(sums)}

    def kinds(self) -> dict[str, dict[str, float]]:
        """Seconds of each kind of operation, by phase, largest first."""
        sums: dict[str, Counter[str]] = {}
        for entry in self.entries:
            sums.setdefault(entry.kind, Counter())[entry.phase] += entry.seconds  # type: ignore[assignment]
        return {kind: dict(sums[kind]) for kind in sorted(sums, key=lambda kind: -sums[kind].total())}

    def record(self) -> dict[str, Any]:
        """The sums of the profile as a JSON object."""
        return {"wall": self.wall, "between": self.between, "kinds": self.kinds(), "modules": self.inside()}

    def _repr_html_(self) -> str:
        return flame(self.record())


def flame(record: Mapping[str, Any]) -> str:
    """A plot of a report's `record`: the time of each phase, and below it of its modules and their submodules."""
    times = {f"{p}.{name}".strip("."): t[p] for p in PHASES for name, t in record["modules"].items() if p in t}
    times |= {"": record["wall"], "(Python, waiting)": record["between"]}
    return SVG.format(20 + 20 * max(name.count(".") for name in times), svg_boxes(times))


@contextmanager
def profile_modules(model: nn.Module) -> Iterator[Report]:
    """`with profile_modules(model) as report:` times the operations in the block; read the report afterwards.

    A module's time includes the operations in its own forward pass and their backward pass. The profiler adds some
    microseconds per operation.
    """
    report, cuda = Report(), measure.device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs its start and end to stderr
    with _mark_modules(model), profile(activities=activities) as profiler:
        start = perf_counter()
        yield report
        measure.synchronize(measure.device())
        report.wall = perf_counter() - start
    events = profiler.events()
    report.entries.extend(_entries(events or [], cuda))


@contextmanager
def _mark_modules(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, mark the forward pass of each module for the profiler."""
    names, open_ranges = {module: name for name, module in model.named_modules()}, list[Any]()

    def begin(module: nn.Module, inputs: Any) -> None:
        if module in names:
            open_ranges.append(record_function(MODULE + names[module]))
            open_ranges[-1].__enter__()

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names:
            open_ranges.pop().__exit__(None, None, None)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True):
        yield


def _entries(events: list[FunctionEvent], cuda: bool) -> list[Entry]:
    """An entry for each operation, with the module in whose forward or backward pass the operation ran."""
    makers: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and not _is_autograd_engine(event) and (name := _module(event)) is not None:
            makers.setdefault(event.sequence_nr, name)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        # Kernels are separate events; the operation that launched them includes their time.
        if event.name.startswith((MODULE, "ProfilerStep")) or event.device_type != DeviceType.CPU:
            continue
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        times[*_place(event, makers), event.name.removeprefix("aten::")].append(seconds)
    return [Entry(p, m, kind_of_operation(o), o, sum(t), len(t)) for (p, m, o), t in times.items() if sum(t) > 0]


def profile_work(work: Work) -> tuple[Report, float]:
    """Profile one run of the workload; returns the report and the profiler's relative overhead (0.1 for 10 %)."""
    assert work.model is not None, "the caller asked for a benchmark that runs a model"
    unprofiled = []
    for _ in range(4):  # the first run loads kernels, so its time is ignored
        state, start = work.setup(), perf_counter()
        work.run(state)
        measure.synchronize(measure.device())
        unprofiled.append(perf_counter() - start)
    state = work.setup()
    with profile_modules(work.model) as report:
        work.run(state)
    return report, report.wall / median(unprofiled[1:]) - 1


def kind_of_operation(operation: str) -> str:
    """The kind of the operation with this name."""
    base_name = operation.removeprefix("aten::").removesuffix("_backward").removesuffix("_")
    return next((name for name, pattern in KINDS.items() if re.search(pattern, base_name)), "elementwise")


def _is_autograd_engine(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def _ancestors(event: FunctionEvent) -> Iterator[FunctionEvent]:
    ancestor: FunctionEvent | None = event
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.cpu_parent


def _module(event: FunctionEvent) -> str | None:
    names = (a.name.removeprefix(MODULE) for a in _ancestors(event) if a.name.startswith(MODULE))
    return next(names, None)


def _place(event: FunctionEvent, makers: Mapping[int, str]) -> tuple[str, str]:
    """The phase and the module in which an event ran; the module is "" outside of all submodules."""
    for ancestor in _ancestors(event):
        if _is_autograd_engine(ancestor):
            return "backward", makers.get(ancestor.sequence_nr, "")
        if ancestor.name.startswith("Optimizer.step"):
            return "optimizer", ""
    return "forward", _module(event) or ""
