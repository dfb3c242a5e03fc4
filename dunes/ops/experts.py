"""Experts: each token goes to a few of many MLPs, and gets the weighted sum of what they say."""

# Shapes: N tokens, k experts a token, E experts, D width, H an expert's hidden width.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dunes.ops.precision import computing

Act = Callable[[Tensor], Tensor]


class Stacks(NamedTuple):
    """The weights of gated experts as views: gate and up (E, H, D), down (E, D, H)."""

    gate: Tensor
    up: Tensor
    down: Tensor


def plain(x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], chosen: Tensor, weights: Tensor) -> Tensor:
    """Expert by expert: tokens x (N, D), `chosen` experts (N, k) and their `weights` (N, k) -> (N, D) in x's dtype.

    While gradients are on, every expert is called, if need be with no token: all ranks of a sharded
    model must take part in the same exchanges.
    """
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)
        if len(token) or torch.is_grad_enabled():
            said = expert(x[token]) * weights[token, slot, None]
            y = y.index_add(0, token, said.to(y.dtype))
    return y


def grouped(x: Tensor, stacks: Stacks, act: Act, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same of `down(act(gate(x)) * up(x))`, each matrix of all experts in one call."""
    experts, k, dtype = len(stacks.gate), chosen.shape[1], computing(x)
    order = chosen.flatten().argsort(stable=True)
    token = order // k
    of_each = (chosen.flatten()[:, None] == torch.arange(experts, device=x.device)).sum(0)
    ends = of_each.cumsum(0).to(torch.int32)

    def times(rows: Tensor, weight: Tensor) -> Tensor:
        # grouped_mm does not know autocast.
        return F.grouped_mm(rows, weight.to(dtype).mT, offs=ends)

    rows = x.index_select(0, token).to(dtype)
    said = times(act(times(rows, stacks.gate)) * times(rows, stacks.up), stacks.down)
    said = said * weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, token, said.to(x.dtype))


def aligned(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether grouped_mm takes matrices of this shape: rows of multiples of 16 bytes, both ways."""
    return all(side * dtype.itemsize % 16 == 0 for side in weight.shape)


def stacked(weights: Sequence[Tensor]) -> Tensor | None:
    """One view (E, ...) of weights that lie side by side in one storage, in this order; None if they do not.

    Gradients go through it to each of them.
    """
    if not adjacent(weights):
        return None
    if torch.is_grad_enabled():
        view: Tensor = _Stacked.apply(*weights)  # type: ignore[no-untyped-call]
        return view
    return _view(weights)


def adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether the weights lie side by side in one storage, in this order."""
    first = weights[0]
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    return all(
        w.is_contiguous()
        and w.storage_offset() == start + i * first.numel()
        and w.untyped_storage()._cdata == storage
        for i, w in enumerate(weights)
    )


def _view(weights: Sequence[Tensor]) -> Tensor:
    first = weights[0].detach()
    return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        return _view(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind(0)


def fits(x: Tensor, expert: Any) -> bool:
    return False
