"""Multi-head latent attention, whose cache stores a compressed form of keys and values.

https://arxiv.org/abs/2405.04434
"""

# Shapes: B batch, T new tokens, S readable tokens, H heads, N and R dimensions of a head without and with
# positions, V width of a value, C width of the latent of keys and values.

import math

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.parts.attention import Attention
from dunes.parts.context import ForwardContext
from dunes.parts.layers import RMSNorm
from dunes.parts.position import Position


class LatentAttention(Attention):
    """Causal attention whose keys and values are computed from a latent of `kv_rank` dimensions per token.

    A head's query and key have `nope_dim` dimensions without positions, and `rope_dim` dimensions into which
    `position` encodes positions. All heads share the `rope_dim` dimensions of the key. Values have `value_dim`
    dimensions. With a `q_rank`, queries are also computed from a latent. Each latent goes through an RMSNorm with
    `eps`. `bias` adds biases to `out` and to the projections that compute latents. Other arguments are
    Attention's.

    The cache stores one key of kv_rank + rope_dim elements per token: the latent and the part with positions. The
    cache's values have width 0, since values are computed from the latents. Without cached tokens, the keys and
    values of each head are computed. With cached tokens and few queries, the weights of `kv_b` are absorbed:
    queries are multiplied by the key weight and attend to the latents, and the result is multiplied by the value
    weight. If `kv_b` is a mixture of adapters, its weights are never absorbed.
    """

    supports_packing = Attention.supports_packing  # a class with its own forward has to declare it again
    sinks = q_norm = k_norm = None

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_rank: int,
        q_rank: int | None = None,
        *,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        position: Position | None = None,
        window: int | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
        bias: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.nope_dim, self.rope_dim, self.value_dim = nope_dim, rope_dim, value_dim
        self.head_dim, self.position, self.window, self.dropout = nope_dim + rope_dim, position, window, 0.0
        if q_rank is None:
            self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        else:
            self.q_a, self.q_a_norm = nn.Linear(dim, q_rank, bias), RMSNorm(q_rank, eps)
            self.q_b = nn.Linear(q_rank, heads * self.head_dim, bias=False)
        self.kv_a, self.kv_a_norm = nn.Linear(dim, kv_rank + rope_dim, bias), RMSNorm(kv_rank, eps)
        self.kv_b = nn.Linear(kv_rank, heads * (nope_dim + value_dim), bias=False)  # by head: key, value
        self.out = nn.Linear(heads * value_dim, dim, bias)
        if scale is not None:
            self.scale = scale

    @property
    def head_count(self) -> int:
        return self.out.in_features // self.value_dim

    kv_head_count = head_count

    @property
    def cache_width(self) -> int:
        return self.kv_a.out_features

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Without a context, positions are 0..T-1."""
        ctx = ctx or ForwardContext.of(x)
        new = self.compress(x, ctx)
        q = self.queries(x, ctx).to(new.dtype)
        seen, _ = ctx.put(layer, new, new[..., :0])
        absorbs = seen is not new and self._absorbs(x.shape[1], ctx)
        y = self._attend_latents(q, seen, ctx) if absorbs else self.attend(q, *self.expand(seen), ctx)
        return self.project(y.transpose(1, 2).flatten(2), x)

    def queries(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Queries (B, H, T, N + R) with encoded positions."""
        q = self.q_b(self.q_a_norm(self.q_a(x))) if hasattr(self, "q_b") else self.q(x)
        return self._encode(q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), ctx)

    def compress(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Cache entries (B, 1, T, C + R): the normed latent, and the key dimensions with positions."""
        latent, shared = self.kv_a(x)[:, None].tensor_split([-self.rope_dim], -1)
        return self._encode(torch.cat([self.kv_a_norm(latent).to(shared.dtype), shared], -1), ctx)

    def expand(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, S, N + R) and values (B, H, S, V), from the result of `compress` for these tokens."""
        latent, shared = seen.tensor_split([-self.rope_dim], -1)
        pairs = self.kv_b(latent[:, 0]).unflatten(-1, (-1, self.nope_dim + self.value_dim)).transpose(1, 2)
        k, v = pairs.tensor_split([self.nope_dim], -1)
        return torch.cat([k, shared.expand(-1, k.shape[1], -1, -1)], -1).to(v.dtype), v

    def _encode(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x with positions encoded into its last `rope_dim` dimensions."""
        if self.position is None:
            return x
        rest, encoded = x.tensor_split([-self.rope_dim], -1)
        return torch.cat([rest, self.position(encoded, ctx)], -1)

    def _absorbs(self, new: int, ctx: ForwardContext) -> bool:
        """True if there are cached tokens, and attending to latents takes fewer multiplications than expanding
        them."""
        rank, width = self.kv_b.in_features, self.nope_dim + self.value_dim
        first = ctx.cache is not None and ctx.cache.max_length == new
        by_input = any(getattr(m, "depends_on_input", False) for m in self.kv_b.modules())  # no constant weight
        return not (first or by_input) and new * (2 * rank - width) <= rank * width

    def _attend_latents(self, q: Tensor, seen: Tensor, ctx: ForwardContext) -> Tensor:
        """The heads' outputs (B, H, T, V) for queries (B, H, T, N + R), without expanding the latents."""
        weight = self.kv_b.weight if tree.is_dense(self.kv_b) else self.kv_b.dense()  # type: ignore[operator]
        heads = weight.to(q.dtype).view(self.head_count, -1, self.kv_b.in_features)
        key, value = heads.tensor_split([self.nope_dim], 1)  # (H, N, C) and (H, V, C)
        rest, encoded = q.tensor_split([-self.rope_dim], -1)
        q = torch.cat([rest @ key, encoded], -1) * math.sqrt(seen.shape[3] / self.head_dim)
        y = self.attend(q, seen, seen, ctx)[..., : self.kv_b.in_features]
        return torch.matmul(y, value.mT)
