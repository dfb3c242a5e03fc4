"""Dense MLPs from which experts are made: selecting them, copying neurons, and checking that outputs are equal."""

# Shapes: N tokens, D width, H hidden neurons.

from collections.abc import Mapping, Set
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense
from dunes.models.mixtral import MAX_EXPERTS, mixture
from dunes.parts import MLP, GatedMLP, MoE
from dunes.progress import each

ROUTER_STD = 0.02
"""Standard deviation of new routers' weights, as in a new model."""
TOLERANCE, TOKENS = 1e-5, 64
FILLED = 0.7
"""Progress, from 0 to 1, after filling the experts and before comparing their outputs."""


def find_mlps(model: nn.Module, where: tree.Where) -> dict[str, Any]:
    """Dense MLPs that `where` selects, by place. Raises ValueError, naming the place, for any other module."""
    selected = {p.name: p.module for p in tree.find(model, where, _is_mlp)}
    if isinstance(where, Set) and (missing := sorted(where - selected.keys())):
        raise ValueError(f"{missing[0]}: this model has no such MLP; was the change made to another model?")
    for place, module in selected.items():
        if isinstance(tree.innermost(module), MoE):
            raise ValueError(f"{place}: already a mixture of experts; make the change to the dense model")
        for name, layer in {"": module, **dict(module.named_children())}.items():
            if type(layer) not in (MLP, GatedMLP) and not tree.is_dense(layer):
                raise ValueError(
                    f"{place}{'.' * bool(name)}{name} is {type(layer).__name__}; expected a plain linear layer: "
                    f"{how_to_make_dense(layer)}"
                )
    return selected


def _is_mlp(module: nn.Module) -> bool:
    return type(tree.innermost(module)) in (MLP, GatedMLP, MoE)


def require_experts(experts: int, top_k: int) -> None:
    """Raise ValueError unless 2 <= `top_k` <= `experts` <= MAX_EXPERTS."""
    if not 2 <= experts <= MAX_EXPERTS:
        raise ValueError(f"experts to choose from: {experts}; expected 2 to {MAX_EXPERTS}")
    if not 2 <= top_k <= experts:
        raise ValueError(
            f"top_k is {top_k}; expected 2 to {experts}, the number of experts that a token can choose from: "
            "the weight of a single expert is always 1, from which a router learns nothing"
        )


def require_division(place: str, hidden: int, pieces: int, name: str) -> int:
    """Hidden neurons of each piece. Raises ValueError, suggesting divisors, unless `pieces` divides `hidden`."""
    if hidden % pieces == 0:
        return hidden // pieces
    fitting = [n for n in range(2, hidden + 1) if hidden % n == 0]
    nearest = sorted(sorted(fitting, key=lambda n: abs(n - pieces))[:3])
    raise ValueError(
        f"{place}: {name} is {pieces}, which does not divide its {hidden} hidden neurons; "
        f"{' or '.join(map(str, nearest))} would"
    )


def new_mlp(like: Any, hidden: int) -> Any:
    """An uninitialised MLP with `hidden` neurons, of the same class, dtype and device."""
    with torch.device("meta"):
        mlp = type(like)(like.down.out_features, hidden, like.act, like.down.bias is not None)
    return allocate(mlp, like)


def allocate(module: nn.Module, like: Any) -> nn.Module:
    """Allocate the weights of a module on the meta device, uninitialised, with the dtype and device of an MLP."""
    weight = like.down.weight
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):  # `to_empty` fails for fake tensors
            setattr(part, name, nn.Parameter(torch.empty(p.shape, dtype=weight.dtype, device=weight.device)))
    return module.train(like.training)


def new_mixture(
    like: Any, widths: list[int], top_k: int, balance: float, shared: int = 0, gate: Any = None
) -> MoE:
    """An uninitialised mixture with experts of these widths, the first `shared` of which get every token.

    The router is linear, or of the class `gate`, which has a balancing loss of its own.
    """
    dim, experts = like.down.out_features, [new_mlp(like, width) for width in widths]
    with torch.device("meta"):
        moe = mixture(dim, experts[shared:], top_k, balance=0.0 if gate else balance, shared=experts[:shared])
        router = moe.router if gate is None else gate(dim, len(moe.experts), top_k, balance)
    moe.router = allocate(router, like)
    return moe.train(like.training)


def dense_mlps(model: nn.Module, places: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Original MLPs of the mixtures at these places, by place; they share tensors with the old state dict."""
    paths, mlps = {id(module): f"{path}." for path, module in model.named_modules()}, {}
    for place, moe in mixtures(model, places).items():
        prefix, like = paths[id(moe)], moe.experts[0]
        state = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        with torch.device("meta"):
            mlp = type(like)(*reversed(state["up.weight"].shape), like.act, like.down.bias is not None)
        mlp.load_state_dict(state, assign=True)
        mlps[place] = mlp.train(moe.training)
    return mlps


def mixtures(model: nn.Module, places: Mapping[str, Any]) -> dict[str, Any]:
    """Modules at these places, by place."""
    return {p.name: p.module for p in tree.places(model) if p.name in places}


@torch.no_grad()
def copy_neurons(expert: Any, mlp: Any, neurons: Any, scale: float = 1.0) -> None:
    """Copy hidden neurons (a slice or indices) of a dense MLP into an expert, scaling their output weights."""
    weights = dict(mlp.named_parameters())
    for name, parameter in expert.named_parameters():
        if name == "down.weight":
            parameter.copy_(weights[name][:, neurons] * scale)
        else:
            parameter.copy_(weights[name] if name == "down.bias" else weights[name][neurons])


@torch.no_grad()
def require_equality(model: nn.Module, mlps: Mapping[str, Any], forward: Any = lambda moe, x: moe(x)) -> None:
    """Compare each mixture with the dense MLP that it replaced, in float32 on random hidden states.

    If the outputs differ by more than the rounding of scaled weights in the model's dtype, the MLPs are restored
    and ValueError is raised.
    """
    for place, moe in each(mixtures(model, mlps).items(), FILLED):
        weight = mlps[place].down.weight
        x = torch.randn(TOKENS, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
        expected, actual = deepcopy(mlps[place]).float().eval()(x), forward(deepcopy(moe).float().eval(), x)
        tolerance = max(TOLERANCE, torch.finfo(weight.dtype).eps) * float(expected.abs().max())
        if not (difference := float((actual - expected).abs().max())) <= tolerance:
            for p in list(tree.find(model, {*mlps})):
                setattr(p.parent, p.key, mlps[p.name])
            raise ValueError(
                f"{place}: the experts differ from the dense MLP by {difference:.1e}, more than {tolerance:.1e}; "
                "the model is as before. Are its weights finite? dunes inspect --values lists them"
            )
