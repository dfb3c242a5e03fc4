"""Sparse upcycling: replace each dense MLP by a mixture of its copies; outputs stay equal until the model is
trained.

Papers: sparse upcycling https://arxiv.org/abs/2212.05055, fine-grained experts with virtual groups
https://arxiv.org/abs/2410.07524, Drop-Upcycling https://arxiv.org/abs/2502.19261. Unlike in the second paper, only
the down projections are scaled, since a gated MLP is not homogeneous in its other matrices.

This module is registered in the table `CHANGES` in `changes.py`. `experts.py` also uses the functions below that
select MLPs, build mixtures and compare outputs.
"""

# Shapes: E experts, G the granularity, D width, N tokens, H hidden neurons.

from collections.abc import Mapping, Set
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import not_plain
from dunes.augment.change import Change, generator, modules_at, put_modules
from dunes.augment.options import Upcycle
from dunes.models.mixtral import mixture
from dunes.parts import MLP, GatedMLP, MoE
from dunes.progress import each

VERSION = 1
ROUTER_STD = 0.02
"""Standard deviation of the weights of new routers."""
TOLERANCE, TOKENS = 1e-5, 64
FILLED = 0.7
"""Progress, from 0 to 1, after filling the experts and before comparing their outputs."""


def decide(model: nn.Module, options: Upcycle) -> Change:
    """The record of the change: every setting, and the width of the experts at each place.

    Each MLP is cut into `granularity` pieces, and each piece is copied into `experts` / `granularity` experts. The
    pieces of one copy have equal router rows, so that tokens are routed to complete copies. The model's outputs
    change only with `drop`, which reinitialises neurons. Raises ValueError for invalid options.
    """
    request, granularity, drop = options.request(), options.granularity, options.drop
    require_experts(options.experts, options.top_k)
    if granularity < 1 or options.experts % granularity or options.top_k % granularity:
        raise ValueError(
            f"experts is {options.experts}, top_k {options.top_k}; expected multiples of granularity "
            f"({granularity}), since a token needs every piece of an MLP"
        )
    if not 0 <= drop < 1:
        raise ValueError(f"drop is {drop}; expected a fraction from 0 to below 1")
    places = {
        place: {"width": require_division(place, mlp.down.in_features, granularity, "granularity")}
        for place, mlp in find_mlps(model, request["where"]).items()
    }
    return Change("upcycle", VERSION, request, places, tuple(f"{place}.router.*" for place in places))


def describe(change: Change) -> str:
    """One sentence that tells users the number of experts, and how experts are made."""
    experts, top_k, pieces, drop = (change.request[k] for k in ("experts", "top_k", "granularity", "drop"))
    kind = "copies of the MLP" if pieces == 1 else f"{experts // pieces} copies of each {pieces}th of the MLP"
    anew = f", with {drop:.0%} of neurons reinitialized" if drop else ""
    return f"{experts} experts in each layer, {top_k} for each token: {kind}{anew}"


def shape(model: nn.Module, change: Change) -> None:
    """Replace the MLPs by mixtures. Raises ValueError, before any change, if the record does not fit the model."""
    request, mlps = change.request, find_mlps(model, {*change.places})
    widths = {place: [change.places[place]["width"]] * request["experts"] for place in mlps}
    settings = request["top_k"], request["balance"]
    put_modules(model, {place: new_mixture(mlps[place], widths[place], *settings) for place in mlps})


@torch.no_grad()
def fill(model: nn.Module, change: Change, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights into the experts and initialise the routers; then, with `drop`, reinitialise neurons.

    Before `drop`, the mixtures are compared with the MLPs. If their outputs differ, the MLPs are restored and
    ValueError is raised.
    """
    mlps, request = dense_mlps(model, change.places, weights), change.request
    pieces, seed = request["granularity"], request["seed"]
    for place, moe in each(modules_at(model, mlps).items(), end=FILLED):
        width = moe.experts[0].down.in_features
        for e, expert in enumerate(moe.experts):
            first = e % pieces * width
            copy_neurons(expert, mlps[place], slice(first, first + width), pieces)
        draw = generator(seed, "upcycle", place)
        rows = torch.randn(len(moe.experts) // pieces, moe.router.in_features, generator=draw)
        moe.router.weight.copy_(ROUTER_STD * rows.repeat_interleave(pieces, 0))
    require_equality(model, mlps)
    for place, moe in modules_at(model, mlps).items() if request["drop"] else ():
        for e, expert in enumerate(moe.experts):
            redraw_neurons(expert, request["drop"], generator(seed, "upcycle", place, e))


def redraw_neurons(expert: Any, share: float, draw: torch.Generator) -> None:
    """Reinitialise a fraction `share` of an expert's neurons.

    The new weights are drawn from a normal distribution with the old weights' mean and standard deviation.
    """
    hidden = expert.down.in_features
    neurons = torch.randperm(hidden, generator=draw)[: round(share * hidden)]
    for name, layer in expert.named_children():
        rows = layer.weight.T if name == "down" else layer.weight
        old = rows[neurons].float()
        if old.numel() > 1:
            new = torch.randn(old.shape, generator=draw).to(old.device) * old.std() + old.mean()
            rows[neurons] = new.to(rows.dtype)


def find_mlps(model: nn.Module, where: tree.Where) -> dict[str, Any]:
    """The dense MLPs that `where` selects, by name. Raises ValueError for a module that is no dense MLP."""
    is_mlp = lambda module: type(tree.innermost(module)) in (MLP, GatedMLP, MoE)
    selected = {p.name: p.module for p in tree.find(model, where, is_mlp)}
    if isinstance(where, Set) and (missing := sorted(where - selected.keys())):
        raise ValueError(f"{missing[0]}: this model has no such MLP; was the change made to another model?")
    for place, module in selected.items():
        if isinstance(tree.innermost(module), MoE):
            raise ValueError(f"{place}: already a mixture of experts; make the change to the dense model")
        for name, layer in {"": module, **dict(module.named_children())}.items():
            if type(layer) not in (MLP, GatedMLP) and not tree.is_dense(layer):
                raise not_plain(f"{place}{'.' * bool(name)}{name}", layer)
    return selected


def require_experts(experts: int, top_k: int) -> None:
    """Raise ValueError unless 2 <= `top_k` <= `experts`, since a router learns nothing from a single expert."""
    if not 2 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; expected 2 to {experts}, the number of experts to choose from")


def require_division(place: str, hidden: int, pieces: int, name: str) -> int:
    """The number of hidden neurons in each piece. Raises ValueError if `pieces` does not divide `hidden`."""
    if hidden % pieces:
        raise ValueError(f"{place}: {name} is {pieces}, which does not divide its {hidden} hidden neurons")
    return hidden // pieces


def new_mlp(like: Any, hidden: int) -> Any:
    """An uninitialised MLP with `hidden` neurons, of the same class, dtype and device as `like`."""
    with torch.device("meta"):
        mlp = type(like)(like.down.out_features, hidden, like.act, like.down.bias is not None)
    return allocate(mlp, like)


def allocate(module: nn.Module, like: Any) -> nn.Module:
    """Allocate uninitialised weights for a module on the meta device; dtype and device are as in `like`."""
    weight = like.down.weight
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):  # `to_empty` fails for fake tensors
            setattr(part, name, nn.Parameter(torch.empty(p.shape, dtype=weight.dtype, device=weight.device)))
    return module.train(like.training)


def new_mixture(
    like: Any, widths: list[int], top_k: int, balance: float, shared: int = 0, gate: Any = None
) -> MoE:
    """An uninitialised mixture with experts of these widths; the first `shared` experts get every token.

    The router is linear, or of the class `gate` if given. A `gate` computes its own load-balancing loss.
    """
    dim, experts = like.down.out_features, [new_mlp(like, width) for width in widths]
    with torch.device("meta"):
        moe = mixture(dim, experts[shared:], top_k, balance=0.0 if gate else balance, shared=experts[:shared])
        router = moe.router if gate is None else gate(dim, len(moe.experts), top_k, balance)
    moe.router = allocate(router, like)
    return moe.train(like.training)


def dense_mlps(model: nn.Module, places: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The MLPs that the mixtures at `places` replaced, by name; their tensors come from `weights`."""
    paths, mlps = {id(module): f"{path}." for path, module in model.named_modules()}, {}
    for place, moe in modules_at(model, places).items():
        prefix = paths[id(moe)]
        state = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        mlps[place] = new_mlp(moe.experts[0], len(state["up.weight"]))
        mlps[place].load_state_dict(state, assign=True)
    return mlps


@torch.no_grad()
def copy_neurons(expert: Any, mlp: Any, neurons: Any, scale: float = 1.0) -> None:
    """Copy neurons (a slice or indices) of a dense MLP into an expert; `scale` multiplies their output weights."""
    weights = dict(mlp.named_parameters())
    for name, parameter in expert.named_parameters():
        if name == "down.weight":
            parameter.copy_(weights[name][:, neurons] * scale)
        else:
            parameter.copy_(weights[name] if name == "down.bias" else weights[name][neurons])


@torch.no_grad()
def require_equality(model: nn.Module, mlps: Mapping[str, Any], read: Any = lambda place, moe: moe) -> None:
    """Compare the outputs of `read(place, mixture)` and of the MLP that the mixture replaced.

    Mixture and MLP run in float32 on random hidden states. If the outputs differ by more than the rounding of
    scaled weights in the model's dtype, the MLPs are restored and ValueError is raised.
    """
    for place, moe in each(modules_at(model, mlps).items(), FILLED):
        weight = mlps[place].down.weight
        x = torch.randn(TOKENS, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
        expected, actual = deepcopy(mlps[place]).float().eval()(x), read(place, deepcopy(moe).float().eval())(x)
        tolerance = max(TOLERANCE, torch.finfo(weight.dtype).eps) * float(expected.abs().max())
        if not (difference := float((actual - expected).abs().max())) <= tolerance:
            put_modules(model, mlps)
            raise ValueError(
                f"{place}: the experts differ from the dense MLP by {difference:.1e}, more than {tolerance:.1e}; "
                "the model is as before. If weights are not finite, dunes inspect --values lists them"
            )
