"""Describe the modules of a network: their structure, and a table of their shapes, FLOPs and memory."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dunes import measure
from dunes.pictures import html_table
from dunes.progress import print_table
from dunes.tree.places import count, innermost, mode, places, require_shapes, uncompiled
from dunes.tree.watch import ModuleStatistics
from dunes.units import format_bytes, format_count

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Layer:
    """Counts and sizes of a module including its submodules; `name` is the module's dotted name, "" for the
    network.

    `bytes` is the size of parameters and buffers. `flops` counts matrix products and convolutions in a forward
    pass; `kept` is the number of bytes saved for backward, including the output. Without an example, `calls`,
    `flops` and `kept` are None, and the shapes are empty. `container` is True for a module without a forward, such
    as a ModuleList, and for a ScriptModule, whose calls cannot be recorded.
    """

    name: str
    type: str
    parameters: int
    bytes: int
    container: bool = False
    inputs: str = ""
    outputs: str = ""
    calls: int | None = None
    flops: int | None = None
    kept: int | None = None


class Layers(list[Layer]):
    """The layers of a network, parents first; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return html_table(*_table(self))


def layers(model: nn.Module, *example: Any, **keywords: Any) -> Layers:
    """A `Layer` for each module, parents first; shapes, FLOPs and memory are from `model(*example, **keywords)`.

    The example runs in evaluation mode on a copy of the network with fake tensors, which have shapes but no
    values. If the network cannot be copied, or if shapes depend on values, the network itself runs once. FLOPs are
    counted by FlopCounterMode, which ignores matrix products in quantized layers and packed experts. Raises
    ValueError if the forward fails on the example, with the name of the innermost running module. Also raises
    ValueError for lazy parameters, which have no shape yet.
    """
    model = uncompiled(model)
    require_shapes(model)
    runs = _run(model, example, keywords) if example or keywords else {}
    rows = [("", model), *((place.name, place.module) for place in places(model))]
    return Layers(_layer(name, module, vars(runs.get(name, _Run())) if runs else {}) for name, module in rows)


@dataclass
class _Run:
    """Totals over all forward calls of one module; shapes are from the first call."""

    inputs: str = ""
    outputs: str = ""
    calls: int = 0
    flops: int = 0
    kept: int = 0


def _layer(name: str, module: nn.Module, totals: Mapping[str, Any]) -> Layer:
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    size = sum(t.nbytes for t in tensors.values())
    container = getattr(type(module), "forward", None) is nn.Module.forward
    container |= isinstance(module, torch.jit.ScriptModule)  # a ScriptModule's calls cannot be recorded
    return Layer(name, _type(module), count(module), size, container, **totals)


def _type(module: nn.Module) -> str:
    """The class name; for a wrapper, with the wrapped class in parentheses."""
    base = innermost(module)
    own = module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
    return own if base is module else f"{own}({_type(base)})"


def _run(model: nn.Module, example: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, _Run]:
    """Run the example on a copy with fake tensors, or on the network if this fails; returns totals by module."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    with suppress(Exception):  # copying may raise any error, and a forward may need the tensors' values
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(fake):
            copy = deepcopy(model)
        return _forward(copy, example, keywords, fake)
    return _forward(model, example, keywords, None)


def _forward(
    model: nn.Module, example: Sequence[Any], keyword_example: Mapping[str, Any], fake: "FakeTensorMode | None"
) -> dict[str, _Run]:
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)

    def convert(tensor: Tensor) -> Tensor:
        return (tensor if fake is None else fake.from_tensor(tensor)).to(device or tensor.device)

    args, keywords = tree_map_only(Tensor, convert, (tuple(example), dict(keyword_example)))
    record = _Recorder(model)
    try:
        with record.hooks, mode(model, False), torch.random.fork_rng(devices=[]), _without_values(fake):
            with measure.allocations(model) as log, record.counter:
                output = model(*args, **keywords)
            record.keep(log.live_at(len(log.live)))
            del output
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        place = (record.stack or [("", 0)])[-1][0] or "the network"  # the innermost running module
        raise ValueError(f"the example does not fit at {place}: {reason}") from error
    return record.runs


@contextmanager
def _without_values(fake: "FakeTensorMode | None") -> Iterator[None]:
    """With `fake`, run the body on fake tensors, and without fused LSTM kernels, which hide FLOPs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # setting mkldnn flags warns about TF32 hardware
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with nullcontext() if fake is None else torch.backends.mkldnn.flags(enabled=False), fake or nullcontext():
            yield


class _Recorder:
    """Records the shapes, FLOPs and memory of each module during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self.counter = FlopCounterMode(display=False)
        self.hooks = ExitStack()
        self.stack: list[tuple[str, int]] = []
        modules = {id(model): ("", model)}
        for place in places(model):
            modules.setdefault(id(place.module), (place.name, place.module))
        self.runs = {name: _Run() for name, _ in modules.values()}
        all_modules = model.named_modules(remove_duplicate=False)
        self.owners = {name: modules[id(m)][0] for name, m in all_modules if id(m) in modules}
        for name, module in modules.values():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            begin, end = partial(self._begin, name), partial(self._end, name)
            self.hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            self.hooks.enter_context(module.register_forward_hook(end))

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append((name, self.counter.get_total_flops()))
        self.runs[name].inputs = self.runs[name].inputs or _shapes((args, kwargs))
        self.runs[name].calls += 1

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        _, before = self.stack.pop()
        self.runs[name].flops += self.counter.get_total_flops() - before
        self.runs[name].outputs = self.runs[name].outputs or _shapes(output)

    def keep(self, live: Iterable[measure.Allocation]) -> None:
        """Add the size of each live allocation to `kept` of the module that made it, and of its parents."""
        for allocation in live:
            if allocation.kind == "parameters":
                continue
            parts = allocation.owner.split(".")
            names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            for place in {"", *(self.owners[name] for name in names if name in self.owners)}:
                self.runs[place].kept += allocation.size


def _shapes(values: Any) -> str:
    """The shapes of all tensors in a module's inputs or outputs: "8x1x28x28", "2x3, 4"."""
    shapes = ["x".join(map(str, leaf.shape)) or "1" for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    rest = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    return ", ".join(shapes[:3]) + rest


@dataclass
class _Node:
    layer: Layer
    inside: list["_Node"] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The last part of the layer's name."""
        return self.layer.name.rpartition(".")[2]

    def signature(self) -> tuple[Any, ...]:
        """A key that equal modules share. `kept` is ignored, since it may be larger for a stack's first module."""
        own = replace(self.layer, name="", kept=None)
        figures = vars(own).values()
        return (*figures, *((n.key, n.signature()) for n in self.inside))


def print_layers(rows: Sequence[Layer]) -> None:
    """Print a table of the results of `layers`; consecutive equal modules share a line."""
    print_table("", *_table(rows))


def _table(rows: Sequence[Layer]) -> tuple[list[str], list[list[str]]]:
    nodes = {row.name: _Node(row) for row in rows}
    for name, node in nodes.items():
        if name:
            nodes[name.rpartition(".")[0]].inside.append(node)
    has_run = rows[0].calls is not None
    columns = ["", "type"] + (["input", "output"] if has_run else []) + ["parameters", "memory"]
    columns += ["FLOPs", "kept for backward"] if has_run else []
    return columns, _lines(nodes[""], "all", "")


def _lines(node: _Node, label: str, indent: str) -> list[list[str]]:
    own = node.layer
    shapes = [] if own.calls is None else [_calls(own), own.outputs]
    figures = [(own.parameters, format_count), (own.bytes, format_bytes)]
    figures += [] if own.calls is None else [(own.flops or 0, format_count), (own.kept or 0, format_bytes)]
    lines = [[indent + label, own.type, *shapes, *(form(number) if number else "" for number, form in figures)]]
    for _, group in groupby(node.inside, lambda n: n.signature() if n.key.isdigit() else n.key):
        equal = [*group]
        label = equal[0].key if len(equal) == 1 else f"{equal[0].key} to {equal[-1].key}, each"
        lines += _lines(equal[-1], label, indent + "  ")
    return lines


def _calls(layer: Layer) -> str:
    if not layer.calls:
        return "" if layer.container else "not called"
    return layer.inputs if layer.calls == 1 else f"{layer.inputs}, {layer.calls} times"


def print_statistics(records: Mapping[str, ModuleStatistics]) -> None:
    """Print a table of the results of `statistics`."""
    lines = []
    for name, record in records.items():
        for label, values in (("output", record.output), ("gradient", record.gradient)):
            if values.count:
                figures = [f"{x:.3g}" for x in (values.mean, values.std, values.largest)]
                odd = str(values.nonfinite) if values.nonfinite else ""
                lines.append([name, label, str(record.calls), *figures, f"{values.zeros:.1%}", odd])
        if not record.calls:
            lines.append([name, "not called", *[""] * 6])
    print_table("", ["", "of", "calls", "mean", "std", "largest", "zeros", "not finite"], lines, 2)


class ModuleRow(NamedTuple):
    """Everything that determines a module's output, except the values of its weights."""

    place: str
    class_name: str
    attributes: dict[str, str]
    tensors: dict[str, tuple[int, ...]]


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """A row for each module: name, class, plain attributes and shapes. Equal rows mean the same architecture."""
    for place, module in model.named_modules():
        attrs = {k: stable_repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        tensors = {**module._parameters, **module._buffers}
        shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
        class_name = getattr(type(module), "structure_name", type(module).__qualname__)
        yield ModuleRow(place, class_name, attrs, shapes)


def stable_repr(value: Any) -> str:
    """A repr that is the same in every process, with sorted sets and without addresses."""
    text = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
