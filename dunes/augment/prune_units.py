"""Structured pruning: remove the least important heads, hidden neurons, experts and blocks of a model.

Importance is measured on calibration text. Heads (groups in grouped-query attention) and neurons are scored as in
https://arxiv.org/abs/1905.10650, and experts by the sum of their neurons' scores. Blocks are scored by the cosine
similarity of their input and output (https://arxiv.org/abs/2403.03853). This module is registered in the table
`CHANGES` in `changes.py`.
"""

# Shapes: S sequences, T tokens, U units (groups of heads or neurons), I inputs, O outputs.

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import linear_of, not_plain, order_matters
from dunes.augment.calibrate import require_ids
from dunes.augment.change import Change, modules_at
from dunes.augment.experts import ROWS, input_gradients
from dunes.augment.options import Narrow
from dunes.augment.prune import MaskedLinear
from dunes.ops.expert_products import one_by_one
from dunes.parts import MLP, Attention, Decoder, GatedMLP, MoE
from dunes.parts.context import ForwardContext
from dunes.progress import each
from dunes.units import plural

VERSION = 1
LAYERS: dict[str, dict[str, int]] = {
    "experts": {"router": 0},
    "groups": {"q": 0, "k": 0, "v": 0, "out": 1},
    "neurons": {"gate": 0, "up": 0, "down": 1},
}
"""Maps each kind of unit to the linear layers to shrink, each with the weight's dimension that indexes units."""


def decide(model: nn.Module, options: Narrow, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the indices of the units that each place keeps.

    With `uneven`, heads and neurons are ranked across layers; layers then differ in size, but their average size
    is the requested size. `ids` (S, T) int64 are the calibration text. Raises ValueError for invalid options.
    """
    request, experts, blocks = options.request(), options.experts, options.blocks
    if all(count is None for count in (options.heads, options.neurons, experts, blocks)):
        raise ValueError("nothing to remove; pass the numbers to keep: --heads, --neurons, --experts or --blocks")
    if ids is None or ids.shape[-1] < 2:
        raise ValueError("narrow needs calibration text, in sequences of 2 or more tokens")
    require_ids(model, ids)
    assert isinstance(model, Decoder)
    if blocks is not None and not 0 < blocks < len(model.blocks):
        raise ValueError(f"blocks is {blocks}; expected 1 to {len(model.blocks) - 1}, fewer than the model has")
    if blocks is not None and (name := order_matters(model)):
        raise ValueError(f"{name} uses results of an earlier block; remove heads or neurons instead")
    numbers = dict(_units(model, request))
    scores = importances(model, ids, {name: count for name, (_, count, _) in numbers.items()})
    places = _kept_units(numbers, scores, options.uneven)
    if experts is not None:
        mixtures = _kept_experts(model, scores, experts)
        removed = {
            f"{name}.experts.{e}"
            for name, units in mixtures.items()
            for e in {*range(units["of"])} - {*units["experts"]}
        }
        places = {name: units for name, units in places.items() if name not in removed} | mixtures
    if blocks is not None:
        chosen = block_influence(model, ids).topk(blocks).indices.sort().values.tolist()
        places = {n: p for n, p in places.items() if int(n.split(".")[1]) in chosen}
        places["blocks"] = {"blocks": chosen, "of": len(model.blocks)}
    if not places:
        raise ValueError(
            "nothing to remove: the numbers to keep are the model's own numbers of heads, neurons and experts"
        )
    return Change("narrow", VERSION, request, places)


def _units(model: Decoder, request: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Yields (place, (kind of unit, number of units, number to keep)) for each attention and MLP to shrink.

    The place is the linear layer whose inputs are the units, such as `attn.out` or `mlp.down`. Raises ValueError
    for layers that are not dense, and for numbers out of range.
    """
    heads, neurons, experts = (request[key] for key in ("heads", "neurons", "experts"))
    for place in tree.places(model):
        name, module = place.name, tree.innermost(place.module)
        if isinstance(module, Attention) and heads is not None:
            if reason := _why_heads_stay(module):
                raise ValueError(
                    f"{name}: heads cannot be removed from {reason}; remove neurons or blocks instead"
                )
            groups = _sides(f"{name}.k", module.k)[0] // module.head_dim
            size = _sides(f"{name}.q", module.q)[0] // module.head_dim // groups
            if heads % size or not 0 < heads // size <= groups:
                raise ValueError(f"{name}: heads is {heads}; expected a multiple of {size} up to {groups * size}")
            yield f"{name}.out", ("groups", groups, heads // size)
        elif isinstance(module, MLP | GatedMLP) and (neurons is not None or experts is not None):
            hidden = _sides(f"{name}.down", module.down)[1]
            count = hidden if neurons is None else neurons
            if not 0 < count <= hidden:
                raise ValueError(f"{name}: neurons is {count}; expected 1 to {hidden}")
            yield f"{name}.down", ("neurons", hidden, count)


def _why_heads_stay(attn: Attention) -> str:
    """A noun phrase that says why this attention's heads cannot be removed; "" if they can be removed."""
    if type(attn) is not Attention:
        return f"a {type(attn).__name__}"
    if attn.sinks is not None or hasattr(attn.position, "bias"):
        return "an attention with sinks or a bias for each head"
    norms = [n for n in (attn.q_norm, attn.k_norm) if n is not None]
    joint = any(p.shape != (attn.head_dim,) for n in norms for p in n.parameters())
    return "an attention whose norms are over all heads" if joint else ""


def _sides(name: str, linear: Any) -> tuple[int, int]:
    if not tree.is_dense(linear):
        raise not_plain(name, linear)
    return linear.out_features, linear.in_features


def importances(model: nn.Module, ids: Tensor, units: Mapping[str, int]) -> dict[str, Tensor]:
    """The importances (U,) float32 of units, keyed by the name of the linear layer whose inputs are these units.

    The importance of a unit is the sum over tokens of |outputs of the unit · gradient of the loss|, a first-order
    estimate of how much the loss would change without the unit. `units` maps a layer's name to its number of
    units; `ids` are (S, T) int64.
    """
    sums = {name: torch.zeros(count) for name, count in units.items()}
    layers = modules_at(model, units)
    with tree.mode(model, False), torch.enable_grad(), one_by_one():
        for part in each(torch.split(ids, ROWS)) if units else ():
            for name, product in input_gradients(model, part, layers).items():
                by_unit = product.view(-1, units[name], product.shape[-1] // units[name])
                sums[name] += by_unit.sum(-1).abs().sum(0).cpu()
    return sums


@torch.no_grad()
def block_influence(model: Decoder, ids: Tensor) -> Tensor:
    """The importance (blocks,) of each block: 1 minus the mean cosine similarity of its input and output."""
    sums = torch.zeros(len(model.blocks))
    with tree.mode(model, False):
        for part in torch.split(ids.to(next(model.parameters()).device), ROWS):
            ctx = ForwardContext.of(part)
            x = model.embed(part, ctx)
            for layer, block in enumerate(model.blocks):
                y = block(x, ctx, layer)
                sums[layer] += (1 - F.cosine_similarity(x.float(), y.float(), -1)).sum().cpu()
                x = y
    return sums / ids.numel()


def _kept_units(
    units: Mapping[str, tuple[str, int, int]], scores: Mapping[str, Tensor], uneven: bool
) -> dict[str, dict[str, Any]]:
    """The indices of the units that each place keeps: the most important units of each layer.

    With `uneven`, the units of all layers are ranked together, and each layer keeps at least one unit.
    """
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
    """The indices of the experts that each mixture keeps: those with the largest sums of neuron importances."""
    mixtures = {p.name: p.module for p in tree.places(model) if isinstance(p.module, MoE)}
    if not mixtures:
        raise ValueError("experts: this model has no mixture of experts")
    places: dict[str, dict[str, Any]] = {}
    for name, moe in mixtures.items():
        if not moe.top_k <= experts <= len(moe.experts) or not tree.is_dense(moe.router):
            raise ValueError(
                f"{name}: experts is {experts}; expected {moe.top_k}, the experts per token, to "
                f"{len(moe.experts)}, and a linear router"
            )
        if moe.groups > 1:
            raise ValueError(f"{name}: experts routed in groups cannot be removed; remove neurons or blocks")
        downs = [f"{name}.experts.{e}.down" for e in range(len(moe.experts))]
        if missing := [e for e, down in zip(moe.experts, downs, strict=True) if down not in scores]:
            raise ValueError(
                f"{name}: its experts are {type(missing[0]).__name__}; expected MLP or GatedMLP, whose neurons "
                "can be ranked"
            )
        sums = torch.stack([scores[down].sum() for down in downs])
        if experts < len(downs):
            places[name] = {"experts": sums.topk(experts).indices.sort().values.tolist(), "of": len(downs)}
    return places


def describe(change: Change) -> str:
    """One sentence that tells users how many heads, neurons, experts and blocks are kept."""
    counts = {key: value for key, value in change.request.items() if value not in (None, False, True)}
    spread = ", spread over the layers by importance" if change.request["uneven"] else " of each layer"
    listed = ", ".join(f"{n} {key}" for key, n in counts.items() if key != "blocks")
    blocks = change.places.get("blocks", {}).get("blocks")
    parts = [*([f"{listed}{spread}"] if listed else []), *([f"{plural(len(blocks), 'block')}"] if blocks else [])]
    return f"keeps {' and '.join(parts)}"


def shape(model: nn.Module, change: Change) -> None:
    """Shrink the modules to the kept units."""
    modules = {p.name: tree.innermost(p.module) for p in tree.places(model)}
    for name, units in change.places.items():
        module: Any = modules[name]
        if "blocks" in units:
            tree.remove(model, {f"blocks.{i}" for i in range(units["of"]) if i not in units["blocks"]})
        else:
            _resize(module, units)


def _resize(module: Any, units: Mapping[str, Any]) -> None:
    """Replace the linear layers of a module by smaller ones; a mixture also loses experts."""
    (unit,) = units.keys() - {"of"}
    if unit == "experts":
        module.experts = nn.ModuleList([module.experts[e] for e in units[unit]])
        for name, buffer in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, buffer.new_empty(len(units[unit])))
    for name, dim in LAYERS[unit].items():
        if (linear := getattr(module, name, None)) is not None:
            sizes = [*linear.weight.shape]
            sizes[dim] = sizes[dim] // units["of"] * len(units[unit])
            setattr(module, name, _sized(linear, *sizes))


def _sized(linear: Any, rows: int, columns: int) -> nn.Linear:
    """An uninitialised linear layer whose weight has this many rows and columns; all else is as in `linear`."""

    def empty(*shape: int) -> nn.Parameter:
        return nn.Parameter(linear.weight.new_empty(shape), linear.weight.requires_grad)

    cls = MaskedLinear if isinstance(linear, MaskedLinear) else nn.Linear
    return linear_of(empty(rows, columns), None if linear.bias is None else empty(rows), linear.training, cls)


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of the kept units from the original model's `weights`."""
    for name, tensor in model.state_dict().items():
        before = _name_before(name, change.places)
        selected = _selected(weights[before], before, change.places)
        if selected.data_ptr() != tensor.data_ptr():
            tensor.copy_(selected)


def _name_before(name: str, places: Mapping[str, Any]) -> str:
    """The name of a tensor in the original model, where blocks and experts had other indices."""
    segments = name.split(".")
    if segments[0] == "blocks" and "blocks" in places:
        segments[1] = str(places["blocks"]["blocks"][int(segments[1])])
    if "experts" in segments:
        i = segments.index("experts")
        if (units := places.get(".".join(segments[:i]))) is not None and "experts" in units:
            segments[i + 1] = str(units["experts"][int(segments[i + 1])])
    return ".".join(segments)


def _selected(tensor: Tensor, name: str, places: Mapping[str, Any]) -> Tensor:
    """The part of an original tensor that belongs to the kept units; `name` is the tensor's original name."""
    place = name.rpartition(".")[0]
    parent, _, layer = place.rpartition(".")
    if "experts" in places.get(place, {}):  # a buffer with an entry for each expert
        return tensor[places[place]["experts"]]
    units = places.get(parent, {})
    for unit, layers in LAYERS.items():
        if unit in units and (dim := layers.get(layer, tensor.dim())) < tensor.dim():
            chosen = torch.tensor(units[unit], device=tensor.device)
            return torch.unflatten(tensor, dim, (units["of"], -1)).index_select(dim, chosen).flatten(dim, dim + 1)
    return tensor
