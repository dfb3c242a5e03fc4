"""Structured pruning: remove the least important heads, hidden neurons, experts and blocks of a model.

Importance is measured on calibration text: of heads (groups in grouped-query attention) and neurons as in
https://arxiv.org/abs/1905.10650, of experts as the sum over their neurons, of blocks by the cosine of input and
output hidden states (https://arxiv.org/abs/2403.03853). An entry of CHANGES, see `changes.py`.
"""

# Shapes: S sequences, T tokens, U units (groups of heads or neurons), I inputs, O outputs.

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense
from dunes.augment.calibrate import require_ids
from dunes.augment.change import Change
from dunes.augment.masked import MaskedLinear, linear_of
from dunes.augment.neurons import ROWS, input_gradients
from dunes.augment.options import Narrow
from dunes.ops.expert_products import one_by_one
from dunes.parts import MLP, Attention, Decoder, GatedMLP, MoE
from dunes.progress import each
from dunes.units import plural

VERSION = 1
ROWS_OF = {"groups": ("q", "k", "v"), "neurons": ("gate", "up")}
COLUMNS_OF = {"groups": "out", "neurons": "down"}
"""The linear layer whose input columns belong to the units; `ROWS_OF` has the layers with their output rows."""
PARTS: dict[str, Any] = {
    "blocks": nn.ModuleList,
    "experts": MoE,
    "groups": Attention,
    "neurons": (MLP, GatedMLP),
}
"""Module classes that contain units, by the kind of unit."""


def decide(model: nn.Module, options: Narrow, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the indices of the units that each place keeps.

    With `uneven`, heads and neurons are ranked across layers, which then differ in size but have the requested
    average. `ids` (S, T) int64 are calibration text. Raises ValueError for invalid options.
    """
    request, experts, blocks = options.request(), options.experts, options.blocks
    if not any(request[key] is not None for key in ("heads", "neurons", "experts", "blocks")):
        raise ValueError("nothing to take out; pass how many heads, neurons, experts or blocks to keep")
    if ids is None:
        raise ValueError("narrow needs calibration text")
    require_ids(model, ids)
    if ids.shape[1] < 2:
        raise ValueError("the calibration text has sequences of 1 token; expected 2 or more")
    assert isinstance(model, Decoder)
    if blocks is not None and not 0 < blocks < len(model.blocks):
        raise ValueError(f"blocks is {blocks}; expected 1 to {len(model.blocks) - 1}, fewer than the model has")
    units = dict(_units(model, request))
    scores = importances(model, ids, {name: count for name, (_, count, _) in units.items()})
    places = _kept_units(units, scores, options.uneven)
    if experts is not None:
        mixtures = _kept_experts(model, scores, experts)
        places = {n: p for n, p in places.items() if _stays(n, mixtures)} | mixtures
    if blocks is not None:
        chosen = block_influence(model, ids).topk(blocks).indices.sort().values.tolist()
        places = {n: p for n, p in places.items() if int(n.split(".")[1]) in chosen}
        places["blocks"] = {"blocks": chosen, "of": len(model.blocks)}
    if not places:
        raise ValueError(
            "nothing to take out: the model has no more heads, neurons and experts than are to be kept"
        )
    return Change("narrow", VERSION, request, places)


def _units(model: Decoder, request: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Kind of unit, number of units and number to keep, by the place of the linear layer that reads the units.

    Raises ValueError for layers that are not dense, and for numbers out of range.
    """
    for place in tree.places(model):
        name, module = place.name, tree.innermost(place.module)
        if isinstance(module, Attention) and request["heads"] is not None:
            groups = _sides(name, module.k)[0] // module.head_dim
            size = _sides(name, module.q)[0] // module.head_dim // groups
            count = request["heads"] // size
            if request["heads"] % size or not 0 < count <= groups:
                raise ValueError(
                    f"{name}: heads is {request['heads']}; expected {size} to {groups * size} by {size}"
                )
            yield f"{name}.out", ("groups", groups, count)
        elif isinstance(module, MLP | GatedMLP) and (
            request["neurons"] is not None or request["experts"] is not None
        ):
            hidden = _sides(name, module.down)[1]
            count = hidden if request["neurons"] is None else request["neurons"]
            if not 0 < count <= hidden:
                raise ValueError(f"{name}: neurons is {count}; expected 1 to {hidden}")
            yield f"{name}.down", ("neurons", hidden, count)


def _sides(name: str, linear: Any) -> tuple[int, int]:
    if not tree.is_dense(linear):
        raise ValueError(
            f"{name} has a {type(linear).__name__}; expected a plain linear layer: {how_to_make_dense(linear)}"
        )
    return linear.out_features, linear.in_features


def importances(model: nn.Module, ids: Tensor, units: Mapping[str, int]) -> dict[str, Tensor]:
    """Importance (U,) float32 of the units that the linear layers at these places read.

    A unit's importance is the sum over tokens of |outputs · gradient of the loss|, a first-order estimate of how
    much the loss changes without it. `units` has the number of units by place; `ids` are (S, T) int64.
    """
    sums = {name: torch.zeros(count) for name, count in units.items()}
    layers = {p.name: p.module for p in tree.places(model) if p.name in units}
    with tree.mode(model, False), torch.enable_grad(), one_by_one():
        for part in each(torch.split(ids, ROWS)) if units else ():
            for name, product in input_gradients(model, part, layers).items():
                by_unit = product.view(-1, units[name], product.shape[-1] // units[name])
                sums[name] += by_unit.sum(-1).abs().sum(0).cpu()
    return sums


@torch.no_grad()
def block_influence(model: Decoder, ids: Tensor) -> Tensor:
    """One minus the mean cosine similarity of each block's input and output (blocks,)."""
    sums = torch.zeros(len(model.blocks))

    def measure(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            sums[index] += (1 - F.cosine_similarity(inputs[0].float(), output.float(), -1)).sum().cpu()

        return hook

    with ExitStack() as hooks, tree.mode(model, False):
        for i, block in enumerate(model.blocks):
            hooks.enter_context(block.register_forward_hook(measure(i)))
        for part in torch.split(ids.to(next(model.parameters()).device), ROWS):
            model.hidden(part)
    return sums / ids.numel()


def _kept_units(
    units: Mapping[str, tuple[str, int, int]], scores: Mapping[str, Tensor], uneven: bool
) -> dict[str, dict[str, Any]]:
    """Units that each place keeps: the best of each layer, or with `uneven` of all layers, at least one each."""
    places: dict[str, dict[str, Any]] = {}
    for unit in ("groups", "neurons"):
        chosen = {name: keep for name, (its_unit, _, keep) in units.items() if its_unit == unit}
        if uneven and chosen:
            total, least = sum(chosen.values()), {name: int(scores[name].argmax()) for name in chosen}
            forced = {n: scores[n].index_fill(0, torch.tensor(least[n]), torch.inf) for n in chosen}
            threshold = torch.cat([*forced.values()]).topk(total).values[-1]
            rows = {n: (s >= threshold).nonzero()[:, 0] for n, s in forced.items()}
        else:
            rows = {name: scores[name].topk(keep).indices.sort().values for name, keep in chosen.items()}
        for name, row in rows.items():
            if len(row) < units[name][1]:
                places[name.rpartition(".")[0]] = {unit: row.tolist(), "of": units[name][1]}
    return places


def _kept_experts(model: Decoder, scores: Mapping[str, Tensor], experts: int) -> dict[str, dict[str, Any]]:
    """Experts that each mixture keeps, ranked by the summed importance of their neurons."""
    places: dict[str, dict[str, Any]] = {}
    for place in tree.places(model):
        if isinstance(moe := place.module, MoE):
            if not moe.top_k <= experts <= len(moe.experts) or not tree.is_dense(moe.router):
                raise ValueError(
                    f"{place.name}: experts is {experts}; expected {moe.top_k}, as many as each token gets, to "
                    f"{len(moe.experts)}, and a linear router"
                )
            downs = [f"{place.name}.experts.{e}.down" for e in range(len(moe.experts))]
            if missing := [e for e, down in zip(moe.experts, downs, strict=True) if down not in scores]:
                raise ValueError(
                    f"{place.name}: its experts are {type(missing[0]).__name__}; expected MLP or GatedMLP, whose "
                    "neurons are compared"
                )
            sums = torch.stack([scores[down].sum() for down in downs])
            best = sums.topk(experts).indices.sort().values.tolist()
            places[place.name] = {"experts": best, "of": len(moe.experts)}
    if not places:
        raise ValueError("experts: this model has no mixture of experts")
    return {name: units for name, units in places.items() if experts < units["of"]}


def _stays(name: str, mixtures: Mapping[str, Any]) -> bool:
    """True unless this MLP is an expert that is removed."""
    place, _, expert = name.rpartition(".experts.")
    return place not in mixtures or int(expert) in mixtures[place]["experts"]


def describe(change: Change) -> str:
    """One sentence for users about the units that were kept."""
    counts = {key: value for key, value in change.request.items() if value not in (None, False, True)}
    spread = ", spread over the layers by importance" if change.request["uneven"] else " of each layer"
    listed = ", ".join(f"{n} {key}" for key, n in counts.items() if key != "blocks")
    blocks = change.places.get("blocks", {}).get("blocks")
    parts = [*([f"{listed}{spread}"] if listed else []), *([f"{plural(len(blocks), 'block')}"] if blocks else [])]
    return f"keeps {' and '.join(parts)}"


def shape(model: nn.Module, change: Change) -> None:
    """Shrink the modules to the kept units. Raises ValueError, before anything is changed, for other places."""
    modules = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    for name, units in change.places.items():
        _check(name, modules.get(name), units)
    for name, units in change.places.items():
        module: Any = modules[name]
        if "blocks" in units:
            tree.remove(model, {f"blocks.{i}" for i in range(units["of"]) if i not in units["blocks"]})
        elif "experts" in units:
            _keep_experts(module, units["experts"])
        else:
            _resize(module, units)


def _check(name: str, module: Any, units: Mapping[str, Any]) -> None:
    """Raise ValueError unless the module has the recorded number of units and the kept indices are valid."""
    unit, *others = sorted(units.keys() - {"of"}) or [""]
    rows, fits = units.get(unit), isinstance(module, PARTS.get(unit, ())) and units.get("of") == _count(module)
    valid = fits and not others and isinstance(rows, list) and all(type(i) is int for i in rows)
    if not valid or not rows or rows != sorted({*rows}) or not 0 <= rows[0] <= rows[-1] < units["of"]:
        raise ValueError(f"{name[:80]}: has no such {unit[:80]} to keep; was the change made to another model?")


def _count(module: Any) -> int:
    """Number of units of a module."""
    if isinstance(module, Attention):
        return module.k.out_features // module.head_dim
    if isinstance(module, MoE):
        return len(module.experts)
    return len(module) if isinstance(module, nn.ModuleList) else int(module.down.in_features)


def _keep_experts(moe: MoE, experts: list[int]) -> None:
    moe.experts = nn.ModuleList([moe.experts[e] for e in experts])
    moe.router = _sized(moe.router, rows=len(experts))
    for name, buffer in [*moe.named_buffers(recurse=False)]:
        moe.register_buffer(name, buffer.new_empty(len(experts)))


def _resize(module: Any, units: Mapping[str, Any]) -> None:
    """Replace the linear layers of an attention or an MLP by smaller ones for the kept units."""
    (unit,) = units.keys() - {"of"}
    for name in ROWS_OF[unit]:
        if (linear := getattr(module, name, None)) is not None:
            setattr(module, name, _sized(linear, rows=linear.out_features // units["of"] * len(units[unit])))
    last = getattr(module, COLUMNS_OF[unit])
    setattr(module, COLUMNS_OF[unit], _sized(last, columns=last.in_features // units["of"] * len(units[unit])))


def _sized(linear: Any, rows: int | None = None, columns: int | None = None) -> nn.Linear:
    """An uninitialised linear layer with this many rows and columns, by default as many as `linear`."""
    cls = MaskedLinear if isinstance(linear, MaskedLinear) else nn.Linear
    rows, columns = rows or linear.out_features, columns or linear.in_features

    def empty(*shape: int) -> nn.Parameter:
        return nn.Parameter(linear.weight.new_empty(shape), linear.weight.requires_grad)

    bias = None if linear.bias is None else empty(rows)
    return linear_of(empty(rows, columns), bias, linear.training, cls)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of the selected units."""
    for name, tensor in model.state_dict().items():
        before = _name_before(name, change.places)
        selected = _selected(weights[before], before, change.places)
        if selected.data_ptr() != tensor.data_ptr():
            tensor.copy_(selected)


def _name_before(name: str, places: Mapping[str, Any]) -> str:
    """The tensor's name in the original model, before blocks and experts were renumbered."""
    segments = name.split(".")
    if segments[0] == "blocks" and "blocks" in places:
        segments[1] = str(places["blocks"]["blocks"][int(segments[1])])
    if "experts" in segments:
        i = segments.index("experts")
        if (units := places.get(".".join(segments[:i]))) is not None and "experts" in units:
            segments[i + 1] = str(units["experts"][int(segments[i + 1])])
    return ".".join(segments)


def _selected(tensor: Tensor, name: str, places: Mapping[str, Any]) -> Tensor:
    """The slice of an original tensor that belongs to the kept units; `name` is its original name."""
    place, _, leaf = name.rpartition(".")
    parent, _, layer = place.rpartition(".")
    if "experts" in places.get(place, {}):  # a buffer with an entry for each expert
        return tensor[places[place]["experts"]]
    if (units := places.get(parent)) is None or "blocks" in units:
        return tensor
    (unit,) = units.keys() - {"of"}
    if unit == "experts":
        return tensor[units[unit]] if layer == "router" else tensor
    if layer in ROWS_OF[unit]:
        return tensor.reshape(units["of"], -1, *tensor.shape[1:])[units[unit]].flatten(0, 1)
    if layer == COLUMNS_OF[unit] and leaf == "weight":
        return tensor.reshape(len(tensor), units["of"], -1)[:, units[unit]].flatten(1)
    return tensor
