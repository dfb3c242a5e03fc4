"""Quantized linear layers: int8 by row, int4 and int3 by group, and NF4 in blocks of 64.

QLoRA https://arxiv.org/abs/2305.14314, LLM.int8 https://arxiv.org/abs/2208.07339
"""

# Shapes: I inputs, O outputs, G groups of a row, N blocks.

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import dense
from dunes.augment.calibrate import calibration_tokens, require_text
from dunes.augment.change import Change, Part, float_dtype, part_name
from dunes.augment.group_int import GroupInt
from dunes.augment.masked import linear_of
from dunes.augment.options import CALIBRATED, RTN, Method, Quantize
from dunes.augment.quantized import Grid, Inputs, Quantized, Steps, Sums, contiguous, nibbles, row_sums
from dunes.ops.int_linear import int8_linear, is_few
from dunes.progress import each
from dunes.units import plural

__all__ = ["calibration_tokens"]
VERSION = 4
"""Newest version of the record: 2 for plain int8 and NF4, 3 for other kinds, 4 for layers with quantized
activations, which are no longer supported."""

BLOCK = 64
OUTER = 256
"""Blocks that share one second-level scale in double quantization."""


class Int8(Quantized):
    """Symmetric int8: `codes` (O, I) int8 times `scale` (O, 1) float32, a row's largest absolute value / 127."""

    codes: Tensor
    scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        shape, device = base.weight.shape, base.weight.device
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.empty(shape[0], 1, device=device))

    def fill(self, weight: Tensor, steps: Steps | None = None) -> None:
        weight, grid = weight.float(), Grid(8, symmetric=True)
        steps = steps or grid.fit(weight)
        self.scale.copy_(steps.scale)
        self.codes.copy_(grid.codes(weight, steps))

    def dense(self) -> Tensor:
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        # In bfloat16 scaling the sums is more exact than rounding the dequantized matrix. In float32 many rows
        # take the dense product, bit-equal with training and adapters. In float16 sums over codes could overflow.
        if not (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and is_few(x))):
            return super().product(x)
        y = int8_linear(x, self.codes, self.scale[:, 0])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def code_products(self, x: Tensor) -> Tensor:
        sums: Sums = lambda x, codes: (codes.float() * x[0]).sum(-1)
        return row_sums(x, [self.codes], lambda token: [token], sums) * self.scale[:, 0]


class NF4(Quantized):
    """NF4 (QLoRA): sixteen quantiles of the normal distribution, scaled by each block's largest absolute value.

    With `double` the scales (N,) are quantized to int8, with a scale `outer` for each 256 and the mean `middle`.
    """

    codes: Tensor
    scale: Tensor
    outer: Tensor | None
    middle: Tensor | None

    def __init__(self, base: nn.Linear, double: bool = False) -> None:
        super().__init__(base)
        device, size = base.weight.device, base.weight.numel()
        blocks = -(-size // BLOCK)
        self.double_quantized = double
        self.register_buffer("codes", torch.empty(-(-size // 2), dtype=torch.uint8, device=device))
        self.register_buffer(
            "scale", torch.empty(blocks, dtype=torch.int8 if double else torch.float32, device=device)
        )
        self.register_buffer("outer", torch.empty(-(-blocks // OUTER), 1, device=device) if double else None)
        self.register_buffer("middle", torch.empty((), device=device) if double else None)

    def fill(self, weight: Tensor, steps: Steps | None = None) -> None:
        assert steps is None, "its levels are fixed"
        codes, scale = encode(weight)
        if len(codes) % 2:
            codes = F.pad(codes, (0, 1), value=7)  # the code of zero
        self.codes.copy_(codes[0::2] << 4 | codes[1::2])
        if self.outer is None or self.middle is None:
            self.scale.copy_(scale)
            return
        # In float64, since otherwise the result would depend on the number of threads.
        self.middle.copy_(scale.double().mean())
        rows = _rows(scale - self.middle, OUTER)
        self.outer.copy_(rows.abs().amax(1, keepdim=True) / 127)
        self.scale.copy_((rows / self.outer.clamp(min=1e-30)).round().flatten()[: len(scale)])

    def scales(self) -> Tensor:
        """The largest absolute value of each block (N,)."""
        if self.outer is None or self.middle is None:
            return self.scale
        rows = _rows(self.scale.float(), OUTER) * self.outer
        return rows.flatten()[: len(self.scale)] + self.middle

    def dense(self) -> Tensor:
        size = self.out_features * self.in_features
        weight = _rows(self._levels()[:size], BLOCK) * self.scales()[:, None]
        return weight.flatten()[:size].view(self.out_features, self.in_features).to(self.dtype)

    def _levels(self) -> Tensor:
        """The level of each code (I * O,), followed by one of padding if I * O is odd."""
        levels = codebook(self.codes.device)
        if torch.compiler.is_compiling():
            return levels[torch.stack([self.codes >> 4, self.codes & 15], 1).flatten().int()]
        # Looking up two levels at once, as one number of 8 bytes, takes a third of the time.
        pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int64)[:, 0]
        return pairs.index_select(0, self.codes.int()).view(torch.float32)

    def code_products(self, x: Tensor) -> Tensor | None:
        groups, rest = divmod(self.in_features, BLOCK)
        if rest:
            return None

        def sums(x: Sequence[Tensor], codes: Tensor, scale: Tensor) -> Tensor:
            codes = torch.unflatten(codes, 1, (groups, -1)).int()
            return ((_level(codes >> 4) * x[0] + _level(codes & 15) * x[1]) * scale[..., None]).sum((-1, -2))

        inputs: Inputs = lambda token: contiguous(*nibbles(token, groups))
        weights = (t.view(self.out_features, -1) for t in (self.codes, self.scales()))
        return row_sums(x, [*weights], inputs, sums)


def _codebook() -> tuple[float, ...]:
    """NF4's levels: quantiles of the normal distribution, seven below zero and eight above it.

    Rounding at the same points as bitsandbytes makes them bit-equal to its levels.
    """
    levels = torch.cat([-_quantiles(8), torch.zeros(1), _quantiles(9).flip(0)])
    return tuple((levels / levels.max()).tolist())


def _quantiles(count: int) -> Tensor:
    probabilities = torch.linspace(0.9677083, 0.5, count, dtype=torch.float32)
    quantiles: Tensor = torch.special.ndtri(probabilities.double())
    return quantiles[:-1].float()


LEVELS = _codebook()


def _level(codes: Tensor) -> Tensor:
    """The levels of codes, selected bit by bit, since Inductor vectorizes `where` but not table look-ups."""
    levels: Sequence[Any] = LEVELS
    for bit in (1, 2, 4, 8):
        is_set = (codes & bit) != 0
        levels = [torch.where(is_set, b, a) for a, b in zip(levels[::2], levels[1::2], strict=True)]
    (level,) = levels
    return torch.as_tensor(level)


def codebook(device: torch.device | str = "cpu") -> Tensor:
    """NF4's levels (16,) float32, a new tensor, since one cached under a fake tensor mode would have no data."""
    if torch.compiler.is_exporting():  # exported graphs keep tensor constants out of line, unseen by native code
        return torch.cat([torch.full((1,), level, device=device) for level in LEVELS])
    return torch.tensor(LEVELS, device=device)


INVERSE = 1.0000000649e38
"""Largest reciprocal of a scale; bitsandbytes divides by at least 1e-38."""


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """NF4 codes (I * O,) uint8 and scales (N,) float32 of a weight, bit-equal to bitsandbytes'.

    Like bitsandbytes, complete blocks are multiplied by the reciprocal of the scale and an incomplete last block
    is divided by it, which decides ties between two levels.
    """
    rows = _rows(weight.float().flatten(), BLOCK)
    scale = rows.abs().amax(1)
    normalised = rows * (1 / scale).clamp(max=INVERSE)[:, None]
    if weight.numel() % BLOCK:
        scale[-1].clamp_(min=1e-38)
        normalised[-1] = rows[-1] / scale[-1]
    levels = codebook(weight.device)
    codes = torch.bucketize(normalised, (levels[1:] + levels[:-1]) / 2)
    return codes.flatten()[: weight.numel()].to(torch.uint8), scale


def _rows(flat: Tensor, length: int) -> Tensor:
    return F.pad(flat, (0, -len(flat) % length)).view(-1, length)


@torch.no_grad()
def dequantize(model: nn.Module) -> list[str]:
    """Replace quantized layers, inside any wrappers, by dense ones with the rounded weights; returns places."""
    places = {*_quantized(model)}

    def make(base: nn.Module) -> nn.Module:
        assert isinstance(base, Quantized)
        return linear_of(nn.Parameter(base.dense(), False), base.bias, base.training)

    return tree.replace(model, places, make, reach="inner") if places else []


BITS = {"int8": 8, "int4": 4, "int3": 3}
SOLVERS: dict[str, Any] = {
    name: import_module(f"dunes.augment.{name}") for name in get_args(Method) if name != RTN
}
"""The files of methods besides rounding to nearest; each has a `solve` like that of `gptq`."""
METHODS = dict.fromkeys(BITS, (RTN, *SOLVERS)) | {"nf4": (RTN,)}
BY_GROUP = ("int4", "int3")
GROUP = 64
DENSE = "dense"
"""The kind in an override that leaves its places unquantized."""


def decide(model: nn.Module, options: Quantize, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, the places, and the kind and dtype of each.

    gptq needs calibration text `ids` (S, T) int64, and is the default method with it. int4 and int3 have zero
    points unless `symmetric`. The last `override` that matches a place wins; kinds other than `dense` also
    quantize places that `where` does not select. Layers whose kind does not support the method are rounded to
    nearest.

    Raises ValueError for invalid combinations of settings, and for layers that are not dense.
    """
    method = options.method or ("rtn" if ids is None else "gptq")
    overrides, kinds = [_override(text) for text in options.override], all_kinds(options.kind, options.override)
    request = _request(options, kinds) | _method(kinds, method, options.act_order)
    if (ids is not None) != (method in CALIBRATED):
        raise ValueError(
            f"method is {method!r}; calibration text goes with {', '.join(CALIBRATED)}, and only with it"
        )
    globs = options.request()["where"]
    modules, kind_of = _dense_layers(model, globs, options.kind, overrides)
    if ids is not None:
        require_text(model, ids, {name: m for name, m in modules.items() if isinstance(m, nn.Linear)})
    places = {name: {"dtype": str(dense(m).dtype).removeprefix("torch.")} for name, m in modules.items()}
    if overrides:
        request["override"] = list(options.override)
        for name, settings in places.items():
            settings["kind"] = kind_of[name]
    version = 2 if {*request} == {"kind", "double"} else 3
    return Change("quantize", version, {"where": globs, **request}, places)


def all_kinds(kind: str, override: Sequence[str]) -> list[str]:
    """`kind` and the kinds of overrides GLOB=KIND, without duplicates. Raises ValueError for other overrides."""
    others = [other for _, other in map(_override, override) if other != DENSE]
    return [*dict.fromkeys([kind, *others])]


def _override(text: str) -> tuple[str, str]:
    """The glob and the kind in GLOB=KIND. Raises ValueError for anything else."""
    glob, _, kind = text.rpartition("=")
    if not glob or kind not in (*METHODS, DENSE):
        raise ValueError(
            f"override is {text[:80]!r}; expected GLOB=KIND, with a kind of {', '.join((*METHODS, DENSE))}"
        )
    return glob, kind


def _request(options: Quantize, kinds: Collection[str]) -> dict[str, Any]:
    """The settings that apply to these kinds. Raises ValueError if others are given."""
    request = {"kind": options.kind, "double": options.double}
    if options.kind not in METHODS or (options.double and "nf4" not in kinds):
        raise ValueError(
            f"kind is {options.kind!r}, double {options.double}; expected {', '.join(METHODS)}, and double only "
            "with nf4"
        )
    if not {*BY_GROUP} & {*kinds}:
        if options.group is not None or options.symmetric:
            raise ValueError(
                f"kind {options.kind} has no choice of group or symmetry; these go with int4 and int3"
            )
        return request
    if (group := GROUP if options.group is None else options.group) < 0:
        raise ValueError(f"group is {group}; expected a number of inputs, or 0 for the whole row")
    return request | {"group": group, "symmetric": options.symmetric}


def _method(kinds: Collection[str], method: str, act_order: bool) -> dict[str, Any]:
    """The settings of the method. Raises ValueError if none of the kinds supports it.

    Plain int8 and NF4 keep record version 2, so that older releases open them, and adapters and runs on such a
    base compare equal with older ones.
    """
    require_method(kinds, method)
    if act_order is False and method != "gptq":
        raise ValueError(f"method {method} has no act_order; it goes with gptq")
    if method == "gptq":
        return {"method": method, "act_order": act_order is not False}
    return {"method": method} if method in SOLVERS or {*BY_GROUP} & {*kinds} else {}


def require_method(kinds: Collection[str], method: str) -> None:
    """Raise ValueError for an unknown kind, and for a method that none of the kinds supports."""
    if unknown := [kind for kind in kinds if kind not in METHODS]:
        raise ValueError(f"kind is {unknown[0]!r}; expected {', '.join(METHODS)}")
    methods = dict.fromkeys(name for kind in kinds for name in METHODS[kind])
    if method not in methods:
        raise ValueError(f"kind {' and '.join(kinds)} has no method {method!r}; expected {', '.join(methods)}")


def _dense_layers(
    model: nn.Module, globs: list[str], kind: str, overrides: Sequence[tuple[str, str]]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The linear layers to quantize and their kinds, by place. Layers quantized already are skipped.

    Raises ValueError for a glob that selects nothing, and for a layer selected by name that is quantized already.
    """
    selectors = [globs, *(glob for glob, other in overrides if other != DENSE)]
    if getattr(model, "head", True) is None and any(_names_head(glob) for glob in selectors):
        raise ValueError(
            "head: has the embedding's matrix, which is not quantized; omit it, or exclude it ('!head')"
        )
    selected = {p.name: tree.innermost(p.module) for p in tree.find(model, globs, _quantizable)}
    kinds = dict.fromkeys(selected, kind)
    for glob, other in overrides:
        for place in tree.find(model, glob, _quantizable):
            selected[place.name], kinds[place.name] = tree.innermost(place.module), other
    selected = {name: module for name, module in selected.items() if kinds[name] != DENSE}
    names = {*globs, *(glob for glob, _ in overrides)}
    layers = {name: m for name, m in selected.items() if not isinstance(m, Quantized) or name in names}
    if quantized := [name for name, m in (layers or selected).items() if isinstance(m, Quantized)]:
        raise ValueError(f"{quantized[0]}: already quantized; load the dense model and quantize that")
    if not layers:
        raise ValueError(f"override leaves all of {', '.join(globs)} dense; nothing is left to quantize")
    return layers, kinds


def _names_head(globs: tree.Where) -> bool:
    """True if the head is selected by its name and not by a wildcard."""
    return "head" in ([globs] if isinstance(globs, str) else globs) and tree.matches(globs, "head")


def _quantizable(module: nn.Module) -> bool:
    return isinstance(tree.innermost(module), nn.Linear | Quantized)


def grid_at(change: Change, place: str) -> Grid | None:
    """The quantization grid of the weight at this place; None for NF4."""
    request, kind = change.request, change.places[place].get("kind", change.request["kind"])
    if kind in ("nf4", "int8"):
        return Grid(8, symmetric=True) if kind == "int8" else None
    return Grid(BITS[kind], request["group"], request["symmetric"], real_zero=request["method"] == "hqq")


def describe(change: Change) -> str:
    """One sentence for users about the kinds and the method."""
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
    """Replace the linear layers, inside any wrappers, by quantized ones without values.

    Raises ValueError, before anything is changed, if the change does not fit the model.
    """
    if change.request.get("activations"):
        raise ValueError(
            "its layers round their inputs to int8 (--activations), which version 0.2.0 dropped: quantize the "
            "dense model again with --kind int8"
        )
    linears = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    dense_places = {name for name, module in linears.items() if isinstance(module, nn.Linear)}
    if missing := sorted({*change.places} - dense_places):
        raise ValueError(f"{missing[0]}: this model has no such dense linear layer; was it quantized already?")
    dtypes = {name: float_dtype(s["dtype"]) for name, s in change.places.items() if "dtype" in s}
    layers = {id(linears[name]): _layer(linears[name], change, name) for name in change.places}
    tree.replace(model, {*change.places}, lambda base: layers[id(base)], reach="inner")
    for name, module in _quantized(model).items():
        module.dtype = dtypes.get(name, module.dtype)


def _layer(base: nn.Module, change: Change, place: str) -> Quantized:
    """The uninitialised quantized layer that replaces a linear one."""
    assert isinstance(base, nn.Linear)
    grid = grid_at(change, place)
    layer: Quantized
    if grid is None:
        layer = NF4(base, change.request["double"])
    else:
        layer = Int8(base) if grid.bits == 8 else GroupInt(base, grid)
    return layer.train(base.training)


def solve(model: nn.Module, change: Change, ids: Tensor | None) -> Iterator[Part]:
    """Change the weights by the method and yield the parts of the change, each with scales and zero points.

    The record says which places got too few tokens and are rounded to nearest. Raises ValueError, before
    anything is changed, for weights that are not finite.
    """
    _require_finite(model, change)
    parts = change.parts()
    if (method := change.request.get("method")) in SOLVERS:
        if ids is None and method in CALIBRATED:
            raise ValueError(f"method {method} needs calibration text")
        grids = {name: grid for name in change.places if (grid := grid_at(change, name))}
        for steps, short in SOLVERS[method].solve(model, ids, grids, change.request):
            part = parts.pop(part_name(next(iter(steps))))
            yield Part(_record_short(part, short), steps)
        yield from map(Part, parts.values())  # kinds without the method
    else:
        yield from map(Part, each(parts.values()))


def _record_short(part: Change, short: Collection[str]) -> Change:
    """The change with method rtn recorded at the places in `short`."""
    places = {
        name: {**settings, **({"method": "rtn"} if name in short else {})}
        for name, settings in part.places.items()
    }
    return replace(part, places=places)


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
    model: nn.Module,
    change: Change,
    weights: MutableMapping[str, Tensor],
    solved: Mapping[str, Steps] | None = None,
) -> None:
    """Quantize the weights, with the scales and zero points in `solved`, if any; removes each from `weights`."""
    paths = {id(module): path for path, module in model.named_modules()}
    for name, module in _quantized(model).items():
        if name in change.places:
            weight = weights.pop(f"{paths[id(module)]}.weight")
            module.fill(weight, (solved or {}).get(name))


def undo(model: nn.Module, change: Change) -> None:
    """Replace the quantized layers by dense ones with the rounded weights."""
    dequantize(model)


def _quantized(model: nn.Module) -> dict[str, Quantized]:
    """Quantized layers, inside any wrappers, by place."""
    inner = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    return {name: module for name, module in inner.items() if isinstance(module, Quantized)}
