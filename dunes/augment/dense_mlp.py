"""The dense MLPs of a model, from which experts are made: selection, neurons, and the check of equality."""

# Shapes: N tokens, D width, H hidden neurons.

from collections.abc import Mapping, Set
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import how_to_make_dense
from dunes.models.mixture import MAX_EXPERTS, mixture
from dunes.parts import MLP, GatedMLP, MoE
from dunes.progress import each

ROUTER_STD = 0.02
"""The standard deviation of new routers, as for the matrices of a new model."""
TOLERANCE, TOKENS = 1e-5, 64
FILLED = 0.7
"""The share of a change that is done when the experts are filled, and not yet compared."""


def find_mlps(model: nn.Module, where: tree.Where) -> dict[str, Any]:
    """The dense MLPs that `where` selects, by place. Raises ValueError, with the place, for any other."""
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
    """Raise ValueError unless each token can choose from 2 to all of the experts."""
    if not 2 <= experts <= MAX_EXPERTS:
        raise ValueError(f"experts to choose from: {experts}; expected 2 to {MAX_EXPERTS}")
    if not 2 <= top_k <= experts:
        raise ValueError(
            f"top_k is {top_k}; expected 2 to {experts}, the number of experts that a token can choose from: "
            "the weight of a single expert is always 1, from which a router learns nothing"
        )


def require_division(place: str, hidden: int, pieces: int, name: str) -> int:
    """The width of each piece. Raises ValueError, naming the nearest numbers of pieces, unless they are equal."""
    if hidden % pieces == 0:
        return hidden // pieces
    fitting = [n for n in range(2, hidden + 1) if hidden % n == 0]
    nearest = sorted(sorted(fitting, key=lambda n: abs(n - pieces))[:3])
    raise ValueError(
        f"{place}: {name} is {pieces}, which does not divide its {hidden} hidden neurons; "
        f"{' or '.join(map(str, nearest))} would"
    )


def new_mlp(like: Any, hidden: int) -> Any:
    """An MLP of the same class, dtype and device with this many hidden neurons; its weights are uninitialised."""
    with torch.device("meta"):
        mlp = type(like)(like.down.out_features, hidden, like.act, like.down.bias is not None)
    return allocate(mlp, like)


def allocate(module: nn.Module, like: Any) -> nn.Module:
    """The module, built on the meta device, with uninitialised weights of the dtype and device of this MLP."""
    weight = like.down.weight
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):  # `to_empty` fails for fake tensors
            setattr(part, name, nn.Parameter(torch.empty(p.shape, dtype=weight.dtype, device=weight.device)))
    return module.train(like.training)


def new_mixture(
    like: Any, widths: list[int], top_k: int, balance: float, shared: int = 0, gate: Any = None
) -> MoE:
    """A mixture of experts of these widths, of which the first `shared` ones get every token.

    Its router is linear, or a `gate`, which balances by itself. The weights are uninitialised.
    """
    dim, experts = like.down.out_features, [new_mlp(like, width) for width in widths]
    with torch.device("meta"):
        moe = mixture(dim, experts[shared:], top_k, balance=0.0 if gate else balance, shared=experts[:shared])
        router = moe.router if gate is None else gate(dim, len(moe.experts), top_k, balance)
    moe.router = allocate(router, like)
    return moe.train(like.training)


def dense_mlps(model: nn.Module, places: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The MLPs that the mixtures at these places had been, from the state dict before; nothing is copied."""
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
    """The modules at these places."""
    return {p.name: p.module for p in tree.places(model) if p.name in places}


@torch.no_grad()
def copy_neurons(expert: Any, mlp: Any, neurons: Any, scale: float = 1.0) -> None:
    """Copy hidden neurons of a dense MLP, a slice or indices, into an expert; what they add is scaled."""
    weights = dict(mlp.named_parameters())
    for name, parameter in expert.named_parameters():
        if name == "down.weight":
            parameter.copy_(weights[name][:, neurons] * scale)
        else:
            parameter.copy_(weights[name] if name == "down.bias" else weights[name][neurons])


@torch.no_grad()
def require_equality(model: nn.Module, mlps: Mapping[str, Any], forward: Any = lambda moe, x: moe(x)) -> None:
    """Compare each mixture on random tokens, in float32, with the dense MLP that it replaced.

    If the outputs differ, these MLPs are put back and ValueError is raised. Scaled weights of a narrower dtype may
    have been rounded.
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
