"""Watch the outputs of modules and the gradients of these outputs, and leave no hooks on the model.

Compiled code ignores hooks that are added after compilation, and keeps hooks that were added before it. So a
compiled model runs uncompiled while it is watched.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from dunes.measure.allocations import in_backward
from dunes.tree.places import Where, find

Forward = Callable[[str, Any], object]
"""A function that is called with the name of a module and the module's output."""
Backward = Callable[[str, str, Tensor], object]
"""A function that is called with a module's name, the path of a tensor in the output, and the tensor's gradient.
The path is "" for a plain tensor."""


@contextmanager
def hooks(
    model: nn.Module, where: Where = "**", forward: Forward | None = None, backward: Backward | None = None
) -> Iterator[None]:
    """Call `forward` with each output of the selected modules, and `backward` with the gradient of each output.

    The recomputation of a checkpointed module in backward does not count as a call. The added hooks are removed
    from modules and tensors afterwards, even if the body raises. Compiled modules run uncompiled in the context.
    Raises ValueError if nothing is selected, and for parts of a ScriptModule, which call no hooks.
    """
    active, handles = True, list[RemovableHandle]()
    tensor_handles: Any = WeakTensorKeyDictionary()

    def see(place: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if active and forward is not None and not in_backward():
            forward(place, output)
        for path, tensor in tensors_of(output) if active and backward is not None else ():
            if tensor.requires_grad:
                handle = tensor.register_hook(partial(see_gradient, place, path))  # type: ignore[no-untyped-call]
                tensor_handles.setdefault(tensor, []).append(handle)

    def see_gradient(place: str, path: str, gradient: Tensor) -> None:
        if active and backward is not None:
            backward(place, path, gradient)

    try:
        for place in find(model, where):
            if isinstance(place.module, torch.jit.ScriptModule):
                raise ValueError(
                    f"{place.name} is a ScriptModule, whose parts call no hooks; watch the module it was made from"
                )
            handles.append(place.module.register_forward_hook(partial(see, place.name)))
        # If the compiler is not loaded, no module is compiled; loading it takes seconds.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        active = False
        for handle in (*handles, *chain.from_iterable(tensor_handles.values())):
            handle.remove()


def tensors_of(output: Any) -> list[tuple[str, Tensor]]:
    """The floating-point tensors in an output, each with its path: "" for a plain tensor, else like "[0]"."""
    leaves, _ = tree_flatten_with_path(output)
    return [(keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def watch(model: nn.Module, where: Where) -> Iterator[dict[str, Any]]:
    """`with watch(model, "blocks.*.mlp") as outputs: model(ids)` stores each module's last output in `outputs`."""
    outputs: dict[str, Any] = {}
    with hooks(model, where, outputs.__setitem__):
        yield outputs


@dataclass
class Statistics:
    """Statistics of `count` values: `nonfinite` is the number of non-finite values, `zeros` the fraction of zeros.

    `mean`, `std` (of the population) and `largest` (the largest absolute value) cover only finite values.
    """

    count: int = 0
    nonfinite: int = 0
    mean: float = nan
    largest: float = nan
    _zeros: int = 0
    _squares: float = 0.0  # the sum of squared differences from the mean

    @property
    def std(self) -> float:
        """The standard deviation of the finite values; NaN without any."""
        finite = self.count - self.nonfinite
        return sqrt(self._squares / finite) if finite else nan

    @property
    def zeros(self) -> float:
        """The share of values that are zero; NaN without values."""
        return self._zeros / self.count if self.count else nan

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Add the values of a floating-point tensor; meta, sparse and nested tensors are ignored."""
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
            return
        values = tensor.detach().float() if tensor.dtype != torch.float64 else tensor.detach()
        finite = values[mask] if not (mask := values.isfinite()).all() else values
        before = self.count - self.nonfinite
        self.count += values.numel()
        self.nonfinite += values.numel() - finite.numel()
        self._zeros += int((values == 0).sum())
        if finite.numel():
            self._merge(before, finite)

    def _merge(self, before: int, finite: Tensor) -> None:
        """Merge mean and squared deviations of two sets of values, as in Chan, Golub and LeVeque (1983)."""
        variance, mean = (float(x) for x in torch.var_mean(finite, correction=0))
        largest, number = float(finite.abs().max()), finite.numel()
        if not before:
            self.mean, self.largest, self._squares = mean, largest, variance * number
            return
        total, difference = before + number, mean - self.mean
        self._squares += variance * number + difference**2 * before * number / total
        self.mean += difference * number / total
        self.largest = max(self.largest, largest)


@dataclass
class ModuleStatistics:
    """Statistics of a module's outputs, and of the gradients with respect to these outputs, over all calls."""

    calls: int = 0
    output: Statistics = field(default_factory=Statistics)
    gradient: Statistics = field(default_factory=Statistics)


@contextmanager
def statistics(model: nn.Module, where: Where = "**") -> Iterator[dict[str, ModuleStatistics]]:
    """Collect statistics of outputs and gradients: `with statistics(model) as of: loss(model(x)).backward()`.

    For example, `of["fc1"].gradient.std` is the standard deviation of the loss's gradient with respect to the
    output of `fc1`. A module with several outputs has an entry for each output, such as `lstm[0]`. A module at
    several places is listed under its first place. Modules that were not called are added at the end. Memory does
    not grow with the number of calls. Each call synchronizes with the device. Raises ValueError like `hooks`.
    """
    first: dict[int, str] = {}
    for place in find(model, where):
        first.setdefault(id(place.module), place.name)
    records, called = dict[str, ModuleStatistics](), set[str]()

    def forward(place: str, output: Any) -> None:
        called.add(place)
        tensors = dict(tensors_of(output))
        for path in tensors or [""]:
            record = records.setdefault(place + path, ModuleStatistics())
            record.calls += 1
            if path in tensors:
                record.output.add(tensors[path])

    def backward(place: str, path: str, gradient: Tensor) -> None:
        records[place + path].gradient.add(gradient)

    with hooks(model, set(first.values()), forward, backward):
        yield records
    records |= {name: ModuleStatistics() for name in first.values() if name not in called}
