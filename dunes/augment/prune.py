"""Unstructured and N:M pruning of linear layers by SparseGPT, Wanda or magnitude; zeros stay zero in training.

SparseGPT https://arxiv.org/abs/2301.00774, Wanda https://arxiv.org/abs/2306.11695. The layers stay dense in memory
and in files. An entry of CHANGES, see `changes.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import sparsegpt
from dunes.augment.adapted import how_to_make_dense, keeps_zeros
from dunes.augment.calibrate import Gram, assign_weight, calibrate_blocks, calibration_tokens, require_text
from dunes.augment.change import Change, Part, part_name
from dunes.augment.masked import mask_linears
from dunes.augment.options import Prune, Pruning
from dunes.augment.sparsegpt import Sparsity, wanda_scores
from dunes.progress import each
from dunes.units import plural

__all__ = ["calibration_tokens"]
VERSION = 1


def decide(model: nn.Module, options: Prune, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting and the places.

    SparseGPT and Wanda need calibration text `ids` (S, T) int64. Raises ValueError for invalid options, for layers
    that are not dense or have weights that are not finite, and for text that is too short.
    """
    request, target = options.request(), Sparsity.of(options.sparsity, options.pattern)
    _require_choice(options.method, ids)
    _require_settings(target, options.block, options.damp)
    linears = _find_linears(model, request["where"])
    for name, linear in linears.items():
        target.require_inputs(name, linear.in_features)
        if not linear.weight.isfinite().all():
            raise ValueError(f"{name}: has weights that are not finite; dunes inspect --values lists them")
    if ids is not None:
        require_text(model, ids, linears)
    return Change("prune", VERSION, request | {"sparsity": target.fraction}, {name: {} for name in linears})


def _require_choice(method: str, ids: Tensor | None) -> None:
    if method not in get_args(Pruning):
        raise ValueError(f"method is {method[:80]!r}; expected {', '.join(get_args(Pruning))}")
    if (ids is None) != (method == "magnitude"):
        needs = "needs calibration text" if ids is None else "takes no calibration text"
        raise ValueError(f"method {method} {needs}")


def _require_settings(sparsity: Sparsity, block: int, damp: float) -> None:
    multiple = 1 if sparsity.pattern is None else sparsity.pattern.group
    if block < 1 or block % multiple:
        raise ValueError(f"block is {block}; expected a multiple of {multiple}")
    if not 0 <= damp < float("inf"):
        raise ValueError(f"damp is {damp:g}; expected a fraction of at least 0")


def _find_linears(model: nn.Module, globs: list[str]) -> dict[str, nn.Linear]:
    """Linear layers to prune, by place. Raises ValueError for a layer that is not dense, and for a tied head."""
    if getattr(model, "head", True) is None and tree.matches(globs, "head"):
        raise ValueError("head: has the embedding's matrix, which is not pruned; exclude it with '!head'")
    linears = {}
    for place in tree.find(model, globs, tree.linear):
        if isinstance(place.module, nn.Linear):
            linears[place.name] = place.module
        elif not any(True for _ in tree.innermost(place.module).children()):
            raise ValueError(
                f"{place.name} is {type(place.module).__name__}; expected a plain linear layer: "
                f"{how_to_make_dense(place.module)}"
            )
    return linears


@torch.no_grad()
def solve(model: nn.Module, change: Change, ids: Tensor | None) -> Iterator[Part]:
    """Prune the layers, block by block; the record of each part gets the counts of weights and of nonzero ones.

    Experts that got fewer calibration tokens than they have inputs are pruned by magnitude, and so recorded.
    """
    linears = {p.name: p.module for p in tree.places(model) if p.name in change.places}
    places: dict[str, dict[str, Any]] = {}
    hessians: dict[int, sparsegpt.Hessian] = {}

    def prune(grams: Mapping[str, Gram | None]) -> None:
        hessians.clear()
        for name, gram in grams.items():
            places[name] = _prune(name, linears.pop(name), gram, change.request, hessians)
        hessians.clear()

    parts = change.parts()
    if change.request["method"] == "magnitude":
        for part in each(parts.values()):
            prune(dict.fromkeys(part.places))
            yield Part(_record_zeros(part, places))
        return
    assert ids is not None
    for _ in calibrate_blocks(model, ids, change.places.keys(), prune):
        yield Part(_record_zeros(parts[part_name(next(reversed(places)))], places))


def _record_zeros(part: Change, places: Mapping[str, Any]) -> Change:
    return replace(part, places={name: places[name] for name in part.places})


def _prune(
    name: str, linear: Any, gram: Gram | None, request: Mapping[str, Any], hessians: dict[int, sparsegpt.Hessian]
) -> dict[str, Any]:
    """Prune one layer in place; returns its entry of the record. `hessians` caches factors by `id` of the Gram."""
    weight: Tensor = linear.weight
    method, sparsity = request["method"], Sparsity.of(request["sparsity"], request["pattern"])
    decided = {}
    if gram is not None and gram.tokens < linear.in_features:
        method, decided = "magnitude", {"method": "magnitude", "tokens": gram.tokens}
    if method == "sparsegpt":
        assert gram is not None
        if id(gram) not in hessians:
            hessians[id(gram)] = sparsegpt.hessian(gram, request["damp"], name)
        h = hessians[id(gram)]
        zeros = weight == 0 if keeps_zeros(linear) else None
        pruned = sparsegpt.refit(sparsegpt.prune(weight, h, sparsity, request["block"], zeros), weight, h)
        decided = {} if h.damp == request["damp"] else {"damp": h.damp}
    else:
        scores = weight.float().abs() if method == "magnitude" or gram is None else wanda_scores(weight, gram)
        pruned = weight.masked_fill(sparsity.choose_all(scores, by_output=method == "wanda"), 0)
    assign_weight(linear, pruned)
    return {"weights": weight.numel(), "nonzero": int(linear.weight.count_nonzero()), **decided}


def describe(change: Change) -> str:
    """One sentence for users: the share of zeros, and the layers pruned by magnitude for want of tokens."""
    few = [name for name, place in change.places.items() if "tokens" in place]
    more = f"; {plural(len(few), 'layer')} by magnitude: fewer tokens than inputs ({few[0]}, ...)" if few else ""
    pattern = "" if change.request["pattern"] is None else f", {change.request['pattern']}"
    return f"{_zeros(change)} ({change.request['method']}{pattern}){more}"


def shape(model: nn.Module, change: Change) -> None:
    """Mask the layers, whose zeros then stay. Raises ValueError, before any change, if the places do not fit."""
    mask_linears(model, change.places)


def _zeros(change: Change) -> str:
    """The share of zero weights after pruning, as text."""
    weights, nonzero = (sum(place[key] for place in change.places.values()) for key in ("weights", "nonzero"))
    return f"{1 - nonzero / weights:.1%} of {weights:,} weights are zero"
