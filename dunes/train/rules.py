"""Update rules of optimizers as functions of tensors, so that a compiled step can contain them.

A rule takes a parameter, its gradient, its state and its group, whose "lr" may be a tensor, and returns the new
parameter and state without changing anything. `RuleOptimizer` makes an optimizer of one rule.

Sources: https://proceedings.mlr.press/v28/sutskever13.html (momentum), https://arxiv.org/abs/1412.6980 (Adam),
https://arxiv.org/abs/1711.05101 (AdamW), https://www.cs.toronto.edu/~hinton/coursera/lecture6/lec6.pdf (RMSprop)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Tensor]
Group = Mapping[str, Any]
Rule = Callable[[Tensor, Tensor, State, Group], tuple[Tensor, State]]


class RuleOptimizer(Optimizer):
    """Base of custom optimizers: a subclass defines `start`, the state of a new parameter, and `update`, the rule.

    `update` returns new tensors and changes none, so the same lines run in the plain loop and in a compiled step.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, **defaults: float) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    def start(self, p: Tensor) -> State:
        return {}

    def update(self, p: Tensor, grad: Tensor, state: State, group: Group) -> tuple[Tensor, State]:
        raise NotImplementedError(f"{type(self).__name__} needs a method update(p, grad, state, group)")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] or self.start(p)
                    value, self.state[p] = self.update(p, p.grad, state, group)
                    p.copy_(value)


def sgd_rule(p: Tensor, grad: Tensor, state: State, group: Group) -> tuple[Tensor, State]:
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    if not group["momentum"]:
        return p - group["lr"] * grad, state
    average = group["momentum"] * state["momentum_buffer"] + (1 - group["dampening"]) * grad
    grad = grad + group["momentum"] * average if group["nesterov"] else average
    return p - group["lr"] * grad, {"momentum_buffer": average}


def rmsprop_rule(p: Tensor, grad: Tensor, state: State, group: Group) -> tuple[Tensor, State]:
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    square = group["alpha"] * state["square_avg"] + (1 - group["alpha"]) * grad * grad
    update, new = grad / (square.sqrt() + group["eps"]), {"step": state["step"] + 1, "square_avg": square}
    if group["momentum"]:
        update = new["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + update
    return p - group["lr"] * update, new


def adam_rule(p: Tensor, grad: Tensor, state: State, group: Group) -> tuple[Tensor, State]:
    """Adam, or AdamW where the group says that its weight decay is decoupled."""
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
"""Settings that these rules do not implement."""


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule of a `RuleOptimizer`, or of PyTorch's SGD, RMSprop, Adam or AdamW; None for others."""
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.update
    if any(group.get(name) for group in optimizer.param_groups for name in _UNKNOWN):
        return None
    return _OF_TORCH.get(type(optimizer))
