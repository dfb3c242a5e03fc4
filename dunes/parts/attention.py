"""Causal self-attention."""

# Shapes: B batch, T new tokens, S readable keys, H heads, K key/value heads, D head dim.

from torch import Tensor, nn

from dunes.ops.attention import apart, attend
from dunes.parts.context import Context
from dunes.parts.position import Rotary
from dunes.plural import plural


class Attention(nn.Module):
    """Multi-head attention: grouped when `kv_heads` < `heads`, sliding when `window` is set.

    `position` turns queries and keys: Rotary, or any callable of (x, context), which says
    `supports_packing = True` if it goes by the positions in the context alone. `q_norm` and `k_norm` are applied
    to each head before that. `out_bias` is `bias` unless given. `dropout` acts on attention weights, in training
    only.
    Raises ValueError if the heads do not share the key/value heads evenly.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        position: Rotary | None = None,
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
            raise ValueError(f"{plural(heads, 'head')} cannot share {kv_heads} key/value heads evenly")
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least the token itself, not {window} tokens")
        self.q = nn.Linear(dim, heads * head_dim, bias)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias)
        self.out = nn.Linear(heads * head_dim, dim, bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.position, self.window, self.dropout = head_dim, position, window, dropout

    @property
    def supports_packing(self) -> bool | None:
        """Whether documents in a row do not see each other, which then hangs on `position`; None: not known."""
        return self.position is None or getattr(self.position, "supports_packing", None)

    def forward(self, x: Tensor, ctx: Context | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context: the whole sequence, from position 0."""
        ctx = ctx or Context.of(x)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # BHTD, BKTD, BKTD
        if self.position is not None:
            q, k = self.position(q, ctx), self.position(k, ctx)
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms may give float32, under autocast torch's do
        k, v = ctx.put(layer, k, v)  # BKSD
        if ctx.begins is not None:
            y = apart(q, k, v, ctx.bands(q.dtype, self.window))
        else:
            y = attend(q, k, v, ctx.mask(self.window), self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out
