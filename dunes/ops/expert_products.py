"""Mixture of experts: each token is routed to a few of many MLPs and gets the weighted sum of their outputs.

`plain` and `grouped` compute the same function. `plain` calls each expert (any module) with its tokens. `grouped`
sorts the tokens by expert and makes three grouped matrix products (gate, up and down), each for all experts at
once. Milliseconds, plain / grouped, on one thread with AMX (`benchmarks/experts.py`):

    experts x dim x hidden, chosen       tokens      1          16         256        1024
    8 x 512 x 512, 2   inference float32     0.7 / 1.0   2.5 / 2.2   10 / 9.8   33 / 30
                                 bfloat16    0.9 / 1.1   3.0 / 2.6  6.0 / 5.5   13 / 13
                       training  float32     5.0 / 5.7   9.0 / 13    25 / 27    72 / 85
                                 bfloat16     13 / 18     18 / 24    26 / 31    48 / 45
    64 x 256 x 96, 8   inference float32     1.7 / 2.4   5.0 / 3.9   13 / 10    35 / 24
                                 bfloat16    2.5 / 3.3   9.0 / 7.0   16 / 12    34 / 21
                       training  float32      10 / 7.6    14 / 12    28 / 24    65 / 58
                                 bfloat16     22 / 21     36 / 28    57 / 45   101 / 89

Without gradients the grouped version is faster from about two tokens per expert on. In training, the grouped
version is faster with many narrow experts; with a few wide experts, the plain version is up to a third faster. A
training step of a Mixtral (5 layers of 8 experts, 384 x 512, 2 chosen; bfloat16, EPYC) takes 1.2 to 1.4 times as
long with the grouped version.
"""

# Shapes: N tokens, k experts per token, E experts, D width, H an expert's hidden width, S rows (N * k).

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dunes.context import bound
from dunes.measure import ranks
from dunes.ops.operation import autocast_dtype, once_differentiable

FEW = 1
"""Without gradients, the plain version is used up to this average number of tokens per expert."""

WIDE = 2**16
"""In training on a CPU, the plain version is used for experts whose matrices have at least this many elements."""

_ONE_BY_ONE = ContextVar("one_by_one", default=False)

Stack = Tensor | Sequence[Tensor]
"""One matrix for each expert, all of equal shape: a tensor (E, ...) or a sequence of tensors."""


class Stacks(NamedTuple):
    """Weights of gated experts: gate and up (E, H, D), down (E, D, H)."""

    gate: Stack
    up: Stack
    down: Stack


def plain(x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The plain version: x (N, D), `expert_ids` (N, k) int64, `weights` (N, k) -> (N, D) in x's dtype.

    With gradients enabled, experts without tokens are also called, since all ranks of a sharded model must take
    part in the same collectives.
    """
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = _routed_tokens(expert_ids, e, len(experts))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or len(token):
            outputs = expert(x[token]) * weights[token, slot, None]
            y = y.index_add(0, token, outputs.to(y.dtype))
    return y


def one_by_one() -> AbstractContextManager[None]:
    """A context that forces the plain version, so that the experts' linear layers are called and their hooks
    run."""
    return bound(_ONE_BY_ONE, True)


def _routed_tokens(expert_ids: Tensor, expert: int, experts: int) -> tuple[Tensor, Tensor]:
    """Indices of the tokens routed to the expert, and for each token the column of `expert_ids` with this expert.

    For fake and meta tensors, which have no values, the number of tokens is the average per expert.
    """
    if isinstance(expert_ids, FakeTensor) or expert_ids.is_meta:
        if torch.compiler.is_exporting():
            raise ValueError("experts of this form run one by one, on numbers of tokens that the router decides")
        token = torch.arange(-(-expert_ids.numel() // experts), device=expert_ids.device)
        return token % len(expert_ids), torch.zeros_like(token)
    token, slot = torch.where(expert_ids == expert)
    return token, slot


def grouped(x: Tensor, stacks: Stacks, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The grouped version for experts `down(silu(gate(x)) * up(x))`; arguments and result as in `plain`."""
    experts, k, dtype = len(stacks.gate), expert_ids.shape[1], autocast_dtype(x)
    order = expert_ids.flatten().argsort(stable=True)
    token = order // k
    counts = (expert_ids.flatten()[:, None] == torch.arange(experts, device=x.device)).sum(0)
    ends = counts.cumsum(0).to(torch.int32)

    def multiply(rows: Tensor, weight: Stack) -> Tensor:
        if not isinstance(weight, Tensor):
            return cast(Tensor, products(rows.to(dtype), weight, ends, False))
        weight = weight.to(dtype)  # autocast ignores grouped_mm and custom operators
        if not torch.is_grad_enabled() and not isinstance(rows, FakeTensor):
            return F.grouped_mm(rows, weight.mT, offs=ends)  # a custom operator's first call takes a second
        y: Tensor = product(rows, weight, ends)
        return y

    rows = x.index_select(0, token).to(dtype)
    outputs = multiply(F.silu(multiply(rows, stacks.gate)) * multiply(rows, stacks.up), stacks.down)
    outputs = outputs * weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, token, outputs.to(x.dtype))


# grouped_mm cannot be traced in float32, since its fake implementation accepts bfloat16 only.
@torch.library.custom_op("dunes::grouped_product", mutates_args=())
def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight: rows (S, I), weight (E, O, I) -> (S, O).

    Rows are sorted by expert; `ends` (E,) int32 is the index after each expert's last row.
    """
    return F.grouped_mm(rows, weight.mT, offs=ends)


@torch.library.custom_op("dunes::grouped_outer", mutates_args=())
def outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The product a.T @ b of each expert's rows: a (S, O), b (S, I) -> (E, O, I)."""
    return F.grouped_mm(a.mT, b, offs=ends)


# A compiled graph cannot make views of the experts' storage, so this operator takes a matrix for each expert.
@torch.library.custom_op("dunes::expert_products", mutates_args=())
def products(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, transposed: bool) -> Tensor:
    """Same as `product`, with a separate weight (O, I) for each expert, or (I, O) if `transposed`.

    The weights are cast to the dtype of the rows.
    """
    weight = (_view(weights) if adjacent(weights) else torch.stack(list(weights))).to(rows.dtype)
    return F.grouped_mm(rows, weight if transposed else weight.mT, offs=ends)


@product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@products.register_fake
def _(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weights[0].shape[1 if transposed else 0])


@outer.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return product(grad, weight.mT, ends), outer(grad, rows, ends), None


product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _setup_context_each(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor], Tensor, bool], output: Tensor) -> None:
    rows, weights, ends, _ = inputs
    ctx.save_for_backward(rows, ends, *weights)


def _backward_each(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None, None]:
    rows, ends, *weights = ctx.saved_tensors
    grad = grad.contiguous()
    grads = [g.to(w.dtype) for g, w in zip(outer(grad, rows, ends), weights, strict=True)]
    return products(grad, weights, ends, True), grads, None, None


products.register_autograd(_backward_each, setup_context=_setup_context_each)


def aligned(weight: Tensor, dtype: torch.dtype) -> bool:
    """True if both dimensions of the matrix are multiples of 16 bytes in this dtype, as grouped_mm requires."""
    return all(side * dtype.itemsize % 16 == 0 for side in weight.shape)


def stack_view(weights: Sequence[Tensor]) -> Tensor:
    """One view (E, ...) of weights that are `adjacent`; the view's gradient is passed on to each weight."""
    if torch.is_grad_enabled():
        view: Tensor = _Stacked.apply(*weights)  # type: ignore[no-untyped-call]
        return view
    return _view(weights)


def adjacent(weights: Sequence[Tensor]) -> bool:
    """True if the weights lie one after another in one storage, in this order, each contiguous."""
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
    @partial(once_differentiable, "stacked")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind(0)


def fits(x: Tensor, weights: Sequence[Tensor], tokens_per_expert: float) -> bool:
    """True if the grouped version should be used for tokens x (N, D).

    `weights` are the matrices of one expert, and `tokens_per_expert` is an average. The result is False with
    several ranks, since FSDP may shard the weights.
    """
    if not torch.compiler.is_compiling() and _ONE_BY_ONE.get():
        return False
    dtype = autocast_dtype(x)
    supported = dtype == torch.bfloat16 or (x.device.type == "cpu" and dtype != torch.float64)
    # While a model is loaded module by module, other modules have weights on the meta device.
    on_device = all(w.device == x.device for w in weights)
    if not supported or not on_device or not all(aligned(w, dtype) for w in weights):
        return False
    if ranks.count() > 1:
        return False
    # A compiled plain version would be a long graph that depends on each expert's number of tokens.
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        return x.device.type != "cpu" or weights[0].numel() < WIDE
    return tokens_per_expert > FEW or isinstance(x, FakeTensor)
