"""Parts that replace attention by a recurrent state, whose size does not grow with the text."""

# Shapes: B batch, T new tokens, C channels, W width of the convolution, H heads, K and V width of keys and values.

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops.linear_recurrence import CHUNK, recurrence
from dunes.ops.operation import without_autocast
from dunes.parts.context import ForwardContext
from dunes.parts.layers import at_least_float32

LEAST_DECAY = -30.0
"""Minimum log-decay (a decay of 1e-13). In cumulative sums, a much smaller log-decay would round away the
log-decays of other tokens."""


def _start(module: Any) -> None:
    """Set the parameters of a new part to its `initial_values`."""
    if next(module.parameters()).is_meta:
        return  # some functions that compute the values would make torch import its compiler
    with torch.no_grad():
        for name, value in module.initial_values.items():
            getattr(module, name).copy_(torch.as_tensor(value))


class ShortConvolution(nn.Module):
    """A causal depthwise convolution: each channel has its own `width` weights, initialised to the identity."""

    supports_packing = recurrent = True

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)
        _start(self)

    @property
    def initial_values(self) -> Mapping[str, Any]:
        """The weights of a new part: 1 for the token itself, 0 for earlier tokens."""
        return {"weight": F.one_hot(torch.tensor(self.weight.shape[1] - 1), self.weight.shape[1])}

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        """(B, T, C) -> (B, T, C), in x's dtype. The state is the last W - 1 inputs (B, W - 1, C)."""
        weight, back, length = self.weight.to(x.dtype), self.weight.shape[1] - 1, x.shape[1]
        before = ctx.state((layer, "convolution"), x.new_zeros(len(x), back, x.shape[2]))
        documents, padding, order = ctx.documents(), ctx.padding(), None
        if padding is not None:  # sort padding to the end, so that the real tokens follow the state
            order = padding.byte().sort(dim=1, stable=True).indices[..., None].expand_as(x)
            x = x.gather(1, order)
        inputs = torch.cat([before, x], 1)
        y = x * weight[:, back]
        for age in range(1, back + 1):
            earlier = inputs[:, back - age : back - age + length]
            if documents is not None:
                other = F.pad(documents[:, :-age] != documents[:, age:], (min(age, length), 0), value=True)
                earlier = earlier.masked_fill(other[..., None], 0.0)
            y = y + earlier * weight[:, back - age]
        y = y if self.bias is None else y + self.bias.to(x.dtype)
        if padding is None or order is None:
            ctx.keep((layer, "convolution"), inputs[:, length:])
            return y
        last = (~padding).sum(1)[:, None] + torch.arange(back, device=x.device)
        ctx.keep((layer, "convolution"), inputs.gather(1, last[..., None].expand_as(before)))
        return torch.empty_like(y).scatter_(1, order, y)


class GatedConvolution(nn.Module):
    """LFM2's layer in place of attention: a short convolution with a gated input and a gated output.

    The result is out(gate * convolution(input * value)); `join` returns input, gate and value concatenated.
    https://arxiv.org/abs/2511.23404
    """

    supports_packing = True

    def __init__(self, dim: int, width: int = 3, bias: bool = False) -> None:
        super().__init__()
        self.join, self.out = nn.Linear(dim, 3 * dim, bias), nn.Linear(dim, dim, bias)
        self.convolution = ShortConvolution(dim, width, bias)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        entry, gate, value = self.join(x).chunk(3, -1)
        y: Tensor = self.out(gate * self.convolution(entry * value, ctx, layer))
        return y


def _recur(
    ctx: ForwardContext, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """The outputs (B, T, H, V) of the recurrence for the new tokens, in float32 or wider; updates the state.

    `q` and `k` are (B, T, H or a divisor of H, K), `v` is (B, T, H, V), `log_decay` and `beta` are (B, T, H).
    """
    heads = v.shape[2]
    if (padding := ctx.padding()) is not None:  # padding changes no state
        log_decay = log_decay.masked_fill(padding[..., None], 0.0)
        v, beta = v * ~padding[..., None, None], None if beta is None else beta * ~padding[..., None]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q, k, v, log_decay = (at_least_float32(x.transpose(1, 2)) for x in (q, k, v, log_decay))
    beta = None if beta is None else at_least_float32(beta.transpose(1, 2))
    state = ctx.state((layer, "recurrence"), v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]))
    with without_autocast(v):  # autocast would multiply in bfloat16
        y, last = recurrence(q, k, v, log_decay.clamp(min=LEAST_DECAY), state, beta, ctx.documents())
    ctx.keep((layer, "recurrence"), last)
    return y.transpose(1, 2)


def _products(heads: int, key: int, value: int, delta: bool = False) -> list[tuple[int, int]]:
    """Sizes (inputs, outputs) of the recurrence's matrix products per token, except triangular systems."""
    times = 1 + delta
    return [(heads * key, value)] * (1 + times) + [(key, heads * CHUNK)] * times + [(value, heads * CHUNK)]


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, in place of attention, with the layout of Qwen3-Next.

    Each of the `key_heads` key heads has a query and a key, shared by `heads / key_heads` value heads. `project`
    returns query, key, values and gates, and `rates` returns learning and forgetting rates, both grouped by key
    head. Queries, keys and values go through a short convolution. https://arxiv.org/abs/2412.06464
    """

    supports_packing = recurrent = True

    def __init__(
        self,
        dim: int,
        heads: int,
        key_heads: int | None = None,
        *,
        key_dim: int,
        value_dim: int,
        norm: nn.Module,
        width: int = 4,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads or heads
        self.key_dim, self.value_dim, self.norm = key_dim, value_dim, norm
        self.project = nn.Linear(dim, 2 * (self.key_heads * key_dim + heads * value_dim), bias=False)
        self.rates = nn.Linear(dim, 2 * heads, bias=False)
        self.convolution = ShortConvolution(2 * self.key_heads * key_dim + heads * value_dim, width)
        self.log_rate, self.step = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.out = nn.Linear(heads * value_dim, dim, bias=False)
        _start(self)

    @property
    def initial_values(self) -> Mapping[str, Any]:
        """Parameters of a new part: forgetting rates that differ between heads, as in Mamba-2."""
        return {"log_rate": torch.linspace(1, 16, self.heads).log(), "step": 1.0}

    @property
    def added_products(self) -> list[tuple[int, int]]:
        """Sizes (inputs, outputs) of matrix products per token in training, except those of linear layers."""
        return _products(self.heads, self.key_dim, self.value_dim, delta=True)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        shared = self.heads // self.key_heads
        sizes = [self.key_dim, self.key_dim, shared * self.value_dim, shared * self.value_dim]
        *joined, gate = self.project(x).unflatten(-1, (self.key_heads, -1)).split(sizes, -1)
        rates = torch.unflatten(self.rates(x), -1, (self.key_heads, -1))
        # Slices, since the compiled backward of `chunk` assumes other strides than `cat` returns (torch 2.13).
        beta, rate = rates[..., :shared].flatten(-2), rates[..., shared:].flatten(-2)
        mixed = F.silu(self.convolution(torch.cat([j.flatten(-2) for j in joined], -1), ctx, layer))
        q, k, v = torch.split(mixed, [j[0, 0].numel() for j in joined], -1)
        q, k = (_unit(torch.unflatten(y, -1, (self.key_heads, -1))) for y in (q, k))
        log_decay = -at_least_float32(self.log_rate).exp() * F.softplus(at_least_float32(rate) + self.step)
        v = torch.unflatten(v, -1, (self.heads, -1))
        y = _recur(ctx, layer, q / math.sqrt(self.key_dim), k, v, log_decay, beta.sigmoid())
        y = self.norm(y.to(x.dtype)) * F.silu(at_least_float32(gate.reshape(y.shape)))
        out: Tensor = self.out(y.flatten(-2).to(x.dtype))
        return out


def _unit(x: Tensor) -> Tensor:
    """x divided by its L2 norm, in float32 or wider."""
    x = at_least_float32(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Mamba2(nn.Module):
    """A selective state space model, in place of a block's attention and MLP. https://arxiv.org/abs/2405.21060

    The state has `state_dim` numbers for each of the `heads` * `head_dim` channels. `project` returns gates,
    channel inputs, keys and queries for each of the `groups`, and a time step for each head. Channel inputs, keys
    and queries go through a short convolution. Time steps are clamped to `limits`; `norm` is applied to the gated
    output.
    """

    supports_packing = recurrent = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int,
        state_dim: int,
        norm: nn.Module,
        groups: int = 1,
        width: int = 4,
        bias: bool = False,
        convolution_bias: bool = True,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.state_dim, self.groups = heads, head_dim, state_dim, groups
        inner, self.norm, self.limits = heads * head_dim, norm, limits
        self.project = nn.Linear(dim, 2 * (inner + groups * state_dim) + heads, bias)
        self.convolution = ShortConvolution(inner + 2 * groups * state_dim, width, convolution_bias)
        self.log_rate, self.step = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.out = nn.Linear(inner, dim, bias)
        _start(self)

    @property
    def initial_values(self) -> Mapping[str, Any]:
        """Parameters of a new part: rates 1, 2, ..., and time steps that softplus maps to 0.001 to 0.1."""
        steps = torch.logspace(-3, -1, self.heads)
        rates = torch.arange(1.0, self.heads + 1)
        return {"log_rate": rates.log(), "step": steps + (-torch.expm1(-steps)).log(), "skip": 1.0}

    @property
    def added_products(self) -> list[tuple[int, int]]:
        """Sizes (inputs, outputs) of matrix products per token in training, except those of linear layers."""
        return _products(self.heads, self.state_dim, self.head_dim)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        inner, keys = self.heads * self.head_dim, self.groups * self.state_dim
        gate, mixed, step = self.project(x).split([inner, inner + 2 * keys, self.heads], -1)
        value, k, q = torch.split(F.silu(self.convolution(mixed, ctx, layer)), [inner, keys, keys], -1)
        value = at_least_float32(torch.unflatten(value, -1, (self.heads, -1)))
        k, q = (torch.unflatten(y, -1, (self.groups, -1)) for y in (k, q))
        step = F.softplus(at_least_float32(step) + self.step).clamp(*self.limits)
        y = _recur(ctx, layer, q, k, value * step[..., None], -at_least_float32(self.log_rate).exp() * step)
        y = (y + self.skip[:, None] * value).flatten(-2)
        out: Tensor = self.out(self.norm((y * F.silu(at_least_float32(gate))).to(x.dtype)))
        return out
