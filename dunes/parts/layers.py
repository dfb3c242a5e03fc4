"""Embeddings, norms and feed-forward layers; all process each token separately."""

# Shapes: B batch, T tokens.

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import gated
from dunes.ops.rms_norm import fused as rms_norm
from dunes.parts.context import ForwardContext
from dunes.units import plural

Act = Callable[[Tensor], Tensor]
"""An activation: a function that is applied to each element."""


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if x has a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared. https://arxiv.org/abs/2109.08668"""
    return x.relu().square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU. https://arxiv.org/abs/1606.08415"""
    return x * torch.sigmoid(1.702 * x)


class Embedding(nn.Module):
    """A token embedding. With `positions`, a learned embedding of each position is added.

    The token embedding is multiplied by `scale`, which is first rounded to the embedding's dtype. `dropout` acts
    on the sum of both embeddings, in training only.
    """

    supports_packing = True
    scale: float | None = None  # a class attribute does not change the saved structure of other embeddings

    def __init__(
        self, vocab: int, dim: int, positions: int | None = None, dropout: float = 0.0, scale: float | None = None
    ) -> None:
        super().__init__()
        if scale is not None:
            self.scale = scale
        self.token = nn.Embedding(vocab, dim)
        self.place = nn.Embedding(positions, dim) if positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids (B, T) -> (B, T, dim). Raises ValueError for more tokens than learned positions."""
        x: Tensor = self.token(ids)
        if self.scale is not None:
            x = x * x.new_full((), self.scale)
        if self.place is not None:
            length = ids.shape[1] if ctx.cache is None else ctx.cache.max_length
            if ctx.consecutive and length > self.place.num_embeddings:
                raise ValueError(
                    f"{plural(length, 'token')}, but only "
                    f"{plural(self.place.num_embeddings, 'position was', 'positions were')} learned"
                )
            x = x + self.place(ctx.positions.clamp(min=0))
        y: Tensor = self.dropout(x)
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * weight; rms is over the last dimension, in float32. https://arxiv.org/abs/1910.07467"""

    supports_packing = True

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), in x's dtype, or in autocast's dtype if autocast is enabled."""
        return rms_norm(x, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), as in Gemma; the weight starts at zero."""

    supports_packing = True
    initial_values = MappingProxyType({"weight": 0.0})

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), in x's dtype, or in autocast's dtype if autocast is enabled."""
        return rms_norm(x, 1.0 + self.weight.float(), self.eps)


class GroupedRMSNorm(RMSNorm):
    """RMSNorm with a separate rms for each of `groups` equal groups of channels."""

    supports_packing = True

    def __init__(self, dim: int, eps: float = 1e-6, groups: int = 1) -> None:
        super().__init__(dim, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), in x's dtype."""
        grouped = torch.unflatten(x, -1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(x.dtype)


class MLP(nn.Module):
    """A feed-forward layer of two matrices: down(act(up(x)))."""

    supports_packing = True

    def __init__(self, dim: int, hidden: int, act: Act = F.gelu, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class GatedMLP(nn.Module):
    """A gated feed-forward layer: down(act(gate(x)) * up(x)). With silu, the default `act`, this is SwiGLU.

    https://arxiv.org/abs/2002.05202
    """

    supports_packing = True

    def __init__(self, dim: int, hidden: int, act: Act = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias)
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        gate, up = self.gate(x), self.up(x)
        y: Tensor = self.down(gated.fused(gate, up) if self.act is F.silu else self.act(gate) * up)
        return y


class WeightedGatedMLP(GatedMLP):
    """A gated feed-forward layer whose output is multiplied by sigmoid(router(x)), one factor for each token.

    Qwen's mixtures of experts use this layer as the shared expert. https://arxiv.org/abs/2407.10671
    """

    supports_packing = True

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.router = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.router(x).sigmoid()
        return y


class ClampedGatedMLP(GatedMLP):
    """A gated feed-forward layer with clamped factors: down(quick_gelu(gate(x)) * (1 + up(x))), as in gpt-oss.

    Before the product, gate(x) is clamped to at most `limit`, and up(x) to -limit to limit.
    https://arxiv.org/abs/2508.10925
    """

    supports_packing = True

    def __init__(self, dim: int, hidden: int, limit: float = 7.0, bias: bool = True) -> None:
        super().__init__(dim, hidden, quick_gelu, bias)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).clamp(max=self.limit), self.up(x).clamp(-self.limit, self.limit)
        y: Tensor = self.down(self.act(gate) * (1 + up))
        return y
