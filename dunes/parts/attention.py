"""Causal self-attention."""

# Shapes: B batch, T new tokens, S readable keys, H heads, K key/value heads, D head dim.

from torch import Tensor, nn

from dunes.parts.context import ForwardContext
from dunes.parts.position import Position
from dunes.units import plural


class Attention(nn.Module):
    """Causal multi-head attention: grouped if `kv_heads` < `heads`, sliding-window if `window` is set.

    `position` encodes positions into queries and keys: a Rotary, or any callable with arguments (x, context). Such
    a callable declares `supports_packing = True` if it uses only the context's positions. `q_norm` and `k_norm`
    are applied to each head before `position`. `out_bias` defaults to `bias`. `dropout` acts on attention weights,
    in training only. Raises ValueError if `heads` is no multiple of `kv_heads`.
    """

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
    ) -> None:
        super().__init__()
        kv_heads, head_dim = kv_heads or heads, head_dim or dim // heads
        if heads % kv_heads:
            raise ValueError(f"{plural(heads, 'head')} are no multiple of {kv_heads} key/value heads")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; it must be at least 1, the token itself")
        self.q = nn.Linear(dim, heads * head_dim, bias)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias)
        self.out = nn.Linear(heads * head_dim, dim, bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.position, self.window, self.dropout = head_dim, position, window, dropout

    @property
    def supports_packing(self) -> bool | None:
        """True if documents packed into one row stay separate; None if `position` does not declare it."""
        return self.position is None or getattr(self.position, "supports_packing", None)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # BHTD, BKTD, BKTD
        if self.position is not None:
            q, k = self.position(q, ctx), self.position(k, ctx)
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms may return float32, as torch's do under autocast
        k, v = ctx.put(layer, k, v)  # BKSD
        y = ctx.attend(q, k, v, self.window, self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out
