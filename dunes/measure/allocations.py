"""Record the memory of every tensor from its allocation until it is freed, on any device, real or fake.

A `TorchDispatchMode` records the results of each operation. A storage is freed when its last tensor is deleted.
Memory that an operation allocates and frees internally is not recorded.
"""

import gc
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dunes.context import replaced
from dunes.pictures import svg_curves
from dunes.units import format_bytes

Kind = Literal["parameters", "gradients", "optimizer", "cache", "activations", "temporaries"]
KINDS: Sequence[Kind] = ("parameters", "gradients", "optimizer", "cache", "activations", "temporaries")
"""The kinds of memory that `allocations` distinguishes."""


class ModuleTracker:
    """Tracks the running module: in `with ModuleTracker(model) as tracker:`, `tracker.now()` returns its name.

    In a forward pass, the running module is the innermost module whose `forward` runs. In a backward pass, the
    running module is the module that created the running graph node. Graph nodes are numbered in order of
    creation, so the tracker records the numbers at which modules begin and end. The model has hooks only inside
    the `with` block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[str] = []
        self.calls = 0
        self._numbers: list[int] = []
        self._names: list[str] = []
        self._hooks = ExitStack()
        self._owners: dict[int, str] = {}

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules(remove_duplicate=False):
            if not isinstance(module, torch.jit.ScriptModule):  # has no hooks
                self._hooks.enter_context(module.register_forward_pre_hook(partial(self._begin, name)))
                self._hooks.enter_context(module.register_forward_hook(self._end, always_call=True))
            self._owners |= {id(p): name for p in module.parameters(recurse=False)}
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def now(self) -> str | None:
        """Dotted name of the running module; None outside all modules.

        While a parameter's gradient is accumulated, the running module is the parameter's module.
        """
        if self.stack:
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        if (parameter := getattr(node, "variable", None)) is not None:
            return self._owners.get(id(parameter))
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._names[index] or None) if index >= 0 else None

    def _begin(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.stack.append(name)
        self.calls += 1
        self._note()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        """Record the innermost module as the creator of the next graph nodes, except in a backward pass."""
        if not in_backward():
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._names.append(self.stack[-1] if self.stack else "")


def in_backward() -> bool:
    """True if a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(slots=True)
class Allocation:
    """An allocated storage: size in bytes, owner (the module or function that allocated it), and lifetime.

    Allocations and frees are numbered events. `allocated` and `freed` are the event numbers of this storage;
    `freed` is None while the storage is live.
    """

    size: int
    owner: str
    operation: str
    phase: str
    allocated: int
    kind: Kind = "temporaries"
    freed: int | None = None
    call: int = 0


@dataclass(frozen=True)
class Allocations:
    """All allocations of a workload, in the order in which they were recorded."""

    made: list[Allocation]

    @cached_property
    def live(self) -> list[int]:
        """Number of live bytes after each event."""
        changes = [0] * (1 + max((max(a.allocated, a.freed or 0) for a in self.made), default=0))
        for a in self.made:
            changes[a.allocated] += a.size
            if a.freed is not None:
                changes[a.freed] -= a.size
        return [*accumulate(changes)]

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return max(self.live, default=0)

    @property
    def moment(self) -> int:
        """Number of the event at which the peak was first reached."""
        return self.live.index(self.peak)

    def live_at(self, moment: int | None = None) -> list[Allocation]:
        """Allocations that are live after event number `moment`; by default, at the peak."""
        moment = self.moment if moment is None else moment
        return [a for a in self.made if a.allocated <= moment and (a.freed is None or a.freed > moment)]

    def by(self, *names: str, moment: int | None = None) -> dict[tuple[Any, ...], int]:
        """Live bytes after an event (default: the peak), grouped by fields of `Allocation`, largest first."""
        sums: Counter[tuple[Any, ...]] = Counter()
        for a in self.live_at(moment):
            sums[tuple(getattr(a, name) for name in names)] += a.size
        return dict(sums.most_common())

    def over_time(self, resolution: int = 200) -> dict[str, list[int]]:
        """Live bytes by kind, and in total ("all"), after the events numbered "event": about `resolution` events,
        and the peak."""
        events = sorted({*range(0, len(self.live), max(1, len(self.live) // resolution)), self.moment})
        kinds = (Allocations([a for a in self.made if a.kind == kind]).live for kind in KINDS)
        live = zip(("all", *KINDS), (self.live, *kinds), strict=True)
        return {"event": events} | {name: [sizes[min(e, len(sizes) - 1)] for e in events] for name, sizes in live}


def memory_curves(live: Mapping[str, Sequence[int]]) -> str:
    """A plot of `Allocations.over_time`, with a line at the peak."""
    events, peak = live["event"], max(live["all"])
    curves = {name: [*zip(events, live[name], strict=True)] for name in ("all", *KINDS) if any(live[name])}
    curves[f"peak {format_bytes(peak)}"] = [(events[live["all"].index(peak)], size) for size in (0, peak)]
    return svg_curves(curves)


@contextmanager
def allocations(model: nn.Module) -> Iterator[Allocations]:
    """`with allocations(model) as log:` records all allocations inside the block; read `log` after the block.

    The model's existing tensors count as parameters and gradients. Steps of any optimizer inside the block are
    recorded. Recording costs some tens of microseconds per operation.
    """
    log = Allocations([])
    gc.collect()  # so that no earlier garbage is freed while recording
    with ModuleTracker(model) as places, ExitStack() as hooks:
        recorder = _Recorder(places, log.made)
        recorder.record_model(model)
        hooks.callback(recorder.finish)
        trainable: list[Any] = [p for p in model.parameters() if p.requires_grad]
        for parameter in trainable:
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(recorder.gradient))
        hooks.enter_context(register_optimizer_step_pre_hook(recorder.begin_step))
        hooks.enter_context(register_optimizer_step_post_hook(recorder.end_step))
        with recorder, recorder.resizes():
            yield log


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, places: ModuleTracker, log: list[Allocation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.log = places, log
        self.stepping = 0
        self.moment = 0
        self.over = False
        self.recorded: dict[int, tuple[Any, Allocation]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(t, "full_tensor") for t in types):  # PyTorch then calls this method with the local tensors
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.record(leaf, str(func))
        return out

    def record(self, tensor: Tensor, operation: str, kind: Kind = "temporaries") -> Allocation | None:
        """Record the tensor's storage if it is new; returns its `Allocation`, or None for an empty storage.

        A sharded tensor's storage is the storage of this rank's part.
        """
        return self._record(getattr(tensor, "_local_tensor", tensor).untyped_storage(), operation, kind)

    def _record(self, storage: Any, operation: str, kind: Kind) -> Allocation | None:
        key = storage._cdata
        if key in self.recorded:
            return self.recorded[key][1]
        if not (size := storage.nbytes()):
            return None
        owner, cached = self._find_owner()
        self.moment += 1
        kind = "cache" if cached else kind
        allocation = Allocation(size, owner, operation, self.phase, self.moment, kind, call=self.places.calls)
        self.log.append(allocation)
        self.recorded[key] = (weakref.ref(storage, lambda _: self._mark_freed(key)), allocation)
        return allocation

    @property
    def phase(self) -> str:
        if self.stepping:
            return "optimizer"
        return "backward" if in_backward() else "forward"

    def _find_owner(self) -> tuple[str, bool]:
        """Name of the running module or function, and True if a KV cache is allocating."""
        frame = sys._getframe(3)
        while frame.f_back and _is_torch_frame(frame.f_code.co_filename):
            frame = frame.f_back
        cached = hasattr(frame.f_locals.get("self"), "advance")  # all caches in `parts` have this method
        place = self.places.now()
        if place is None:
            place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name})"
        return place or "model", cached

    def _mark_freed(self, key: int) -> None:
        _, allocation = self.recorded.pop(key)
        if self.over:
            return
        self.moment += 1
        allocation.freed = self.moment
        if allocation.kind == "temporaries" and allocation.phase == "forward":
            # The tensor lived until a later module or the backward pass, so it was an activation.
            inside = allocation.owner in self.places.stack
            if self.phase == "backward" or (self.places.calls > allocation.call and not inside):
                allocation.kind = "activations"
        elif allocation.kind == "cache" and self.places.calls == allocation.call:
            allocation.kind = "temporaries"

    def record_model(self, model: nn.Module) -> None:
        """Record the existing parameters, gradients and buffers of the model."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            for t, kind in ((tensor, "parameters"), (tensor.grad, "gradients")):
                if t is not None and (allocation := self.record(t, "held before", kind)):  # type: ignore[arg-type]
                    allocation.owner = name.rpartition(".")[0] or "model"
                    allocation.phase, allocation.allocated = "before", 0

    def gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None and (allocation := self.record(parameter.grad, "gradient")):
            allocation.kind = "gradients"

    def begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._state(optimizer, before=True)
        self.stepping += 1

    def end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.stepping -= 1
        self._state(optimizer)

    def _state(self, optimizer: Optimizer, before: bool = False) -> None:
        for tensor in tree_leaves([*optimizer.state.values()]):
            if isinstance(tensor, Tensor) and (allocation := self.record(tensor, "held before")):
                allocation.kind = "optimizer"
                if before and allocation.operation == "held before":
                    allocation.phase, allocation.allocated = "before", 0

    def resizes(self) -> AbstractContextManager[None]:
        """Record resized storages, since `fully_shard` resizes storages to gather and free parameters."""
        original: Any = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> None:
            if storage._cdata in self.recorded:
                self._mark_freed(storage._cdata)
            original(storage, size)
            self._record(storage, "resize_", "parameters")

        return replaced(torch.UntypedStorage, "resize_", resize)

    def finish(self) -> None:
        """Reclassify as activations the temporaries of forward passes that are still live."""
        self.over = True
        for _, allocation in self.recorded.values():
            if allocation.kind == "temporaries" and allocation.phase == "forward":
                allocation.kind = "activations"


def _is_torch_frame(file: str) -> bool:
    return "/torch/" in file or file.startswith("<") or file == __file__ or "contextlib" in file
