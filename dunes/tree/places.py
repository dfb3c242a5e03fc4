"""Find, replace, insert, remove, freeze, move and count the modules of any `nn.Module`.

A *place* is a module's dotted name without the names that wrappers add. A wrapper is a module with a child `.base`
(such as LoRA), or the result of `torch.compile`. So `blocks.3.attn.q` is the same place with and without a
wrapper. A module used at several places has several names. Places are selected by globs, since globs can be saved
to a file, unlike functions. `*` matches within one segment, `**` across segments, `!` excludes, and the last
matching glob decides.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dunes.context import prefix_errors

Where = str | Sequence[str] | Set[str]
"""A glob, an ordered sequence of globs, or a set of exact names, as in a record of earlier changes."""
Kind = Callable[[nn.Module], bool]
"""A condition on modules: `linear`, `is_dense`, `anything` or a function of your own."""
COMPILED = "_orig_mod"
"""Name of the original module in the wrapper of `torch.compile`."""


class Place(NamedTuple):
    """A module in a network: the child `key` of `parent`. `name` is its dotted name without wrappers."""

    name: str
    module: nn.Module
    parent: nn.Module
    key: str


def anything(module: nn.Module) -> bool:
    """True for every module."""
    return True


def linear(module: nn.Module) -> bool:
    """True if the module has `in_features` and `out_features`, whatever its class."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def is_dense(module: object) -> TypeGuard[nn.Linear]:
    """True if the module computes exactly like `nn.Linear`, with its weight and bias."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def linears(module: nn.Module) -> Iterator[nn.Module]:
    """The linear layers in a module, with wrappers. Layers whose innermost module has children do not count."""
    if linear(module) and not any(True for _ in innermost(module).children()):
        yield module
    else:
        for child in module.children():
            yield from linears(child)


def matches(where: Where, name: str) -> bool:
    """True if the glob, the ordered list of globs, or the set of names selects this place."""
    if isinstance(where, Set):
        return name in where
    is_selected = False
    for glob in [where] if isinstance(where, str) else where:
        if _pattern(glob.removeprefix("!")).fullmatch(name):
            is_selected = not glob.startswith("!")
    return is_selected


def _pattern(glob: str) -> re.Pattern[str]:
    pieces = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    tokens = re.findall(r"\*\*|[*?]|\[[^\]]*\]|[^*?\[]+|\[", glob)
    expression = "".join(pieces.get(t, t if t[0] == "[" and t[-1] == "]" else re.escape(t)) for t in tokens)
    with prefix_errors(f"the glob {glob!r} is not valid", re.error):
        return re.compile(expression)


def places(model: nn.Module, prefix: str = "") -> Iterator[Place]:
    """All places below `model`, parents first. For a wrapped module, `module` is the outermost wrapper."""
    model = uncompiled(model)
    for key, module in model._modules.items():  # named_children omits repeated modules
        if module is not None:
            yield Place(prefix + key, module, model, key)
            yield from places(_innermost(module, model, key)[0], f"{prefix}{key}.")


def uncompiled(model: nn.Module) -> nn.Module:
    """The original module if `model` is the result of `torch.compile`; otherwise `model` itself."""
    return _child(model, COMPILED) or model


def _innermost(module: nn.Module, parent: nn.Module, key: str) -> tuple[nn.Module, nn.Module, str]:
    while (wrapper := next((w for w in (COMPILED, "base") if _child(module, w) is not None), None)) is not None:
        module, parent, key = cast(nn.Module, _child(module, wrapper)), module, wrapper
    return module, parent, key


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """The child of this name, or None. Does not use getattr, which some networks forward to an inner module."""
    children = module._modules
    return children[name] if name in children else None  # noqa: SIM401  (a ScriptModule's children have no get)


def innermost(module: nn.Module) -> nn.Module:
    """The module below all wrappers."""
    return _innermost(module, module, "")[0]


def find(model: nn.Module, where: Where = "**", kind: Kind = anything) -> list[Place]:
    """The places that `where` selects and whose module is of this kind.

    Raises ValueError if there is no such place.
    """
    selected = [p for p in places(model) if matches(where, p.name) and kind(p.module)]
    if not selected:
        globs = dict.fromkeys(re.sub(r"\b\d+\b", "*", p.name) for p in places(model) if kind(p.module))
        raise ValueError(f"{where!r} selects nothing; expected: {', '.join(globs)[:300] or 'none'}")
    return selected


def replace(
    model: nn.Module,
    where: Where,
    make: Callable[[nn.Module], nn.Module],
    kind: Kind = anything,
    reach: Literal["outer", "inner"] = "outer",
) -> list[str]:
    """Replace each selected `module` by `make(module)`, and return the names of the places.

    If a module is wrapped, `reach` selects what to replace: "outer" is the outermost wrapper, and "inner" is the
    innermost base, which has the weights. For a module at several selected places, `make` is called once. Raises
    ValueError if nothing is selected, and for parts of a ScriptModule.
    """
    targets = find(model, where)
    if reach == "inner":
        targets = [Place(p.name, *_innermost(p.module, p.parent, p.key)) for p in targets]
    targets = [place for place in targets if kind(place.module)]
    if not targets:
        raise ValueError(f"{where!r} selects places, but none of the requested kind")
    replacements: dict[int, nn.Module] = {}
    for place in targets:
        if isinstance(place.parent, torch.jit.ScriptModule):
            raise ValueError(f"{place.name} is part of a ScriptModule; change the module that it was made from")
        if id(place.module) not in replacements:
            replacements[id(place.module)] = make(place.module)
        setattr(place.parent, place.key, replacements[id(place.module)])
    return [place.name for place in targets]


def insert(model: nn.Module, where: str, index: int, module: nn.Module) -> str:
    """Insert the module before entry `index` of the ModuleList at `where`, and return its place.

    Later entries and their tensors get new names, with an index higher by 1. Raises ValueError unless `where`
    selects a single ModuleList, `index` is from 0 to its length, and the model does not have the module yet.
    """
    place, *rest = find(model, where, lambda m: isinstance(innermost(m), nn.ModuleList))
    entries = cast(nn.ModuleList, innermost(place.module))
    if rest or not 0 <= index <= len(entries):
        names = ", ".join(p.name for p in (place, *rest))
        raise ValueError(f"{names}: insert at {index}; expected one ModuleList and an index from 0 to its length")
    if any(m is module for m in model.modules()):
        raise ValueError(f"{place.name}: the model already has this {type(module).__name__}; insert a copy")
    entries.insert(index, module)
    return f"{place.name}.{index}"


def remove(model: nn.Module, where: Where) -> list[str]:
    """Remove the selected entries of ModuleLists, and return their former places; later entries are renumbered.

    Raises ValueError if `where` selects anything but entries of ModuleLists.
    """
    selected = _entries(model, where)
    for place in reversed(selected):
        del place.parent[int(place.key)]  # type: ignore[operator]
    return [place.name for place in selected]


def _entries(model: nn.Module, where: Where) -> list[Place]:
    selected = find(model, where)
    if unsuitable := [p.name for p in selected if not isinstance(p.parent, nn.ModuleList)]:
        raise ValueError(f"{unsuitable[0]} is no entry of a ModuleList; select only entries, like 'blocks.3'")
    return selected


def freeze(model: nn.Module, where: Where = "**") -> list[str]:
    """Set requires_grad=False on the parameters whose dotted names are selected, and return the names.

    A tied parameter is selected by its first name.
    """
    parameters = {name: p for name, p in model.named_parameters() if matches(where, name)}
    if not parameters:
        raise ValueError(f"{where!r} selects no parameter")
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    return [*parameters]


def count(model: nn.Module, trainable: bool = False) -> int:
    """Number of parameters, or only of the trainable ones with `trainable`; a shared parameter counts once.

    Without `trainable`, quantized weights count, too. Raises ValueError for parameters without a shape yet.
    """
    require_shapes(model)
    dense = sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)
    codes = {m for m in map(innermost, linears(model)) if not trainable and _has_codes(m)}
    return dense + sum(m.in_features * m.out_features for m in codes)  # type: ignore[operator,misc]


def _has_codes(module: nn.Module) -> bool:
    """True if a linear layer stores its weight as codes in buffers, not as a parameter."""
    return any(True for _ in module.buffers()) and all(p.dim() < 2 for p in module.parameters())


def require_shapes(model: nn.Module) -> None:
    """Raise ValueError if a parameter or buffer is lazy and gets its shape only when the network first runs."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if (name := next((name for name, tensor in tensors if is_lazy(tensor)), None)) is not None:
        raise ValueError(f"{name} has no shape yet; run the network once on an example")


def move(
    model: nn.Module,
    where: Where = "**",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Move the selected parameters and buffers to a device or dtype, and return their dotted names.

    Only floating-point tensors get the dtype. Parameters stay the same objects, so that ties and optimizers stay
    valid; gradients move with them. Raises ValueError if nothing is selected, for a dtype that is not
    floating-point, for the meta device, and for parameters without a shape yet.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; expected a floating-point dtype")
    require_shapes(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    selected = {name: tensor for name, tensor in tensors if matches(where, name)}
    if not selected:
        raise ValueError(f"{where!r} selects no parameter and no buffer")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError(f"{next(iter(selected))} would lose its values on the meta device")
    gradients = [t.grad for t in selected.values() if t.is_leaf and t.grad is not None]
    selected_by_id = {id(t): t for t in (*selected.values(), *gradients)}
    copies: dict[int, Tensor] = {}

    def to(tensor: Tensor) -> Tensor:
        if id(tensor) not in selected_by_id:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        return copies[id(tensor)]

    model._apply(to)  # type: ignore[no-untyped-call]
    return [*selected]


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode in the context; each module's mode is restored afterwards.

    A frozen ScriptModule always runs in evaluation mode.
    """
    if getattr(model, "training", training) == training:
        yield
        return
    before = [(module, getattr(module, "training", None)) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            if was is None:
                vars(module).pop("training", None)  # set by `train`
            else:
                module.training = was
