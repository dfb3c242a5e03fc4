"""LoRA adapters for any built model: adding, selecting and removing them. The papers are listed in `adapted.py`.

An entry of CHANGES, see `changes.py`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import (
    Adapted,
    Adapter,
    EmbeddingAdapter,
    LoraConfig,
    adapted,
    dense,
    is_embedding,
    sides,
)
from dunes.augment.change import Change, float_dtype, generator
from dunes.augment.options import NAME as NAME
from dunes.augment.options import Lora
from dunes.parts import Decoder, MoE
from dunes.parts.context import undeclared_modules
from dunes.progress import each

VERSION = 1
Settings = Mapping[str, Any]
Ranks = Mapping[str, int] | Sequence[tuple[str, int]]


def decide(model: nn.Module, options: Lora) -> Change:
    """The record of the change: every setting, and the rank and alpha of each place.

    Raises ValueError, naming the place, for invalid options.
    """
    request = options.request()
    change = Change(
        "lora", VERSION, request, adapter_places(model, request), (f"**.adapters.{options.adapter}.*",)
    )
    check(model, change)
    return change


def adapter_places(model: nn.Module, request: Settings) -> dict[str, dict[str, Any]]:
    """Rank and alpha by place, for the places that the request's `where` selects."""
    rank, alpha, ranks = (request[key] for key in ("rank", "alpha", "ranks"))
    selected = _select(model, request["where"])
    return {p.name: {"rank": _rank(p.name, rank, ranks), "alpha": alpha} for p in selected}


def _rank(place: str, default: int, ranks: Iterable[tuple[str, int]]) -> int:
    return [default, *(r for glob, r in ranks if tree.matches(glob, place))][-1]


def _select(model: nn.Module, where: Sequence[str]) -> list[tree.Place]:
    """Linear layers that match the globs, and embeddings listed by their exact names."""
    named = {p.name for p in tree.places(model) if is_embedding(p.module) and p.name in where}
    selected = [
        p for p in tree.places(model) if p.name in named or (tree.linear(p.module) and tree.matches(where, p.name))
    ]
    return selected or tree.find(model, where, tree.linear)  # raises with the places that exist


def check(model: nn.Module, change: Change) -> None:
    """Raise ValueError, naming the place and the remedy, if the change cannot be made to this model."""
    request = change.request
    if request["init"] not in ("lora", "pissa"):
        raise ValueError(f"init is {request['init']!r}; expected 'lora' or 'pissa'")
    for place, module in check_places(model, change):
        if is_embedding(module):
            _check_embedding(model, place, request)


def check_places(model: nn.Module, change: Change) -> list[tuple[str, nn.Module]]:
    """Places with their modules. Raises ValueError for an adapter name, rank or dtype that does not fit."""
    request = change.request
    name, dropout = request["adapter"], request["dropout"]
    if not re.fullmatch(r"\w+", name) or hasattr(nn.ModuleDict, name):
        raise ValueError(f"adapter name {name!r}; expected letters, digits and _, and no method of ModuleDict")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}; it must be from 0 to below 1")
    float_dtype(request["dtype"])
    modules = {p.name: p.module for p in tree.places(model)}
    for place, settings in change.places.items():
        if place not in modules:
            raise ValueError(f"{place}: this model has no such place; was the change made to another model?")
        _check_place(place, modules[place], settings, name)
    return [(place, modules[place]) for place in change.places]


def _check_place(place: str, module: nn.Module, settings: Settings, name: str) -> None:
    rank, alpha, largest = settings["rank"], settings["alpha"], min(sides(module))
    if type(rank) is not int or not 1 <= rank <= largest:
        raise ValueError(f"{place}: rank {rank!r}; expected 1 to {largest}, the smaller side of its matrix")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha <= 0:
        raise ValueError(f"{place}: alpha {alpha!r}; expected a positive number")
    if isinstance(module, Adapted) and name in module.adapters:
        raise ValueError(
            f"{place}: it already has an adapter {name!r}; start from the model without it, or merge it first "
            "(dunes augment merge); in Python, adapter= gives the new one another name"
        )


def _check_embedding(model: nn.Module, place: str, request: Settings) -> None:
    if request["dora"] or request["init"] != "lora":
        raise ValueError(
            f"{place}: an embedding supports plain LoRA only; exclude it, or give it an adapter of its own"
        )
    if isinstance(model, Decoder) and model.head is None and place == "embed.token":
        raise ValueError(
            f"{place}: the embedding is tied to the head, and an adapter would change only one of them; exclude it"
        )


def shape(model: nn.Module, change: Change) -> None:
    """Wrap the places and activate the adapter. A place that is wrapped already gets one more adapter.

    Raises ValueError, before anything is changed, if the change does not fit the model.
    """
    check(model, change)
    request, dtype = change.request, float_dtype(change.request["dtype"])
    shared = {key: request[key] for key in ("rslora", "dora", "dropout")}

    def make(place: tree.Place, base: nn.Module) -> Adapter:
        cls, settings = EmbeddingAdapter if is_embedding(base) else Adapter, change.places[place.name]
        config = LoraConfig(settings["rank"], settings["alpha"], pissa=request["init"] == "pissa", **shared)
        return cls(base, config, dtype)

    add_adapters(model, change, make)


def add_adapters(model: nn.Module, change: Change, make: Callable[[tree.Place, nn.Module], Adapter]) -> None:
    """Wrap the places of the change, add the adapters that `make(place, base)` returns, and activate them."""
    name = change.request["adapter"]
    for place in [p for p in tree.places(model) if p.name in change.places]:
        outer = place.module if isinstance(place.module, Adapted) else adapted(place.module)
        outer.adapters[name] = make(place, outer.base)
        setattr(place.parent, place.key, outer.train(place.module.training))
    set_adapter(model, name)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Initialise the adapter; the model's outputs stay equal bit for bit.

    The random numbers depend only on the seed, the adapter's name and the place. PiSSA computes a full SVD of each
    matrix.
    """
    modules, name = adapted_modules(model), change.request["adapter"]
    for place in each(change.places):
        outer = modules[place]
        adapter = outer[name]
        _initialise(adapter, outer.base, generator(change.request["seed"], name, place))
        if adapter.magnitude is not None:
            adapter.magnitude.copy_(adapter.norms(outer.base))


def undo(model: nn.Module, change: Change) -> None:
    """Remove the adapter."""
    detach(model, change.request["adapter"])


def _initialise(adapter: Adapter, base: nn.Module, generator: torch.Generator) -> None:
    a, b = adapter.A, adapter.B
    if adapter.A0 is not None and adapter.B0 is not None:
        for factor, tensor in zip(principal_factors(dense(base), adapter.config), (a, b), strict=True):
            tensor.copy_(factor)
        adapter.A0.copy_(a)
        adapter.B0.copy_(b)
    elif isinstance(adapter, EmbeddingAdapter):
        a.zero_()  # as in PEFT: the rows of unused ids never change
        b.copy_(torch.randn(b.shape, generator=generator))
    else:
        # kaiming_uniform_(a=sqrt(5)), as in the paper's code
        a.copy_(torch.empty(a.shape).uniform_(-1, 1, generator=generator) / a.shape[-1] ** 0.5)
        b.zero_()


def principal_factors(weight: Tensor, config: LoraConfig) -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) whose scaled product is the best approximation of `weight` of rank R (PiSSA)."""
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    root = (s[: config.rank] / config.scale).sqrt()
    return root[:, None] * v[: config.rank], u[:, : config.rank] * root


def adapted_modules(model: nn.Module, adapter: str | None = None) -> dict[str, Adapted]:
    """Adapted modules by place, or with `adapter` only the modules that have this adapter.

    Raises ValueError, listing the model's adapters, if there are no such modules.
    """
    modules = {p.name: p.module for p in tree.places(model) if isinstance(p.module, Adapted)}
    selected = {k: m for k, m in modules.items() if adapter is None or adapter in m.adapters}
    if not selected:
        names = sorted({name for m in modules.values() for name in m.adapters})
        missing = "adapter" if adapter is None else f"adapter {adapter!r}"
        raise ValueError(f"this model has no {missing}; its adapters are: {', '.join(names) or 'none'}")
    return selected


def set_adapter(model: nn.Module, adapter: str | None) -> None:
    """Activate this adapter, or with None deactivate all. Raises ValueError for an unknown name."""
    if adapter is not None:
        adapted_modules(model, adapter)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = adapter


def active_adapter(model: nn.Module) -> str | None:
    """Name of the active adapter, or None."""
    return next((m.active for m in model.modules() if isinstance(m, Adapted)), None)


@contextmanager
def adapter_active(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Activate this adapter, or with None no adapter, in the context. Raises ValueError for an unknown name."""
    before = [(m, m.active) for m in model.modules() if isinstance(m, Adapted)]
    set_adapter(model, adapter)
    try:
        yield
    finally:
        for module, active in before:
            module.active = active


@contextmanager
def row_adapters(model: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Let row i of the batch use the adapter `names[i]`, or with None the base model, in the context.

    Raises ValueError for an unknown name, and for a model whose layers may not get one input row per batch row:
    with adapters in experts, adapters that are MLPs, or parts that may mix tokens.
    """
    if len(set(names)) == 1:
        with adapter_active(model, names[0]):
            yield
        return
    for name in set(names) - {None}:
        adapted_modules(model, name)
    modules = adapted_modules(model)
    experts = [e for m in model.modules() if isinstance(m, MoE) for e in m.modules()]
    odd = [a for m in modules.values() for a in m.adapters.values() if not cast(Adapter, a).keeps_shape]
    if odd or undeclared_modules(model) or any(isinstance(e, Adapted) for e in experts):
        raise ValueError("adapters in experts or as MLPs, or beside parts that may mix tokens: use one at a time")
    for module in modules.values():
        module._row_adapters = names
    try:
        yield
    finally:
        for module in modules.values():
            module._row_adapters = ()


def detach(model: nn.Module, adapter: str | None = None) -> list[str]:
    """Remove one adapter, or with None all, and unwrap places without adapters. Returns the affected places."""
    selected = adapted_modules(model, adapter)
    for place in [p for p in tree.places(model) if p.name in selected]:
        outer = selected[place.name]
        for name in list(outer.adapters) if adapter is None else [adapter]:
            del outer.adapters[name]
            outer.active = None if outer.active == name else outer.active
        if not outer.adapters:
            setattr(place.parent, place.key, outer.base)
    return list(selected)


def base_model(model: nn.Module) -> nn.Module:
    """The model without adapters: a new module tree that shares the weights."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    base = deepcopy(model, shared)
    if any(isinstance(m, Adapted) for m in base.modules()):
        detach(base)
    return base
