"""Causal self-attention."""

# Shapes: B batch, T new tokens, S readable keys, H heads, K key/value heads, D head dim.

import math
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dunes.parts.context import ForwardContext, fitted
from dunes.parts.position import Position


class Attention(nn.Module):
    """Causal multi-head attention: grouped if `kv_heads` < `heads`, sliding-window if `window` is set.

    `position` encodes positions into queries and keys: a Rotary, or any callable with arguments (x, context). A
    callable declares `supports_packing = True` if it uses only the context's positions. If `position` has a method
    `bias` (see `parts.context.Bias`), the method's result is added to the scores. `q_norm` and `k_norm` are
    applied to each head before `position`. `out_bias` defaults to `bias`. `dropout` acts on attention weights, in
    training only.

    Scores are multiplied by `scale` (default: head_dim ** -0.5). `softcap` bounds the scores by softcap *
    tanh(scores / softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118). With `sinks`, each head learns the
    score of one more key, whose value is 0, as in gpt-oss (https://arxiv.org/abs/2508.10925).
    """

    depends_on_order: ClassVar[bool] = False
    """True if the part reads tensors that a particular earlier block stored in the context."""
    # Class attributes, so that the saved structure of models without these settings does not change.
    scale: float | None = None
    softcap: float | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        position: Position | None = None,
        window: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        kv_heads, head_dim = kv_heads or heads, head_dim or dim // heads
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; it must be at least 1, the token itself")
        for name, part in (("q_norm", q_norm), ("k_norm", k_norm), ("position", position)):
            _ = part and fitted(name, part, "x, ctx" if name == "position" else "x")
        self.q = nn.Linear(dim, heads * head_dim, bias)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias)
        self.out = nn.Linear(heads * head_dim, dim, bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.position, self.window, self.dropout = head_dim, position, window, dropout
        self.sinks: nn.Parameter | None
        self.register_parameter("sinks", nn.Parameter(torch.zeros(heads)) if sinks else None)
        for name, value in (("scale", scale), ("softcap", softcap)):
            if value is not None:
                setattr(self, name, value)

    @property
    def head_count(self) -> int:
        """Number of query heads."""
        return self.q.out_features // self.head_dim

    @property
    def kv_head_count(self) -> int:
        """Number of key/value heads."""
        return self.k.out_features // self.head_dim

    @property
    def cache_width(self) -> int:
        """Number of elements per token in this layer's cache."""
        return self.k.out_features + self.v.out_features

    @property
    def has_plain_scores(self) -> bool:
        """True if scores depend only on queries and keys, without a bias, a cap or sinks."""
        return not hasattr(self.position, "bias") and self.softcap is None and self.sinks is None

    @property
    def supports_packing(self) -> bool | None:
        """True if documents packed into one row stay separate; None if `position` does not declare it."""
        return self.position is None or getattr(self.position, "supports_packing", None)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        q, k, v = self.heads(x, ctx)
        k, v = ctx.put(layer, k, v)  # BKSD
        return self.project(self.attend(q, k, v, ctx).transpose(1, 2).flatten(2), x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """The heads' outputs (B, H, T, D) for queries (B, H, T, D) and readable keys and values (B, K, S, D)."""
        q = q if self.scale is None else q * (self.scale * math.sqrt(self.head_dim))
        dropout = self.dropout if self.training else 0.0
        if self.has_plain_scores:
            return ctx.attend(q, k, v, self.window, dropout)
        scored = partial(ctx.attend_scored, softcap=self.softcap, sinks=self.sinks)
        return scored(q, k, v, self.window, dropout, bias=getattr(self.position, "bias", None))

    def project(self, y: Tensor, x: Tensor) -> Tensor:
        """The output (B, T, dim) for the joined heads y (B, T, H * D) and the layer's input x (B, T, dim)."""
        out: Tensor = self.out(y)
        return out

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D) and keys (B, K, T, D) with encoded positions, and values (B, K, T, D)."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.position is not None:
            q, k = self.position(q, ctx), self.position(k, ctx)
        return q.to(v.dtype), k.to(v.dtype), v  # norms may return float32, as torch's norms do under autocast


class ValueResidualAttention(Attention):
    """Attention that mixes the first layer's values into the values of later layers, with a learned weight.

    `first` is True for the first layer of a model. The other arguments are Attention's. The mixture starts with
    equal weights. https://arxiv.org/abs/2410.17897
    """

    depends_on_order = True
    initial_values = MappingProxyType({"mix": 0.5})

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None, *, first: bool, **options: Any) -> None:
        super().__init__(dim, heads, kv_heads, **options)
        self.mix: nn.Parameter | None
        self.register_parameter("mix", None if first else nn.Parameter(torch.tensor(0.5)))

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D) and keys (B, K, T, D) with encoded positions, and values (B, K, T, D)."""
        q, k, v = super().heads(x, ctx)
        if self.mix is None:
            ctx.carried["values"] = v
        else:
            v = torch.lerp(v, ctx.carried["values"], self.mix.to(v.dtype))
        return q, k, v


class GatedAttention(Attention):
    """Attention whose heads' outputs are multiplied elementwise by sigmoid(gate(x)).

    The gate removes the attention sinks that softmax causes. https://arxiv.org/abs/2505.06708
    """

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(dim, heads, kv_heads, **options)
        self.gate = nn.Linear(dim, self.out.in_features, bias=False)

    def project(self, y: Tensor, x: Tensor) -> Tensor:
        """The output (B, T, dim) for the joined heads y (B, T, H * D) and the layer's input x (B, T, dim)."""
        return super().project(y * self.gate(x).sigmoid(), x)
