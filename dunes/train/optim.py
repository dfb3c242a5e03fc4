"""Functions that build a `torch.optim.Optimizer` for a model, with the model's parameter groups.

AdamW and Muon apply weight decay to matrices, not to vectors (norms, biases). Frozen parameters are in no group.
The functions raise ValueError if no parameter is trainable, and for a learning rate, momentum or weight decay that
is negative or not finite.

A rule is a function of tensors that computes an update, so that a compiled step can contain it. A rule's arguments
are a parameter, the gradient, the state, and the parameter group, whose "lr" may be a tensor. The rule returns the
new parameter and the new state, and modifies nothing in place. `RuleOptimizer` turns a rule into an optimizer.

Sources: https://proceedings.mlr.press/v28/sutskever13.html (momentum), https://arxiv.org/abs/1412.6980 (Adam),
https://arxiv.org/abs/1711.05101 (AdamW), https://www.cs.toronto.edu/~hinton/coursera/lecture6/lec6.pdf (RMSprop)
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dunes import measure, tree
from dunes.measure import ranks

Group = dict[str, Any]
State = dict[str, Tensor]
Settings = Mapping[str, Any]
Rule = Callable[[Tensor, Tensor, State, Settings], tuple[Tensor, State]]

STACKED = 1 << 26
"""Muon gathers matrices from all ranks, and updates them in batches of at most this many elements. A batch has at
least one matrix per rank, even if this exceeds the maximum."""


def adamw(
    model: nn.Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), decay: float = 0.1
) -> Optimizer:
    """AdamW. https://arxiv.org/abs/1711.05101"""
    _check("adamw", lr=lr, decay=decay)
    return torch.optim.AdamW(_decayed(_trainable(model).values(), decay), lr, betas, fused=_fusable(model))


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0, decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent with momentum; weight decay applies to all parameters."""
    _check("sgd", lr=lr, momentum=momentum, decay=decay)
    return torch.optim.SGD(_trainable(model).values(), lr, momentum, weight_decay=decay, fused=_fusable(model))


def rmsprop(model: nn.Module, lr: float = 1e-3, smoothing: float = 0.99, momentum: float = 0.0) -> Optimizer:
    """RMSprop: divides the gradient by the root of a running mean of its square."""
    _check("rmsprop", lr=lr, momentum=momentum)
    return torch.optim.RMSprop(_trainable(model).values(), lr, smoothing, momentum=momentum)


def muon(
    model: nn.Module,
    lr: float = 0.02,
    adam_lr: float = 0.01,
    momentum: float = 0.9,
    decay: float = 0.01,
    adam_decay: float = 0.0,
    where: tree.Where | None = None,
    products: torch.dtype | None = None,
) -> Optimizer:
    """Muon for the hidden matrices, AdamW for all other parameters. https://arxiv.org/abs/2502.16982

    Hidden matrices are the matrices in blocks. A block is a module with children that is in a ModuleList, or in a
    Sequential together with other modules of its class. If the model has no blocks, all matrices except output
    heads are hidden. An output head is a linear layer whose output width is not the input width of any other
    linear layer. If there is no such layer, the last linear layer is the head. Embeddings, and heads tied to them,
    are never hidden. The split does not depend on names, so a wrapped or compiled model is split in the same way.
    `muon_split` shows the split.

    Instead, `where` can select the hidden matrices by globs over parameter names (`["**layers.**",
    "!**.router.*"]`). `products` is the dtype of Muon's matrix products, as in `Muon`. Raises ValueError for an
    invalid learning rate, momentum or decay, and if `where` selects no matrix.
    """
    _check("muon", lr=lr, adam_lr=adam_lr, momentum=momentum, decay=decay, adam_decay=adam_decay)
    matrices = _hidden_matrices(model, where)
    hidden, rest = ([p for p in _trainable(model).values() if (p in matrices) == side] for side in (True, False))
    optimizers: list[Optimizer] = [Muon(hidden, lr, decay, momentum, products)] if hidden else []
    if rest:
        groups = _decayed(rest, adam_decay) if adam_decay else [{"params": rest}]
        optimizers.append(torch.optim.AdamW(groups, adam_lr, (0.9, 0.95), weight_decay=0.0, fused=_fusable(model)))
    return CombinedOptimizer(optimizers) if len(optimizers) > 1 else optimizers[0]


def muon_flops(model: nn.Module) -> float:
    """FLOPs per step of Muon's five Newton-Schulz iterations on all trainable matrices of linear layers."""
    trained = [p for m in tree.linears(model) for p in m.parameters() if p.requires_grad and p.dim() == 2]
    sorted_sides = (sorted(p.shape) for p in trained)
    return sum(5.0 * (4 * short * short * long + 2 * short**3) for short, long in sorted_sides)


def muon_split(model: nn.Module, where: tree.Where | None = None) -> dict[str, list[str]]:
    """Names of the parameters that `muon` trains with Muon (key "muon") and with AdamW (key "adamw")."""
    matrices, named = _hidden_matrices(model, where), _trainable(model)
    return {
        "muon": [name for name, p in named.items() if p in matrices],
        "adamw": [name for name, p in named.items() if p not in matrices],
    }


def _hidden_matrices(model: nn.Module, where: tree.Where | None) -> set[Tensor]:
    """The matrices that Muon trains. Raises ValueError if `where` selects no matrix."""
    matrices = {name: p for name, p in _trainable(model).items() if p.dim() == 2}
    if where is not None:
        selected = {p for name, p in matrices.items() if tree.matches(where, name)}
        if not selected:
            names = ", ".join(matrices) or "none"
            raise ValueError(f"{where!r} selects no trainable matrix; the matrices are: {names[:300]}")
        return selected
    tables: set[Tensor] = {p for m in model.modules() if hasattr(m, "embedding_dim") for p in m.parameters()}
    in_blocks: set[Tensor] = {p for block in _blocks(model) for p in block.parameters() if p.dim() == 2}
    heads: set[Tensor] = {p for head in _heads(model) for p in head.parameters()}
    return in_blocks - tables or set(matrices.values()) - tables - heads


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks: modules with children, in a ModuleList or in a Sequential with several such modules of the same
    class."""
    blocks = []
    for container in model.modules():
        parents = [m for m in container.children() if any(True for _ in m.children())]
        classes = Counter(type(m) for m in parents if type(m) is not nn.Sequential)
        if isinstance(container, nn.ModuleList):
            blocks += parents
        elif isinstance(container, nn.Sequential):
            blocks += [m for m in parents if classes[type(m)] > 1]
    return blocks


def _heads(model: nn.Module) -> list[nn.Module]:
    """The output heads: linear layers whose output width is not the input width of any other linear layer.

    If there is no such layer, the last linear layer is the head.
    """
    linears = list(tree.linears(model))
    widths = Counter(m.in_features for m in linears)
    unread = [m for m in linears if widths[m.out_features] == (m.in_features == m.out_features)]
    return unread or linears[-1:]


def scale_rates(optimizer: Optimizer, factors: Mapping[Tensor, float]) -> None:
    """Multiply the learning rate of each parameter in `factors` by its factor; parameter groups are split.

    Raises ValueError for a factor that is negative or not finite.
    """
    for factor in factors.values():
        _check("scale_rates", factor=factor)
    for each in getattr(optimizer, "optimizers", [optimizer]):
        each.param_groups[:] = [part for group in each.param_groups for part in _by_factor(group, factors)]


def _by_factor(group: Group, factors: Mapping[Tensor, float]) -> list[Group]:
    params: dict[float, list[Tensor]] = {}
    for p in group["params"]:
        params.setdefault(factors.get(p, 1.0), []).append(p)
    return [group | {"params": members, "lr": group["lr"] * factor} for factor, members in params.items()]


class Muon(Optimizer):
    """Like `torch.optim.Muon`, but orthogonalises matrices of equal shape together.
    https://arxiv.org/abs/2502.16982

    Tall matrices are transposed and batched with wide ones. The update equals PyTorch's up to bfloat16 rounding.
    For small matrices, the update takes a third of PyTorch's time. `products` is the dtype of Muon's matrix
    products. None selects bfloat16 if the device multiplies bfloat16 fast, else float32. (A CPU with AVX2 but no
    bfloat16 instructions reaches 0.9 GFLOP/s in bfloat16 and 54 in float32.)
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float,
        decay: float,
        momentum: float,
        products: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": decay, "momentum": momentum})
        self.products = products

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(tuple(sorted(p.shape)), []).append(p)
            for params in by_shape.values():
                most = max(ranks.count(), STACKED // params[0].numel())
                for i in range(0, len(params), most):
                    self._update(params[i : i + most], group)

    def _update(self, params: list[Tensor], group: Group) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        averages = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        ahead = map(ranks.full_tensor, torch._foreach_lerp(grads, averages, group["momentum"]))
        wide = torch.stack([a if a.shape[0] <= a.shape[1] else a.T for a in ahead])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        products = self.products or measure.choose_dtype(wide.device)
        for p, update in zip(params, _shared(wide, products), strict=True):
            update = ranks.shard_like(update if p.shape[0] <= p.shape[1] else update.T, p)
            p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def _shared(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalise wide matrices (N, rows, columns); the N matrices are divided among the ranks."""
    own = orthogonalise(wide[ranks.rank() :: ranks.count()], dtype=dtype)
    return ranks.gather_rows(own, len(wide))


def orthogonalise(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Orthogonalise wide matrices (N, rows, columns), so that all singular values are near 1.

    Uses a Newton-Schulz iteration in `dtype` with the coefficients of https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrices.to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class CombinedOptimizer(Optimizer):
    """Several optimizers used as one, with concatenated parameter groups and separate states."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: list[Optimizer] = []
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})
        self.optimizers = [*optimizers]

    @property
    def param_groups(self) -> list[Group]:
        """The current parameter groups of all the optimizers."""
        return [g for o in self.optimizers for g in o.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        assert not groups, "the groups belong to the optimizers; Optimizer.__init__ sets an empty list"

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the last optimizer; the last optimizer of `muon` is AdamW."""
        super().add_param_group(param_group)  # raises if a parameter is already in a group
        for last in self.optimizers[-1:]:
            last.add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): o.state_dict() for i, o in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(i)])


def _check(optimizer: str, **rates: float) -> None:
    """Raise ValueError for settings that are negative or not finite, and for a momentum of 1 or more."""
    for name, rate in rates.items():
        if not 0 <= rate < (1 if name == "momentum" else math.inf):
            most = " to below 1" * (name == "momentum")
            raise ValueError(f"{optimizer}: {name} is {rate}; expected a number from 0{most}")


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("nothing to train: no parameter of the model requires a gradient")
    return named


def _decayed(params: Collection[Tensor], decay: float) -> list[Group]:
    """Two parameter groups: matrices with weight decay, and vectors without."""
    matrices, vectors = ([p for p in params if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups: list[Group] = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _fusable(model: nn.Module) -> bool:
    return all(p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for p in model.parameters())


class RuleOptimizer(Optimizer):
    """Base class of custom optimizers. A subclass defines `update`, the rule, and `start`, the initial state.

    `update` returns new tensors and modifies nothing in place, so the same code works in the plain loop and in a
    compiled step.
    """

    def __init__(self, params: ParamsT, lr: float, **defaults: float) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    def start(self, p: Tensor) -> State:
        """The initial state of a parameter: named tensors, here none."""
        return {}

    def update(self, p: Tensor, grad: Tensor, state: State, group: Settings) -> tuple[Tensor, State]:
        """The new value and state of a parameter, from its gradient and its group's settings."""
        raise NotImplementedError(f"{type(self).__name__} needs a method update(p, grad, state, group)")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. Closures are not supported."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] or self.start(p)
                    value, self.state[p] = self.update(p, p.grad, state, group)
                    p.copy_(value)


def sgd_rule(p: Tensor, grad: Tensor, state: State, group: Settings) -> tuple[Tensor, State]:
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    if not group["momentum"]:
        return p - group["lr"] * grad, state
    average = group["momentum"] * state["momentum_buffer"] + (1 - group["dampening"]) * grad
    grad = grad + group["momentum"] * average if group["nesterov"] else average
    return p - group["lr"] * grad, {"momentum_buffer": average}


def rmsprop_rule(p: Tensor, grad: Tensor, state: State, group: Settings) -> tuple[Tensor, State]:
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    square = group["alpha"] * state["square_avg"] + (1 - group["alpha"]) * grad * grad
    update, new = grad / (square.sqrt() + group["eps"]), {"step": state["step"] + 1, "square_avg": square}
    if group["momentum"]:
        update = new["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + update
    return p - group["lr"] * update, new


def adam_rule(p: Tensor, grad: Tensor, state: State, group: Settings) -> tuple[Tensor, State]:
    """Adam; AdamW if the group's `decoupled_weight_decay` is true."""
    first, second = group["betas"]
    if group["decoupled_weight_decay"]:
        p = p * (1 - group["lr"] * group["weight_decay"])
    elif group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    step = state["step"] + 1
    mean = first * state["exp_avg"] + (1 - first) * grad
    square = second * state["exp_avg_sq"] + (1 - second) * grad * grad
    spread = square.sqrt() / (1 - second**step).sqrt() + group["eps"]
    p = p - group["lr"] / (1 - first**step) * mean / spread
    return p, {"step": step, "exp_avg": mean, "exp_avg_sq": square}


_OF_TORCH: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: sgd_rule,
    torch.optim.RMSprop: rmsprop_rule,
    torch.optim.Adam: adam_rule,
    torch.optim.AdamW: adam_rule,
}
_UNKNOWN = ("maximize", "amsgrad", "centered", "differentiable")
"""Settings of PyTorch's optimizers that these rules do not implement."""


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule of a `RuleOptimizer`, or of PyTorch's SGD, RMSprop, Adam or AdamW; None for other optimizers."""
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.update
    if any(group.get(name) for group in optimizer.param_groups for name in _UNKNOWN):
        return None
    return _OF_TORCH.get(type(optimizer))


class NamedOptimizer(NamedTuple):
    """An optimizer that `dunes train --optimizer` accepts by name."""

    build: Callable[[nn.Module, float, float | None, torch.dtype], Optimizer]
    """Function of (model, learning rate, weight decay (None: the default), dtype of matrix products)."""
    lr: tuple[float, float] | float = 1.0
    """Default learning rates of a new model and of continued training; a single number is a factor of `adamw_rate`
    instead."""
    flops: Callable[[nn.Module], float] = lambda model: 0.0
    """FLOPs per step of the optimizer's matrix products."""


OPTIMIZERS = {
    # Continued training gets a third of the rate for a new model (docs/log/training.md, "Training on").
    "muon": NamedOptimizer(
        lambda model, lr, decay, products: muon(
            model, lr, lr / 2, decay=0.01 if decay is None else decay, adam_decay=decay or 0.0, products=products
        ),
        (0.02, 0.006),
        muon_flops,
    ),
    "adamw": NamedOptimizer(lambda model, lr, decay, _: adamw(model, lr, decay=decay or 0.0)),
}
"""The optimizers of `dunes train` by name; the first is the default."""


def named_optimizer(name: str | None) -> NamedOptimizer:
    """The optimizer with this name; the default if `name` is None. Raises ValueError for an unknown name."""
    if name is not None and name not in OPTIMIZERS:
        raise ValueError(f"--optimizer is {name!r:.60}; it must be one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name or next(iter(OPTIMIZERS))]
