"""Quantization of linear layers, by rounding to nearest or with calibration (registered in `changes.CHANGES`)."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import gptq
from dunes.augment.adapted import dense, linear_of
from dunes.augment.calibrate import calibration_tokens, require_text
from dunes.augment.change import Change, Part, float_dtype, part_name
from dunes.augment.options import CALIBRATED, RTN, Quantize
from dunes.augment.quantized import NF4, Grid, GroupInt, Int8, Quantized, QuantParams
from dunes.progress import each
from dunes.units import plural

__all__ = ["calibration_tokens"]
VERSION = 5


@torch.no_grad()
def dequantize(model: nn.Module) -> list[str]:
    """Replace quantized layers (also in wrappers) by dense layers with the rounded weights; return the places."""
    places = {*_quantized(model)}

    def make(base: nn.Module) -> nn.Module:
        assert isinstance(base, Quantized)
        return linear_of(nn.Parameter(base.dense(), False), base.bias, base.training)

    return tree.replace(model, places, make, reach="inner") if places else []


Solver = Callable[..., Iterator[tuple[dict[str, QuantParams], list[str]]]]
BITS = {"int8": 8, "int4": 4, "int3": 3}
SOLVERS: dict[str, Solver] = {"gptq": gptq.solve}
"""Maps each method except rtn to a function with the parameters of `gptq.solve`; `ids` is None without text."""
METHODS = dict.fromkeys(BITS, (RTN, *SOLVERS)) | {"nf4": (RTN,)}
BY_GROUP = ("int4", "int3")
GROUP = 64
DENSE = "dense"
"""In an override, the kind that leaves layers unquantized."""


def decide(model: nn.Module, options: Quantize, ids: Tensor | None = None) -> Change:
    """The record of a quantization: every setting, and the kind and dtype of each quantized layer.

    gptq needs calibration text `ids` (S, T) int64. The default method is gptq with calibration text, and rtn
    without it. int4 and int3 have zero points unless `symmetric`. Of several overrides that match a place, the
    last one counts. An override whose kind is not `dense` also quantizes places that `where` does not select.
    Layers whose kind does not support the method are rounded to nearest.

    Raises ValueError for invalid combinations of settings, and for layers that are not dense.
    """
    method = options.method or (RTN if ids is None else CALIBRATED[0])
    overrides = [_override(text) for text in options.override]
    request = _request(options, check_kinds(options.kind, options.override, method), method)
    if (ids is not None) != (method in CALIBRATED):
        raise ValueError(f"method is {method!r}; calibration text is for {', '.join(CALIBRATED)}, which needs it")
    globs = options.request()["where"]
    modules, kind_of = _dense_layers(model, globs, options.kind, overrides)
    if ids is not None:
        require_text(model, ids, modules)
    places = {name: {"dtype": str(dense(m).dtype).removeprefix("torch.")} for name, m in modules.items()}
    if overrides:
        request["override"] = list(options.override)
        for name, settings in places.items():
            settings["kind"] = kind_of[name]
    return Change("quantize", VERSION, {"where": globs, **request}, places)


def check_kinds(kind: str, override: Sequence[str], method: str) -> list[str]:
    """The list of all kinds, without duplicates: `kind`, then the kinds of the overrides GLOB=KIND except dense.

    Raises ValueError for an invalid override, an unknown kind, and a method that none of the kinds supports.
    """
    others = [other for _, other in map(_override, override) if other != DENSE]
    if kind not in METHODS:
        raise ValueError(f"kind is {kind!r}; expected {', '.join(METHODS)}")
    kinds = [*dict.fromkeys([kind, *others])]
    methods = dict.fromkeys(name for each_kind in kinds for name in METHODS[each_kind])
    if method not in methods:
        raise ValueError(f"kind {' and '.join(kinds)} has no method {method!r}; expected {', '.join(methods)}")
    return kinds


def _override(text: str) -> tuple[str, str]:
    """Split an override GLOB=KIND into glob and kind. Raises ValueError for other text and unknown kinds."""
    glob, _, kind = text.rpartition("=")
    if not glob or kind not in (*METHODS, DENSE):
        raise ValueError(
            f"override is {text[:80]!r}; expected GLOB=KIND, with a kind of {', '.join((*METHODS, DENSE))}"
        )
    return glob, kind


def _request(options: Quantize, kinds: Collection[str], method: str) -> dict[str, Any]:
    """The settings that apply to these kinds and this method. Raises ValueError if any other is set."""
    request: dict[str, Any] = {"kind": options.kind, "double": options.double}
    by_group = {*BY_GROUP} & {*kinds}
    unused = {
        "double": options.double and "nf4" not in kinds,
        "act_order": options.act_order is False and method != "gptq",
        "group or symmetric": not by_group and (options.group is not None or options.symmetric),
    }
    if names := [name for name, is_unused in unused.items() if is_unused]:
        raise ValueError(f"{names[0]} does not go with kind {options.kind} and method {method}")
    if by_group:
        request |= {"group": GROUP if options.group is None else options.group, "symmetric": options.symmetric}
        if request["group"] < 0:
            raise ValueError(f"group is {options.group}; expected a number of inputs, or 0 for the whole row")
    if by_group or method in SOLVERS:
        request["method"] = method
    if method == "gptq":
        request["act_order"] = options.act_order is not False
    return request


def _dense_layers(
    model: nn.Module, globs: list[str], kind: str, overrides: Sequence[tuple[str, str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The linear layers to quantize, and their kinds, both keyed by layer name.

    Wildcards skip layers that are already quantized. Raises ValueError if a quantized layer is selected by its
    exact name, if only quantized layers are selected, or if a glob selects nothing.
    """
    rules: list[tuple[list[str], str]] = [(globs, kind), *(([glob], other) for glob, other in overrides)]
    tied = getattr(model, "head", True) is None
    if tied and any("head" in where and tree.matches(where, "head") and k != DENSE for where, k in rules):
        raise ValueError("head: tied to the embedding, which is not quantized; omit it, or exclude it ('!head')")
    selected, kinds = dict[str, Any](), dict[str, str]()
    is_linear = lambda module: isinstance(tree.innermost(module), nn.Linear | Quantized)
    for where, other in rules:
        for place in tree.find(model, where, is_linear):
            selected[place.name], kinds[place.name] = tree.innermost(place.module), other
    selected = {name: module for name, module in selected.items() if kinds[name] != DENSE}
    names = {glob for where, _ in rules for glob in where}
    layers = {name: m for name, m in selected.items() if not isinstance(m, Quantized) or name in names}
    if quantized := [name for name, m in (layers or selected).items() if isinstance(m, Quantized)]:
        raise ValueError(f"{quantized[0]}: already quantized; load the dense model and quantize that")
    if not layers:
        raise ValueError(f"override leaves all of {', '.join(globs)} dense; nothing is left to quantize")
    return layers, kinds


def grid_at(change: Change, place: str) -> Grid | None:
    """The quantization grid for the weight at this place; None for NF4, which has fixed levels."""
    request, kind = change.request, change.places[place].get("kind", change.request["kind"])
    if kind in ("nf4", "int8"):
        return Grid(8, symmetric=True) if kind == "int8" else None
    return Grid(BITS[kind], request["group"], request["symmetric"])


def describe(change: Change) -> str:
    """Describe number formats and method in one sentence."""
    request = change.request
    method = request.get("method", "rtn")
    group = request.get("group")
    size = "" if group is None else f" in groups of {group}" if group else " with a scale for each row"
    others = Counter(settings.get("kind", request["kind"]) for settings in change.places.values())
    others.pop(request["kind"], None)
    return (
        f"{request['kind']}{size}{', symmetric' * bool(request.get('symmetric'))}, "
        f"{'rounded to nearest' if method == 'rtn' else f'by {method.upper()}'}"
        + "".join(f"; {kind} at {plural(count, 'place')}" for kind, count in others.items())
    )


def shape(model: nn.Module, change: Change) -> None:
    """Replace the linear layers (also inside wrappers) by quantized layers whose values are not set yet."""
    linears = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    layers = {id(linears[name]): _layer(linears[name], change, name) for name in change.places}
    tree.replace(model, {*change.places}, lambda base: layers[id(base)], reach="inner")


def _layer(base: Any, change: Change, place: str) -> Quantized:
    """An uninitialised quantized layer that replaces the linear layer `base` at this place."""
    grid, settings = grid_at(change, place), change.places[place]
    layer: Quantized
    if grid is None:
        layer = NF4(base, change.request["double"])
    else:
        layer = Int8(base) if grid.bits == 8 else GroupInt(base, grid)
    if "dtype" in settings:
        layer.dtype = float_dtype(settings["dtype"])
    return layer.train(base.training)


def solve(model: nn.Module, change: Change, ids: Tensor | None) -> Iterator[Part]:
    """Let the method change the weights, block by block, and yield each part with its scales and zero points.

    A layer with too few tokens is rounded to nearest; its record then has the method "rtn". Raises ValueError,
    before anything is changed, for weights that are not finite.
    """
    _require_finite(model, change)
    parts = change.parts()
    method = change.request.get("method")
    if method not in SOLVERS:
        yield from map(Part, each(parts.values()))
        return
    grids = {name: grid for name in change.places if (grid := grid_at(change, name))}
    for qparams, short in SOLVERS[method](model, ids, grids, change.request):
        part = parts.pop(part_name(next(iter(qparams))))
        to_nearest = {name: {**part.places[name], "method": "rtn"} for name in short}
        yield Part(replace(part, places={**part.places, **to_nearest}), qparams)
    yield from map(Part, parts.values())  # parts whose kind does not support the method


def _require_finite(model: nn.Module, change: Change) -> None:
    for place in tree.places(model):
        weight = dense(tree.innermost(place.module)) if place.name in change.places else None
        if weight is None or weight.is_meta:
            continue
        least, largest = weight.aminmax()
        if not (least.isfinite() and largest.isfinite()):
            raise ValueError(f"{place.name}: not all weights are finite; dunes inspect --values lists them")


@torch.no_grad()
def fill(
    model: nn.Module, change: Change, weights: MutableMapping[str, Tensor], solved: Mapping[str, QuantParams]
) -> None:
    """Quantize the weights. `solved` maps layers to scales and zero points; for any other layer, they are fitted
    to its weight.

    Each weight is removed from `weights` before it is quantized.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    for name, module in _quantized(model).items():
        if name in change.places:
            weight = weights.pop(f"{paths[id(module)]}.weight")
            module.fill(weight, solved.get(name))


def undo(model: nn.Module, change: Change) -> None:
    """Replace the quantized layers by dense layers with the rounded weights."""
    dequantize(model)


def _quantized(model: nn.Module) -> dict[str, Quantized]:
    """The quantized layers of the model (also inside wrappers), by name."""
    inner = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    return {name: module for name, module in inner.items() if isinstance(module, Quantized)}
