"""Scaled dot-product attention, grouped when there are fewer key/value heads than heads.

Two forms with one meaning. `fused` is PyTorch's kernel. `plain` is two matrix products and a
softmax: on a CPU the fused kernel's backward in bfloat16 is slow for short sequences (B=16, 4
heads of 64, T=256, 2 threads: 21 ms against 9 ms, forward and backward; at T=512 fused wins).

Documents in a row that see only themselves have a third form, `apart`: bands of queries, each with the keys from
the beginning of its first document on, so that little is computed that a mask hides, and no score is held for the
way back. Bands lie on a grid, and always as many go together, since oneDNN makes and keeps a kernel for each new
shape.
"""

# Shapes: N tokens in a row, B batch, T queries, S keys, H heads, K key/value heads (H = K * G), D head dim.

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dunes.plural import plural

BAND = 64
"""Queries at a time: longer bands compute more scores that nothing sees, shorter ones more calls."""

TOGETHER = 4
"""So many bands in a product, of up to LONG keys; of more each goes alone, as its scores are many."""
LONG = 512

Form = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Mix the values each query may see.

    q is (B, H, T, D), k and v are (B, K, S, D), mask is bool (T, S), (1, T, S) or (B, T, S), True where a query
    may look; without a mask, query t sees keys 0..t. A query that may see nothing gives NaN.
    Returns (B, H, T, D) in q's dtype.
    """
    return form(q, k)(q, k, v, mask, dropout)


def form(q: Tensor, k: Tensor) -> Form:
    """The faster of the two forms for these arguments, by the rule that the measurement above backs."""
    short_training = q.requires_grad and q.dtype == torch.bfloat16 and k.shape[2] <= 256
    return plain if q.device.type == "cpu" and short_training else fused


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    (b, h, t, d), (kv, s) = q.shape, k.shape[1:3]
    if mask is None:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    # The heads that share keys stand below each other, so that no key is ever copied.
    bias = bias.repeat(*[1] * (mask.dim() - 2), h // kv, 1)
    if mask.dim() == 3:
        bias = bias.expand(b, -1, -1).repeat_interleave(kv, 0)
    q = q.reshape(b * kv, h // kv * t, d)
    k, v = k.reshape(b * kv, s, d), v.reshape(b * kv, s, d)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(d))
    weights = F.dropout(scores.softmax(-1), dropout, training=dropout > 0)
    return torch.bmm(weights, v).view(b, h, t, d)


@dataclass(frozen=True)
class Bands:
    """Bands of queries that see about as many keys, and so go through a product together."""

    bands: Tensor
    """Their numbers (n,)."""
    keys: Tensor
    """Of each in turn the tokens whose keys it is given (n * S,): a run of them."""
    bias: Tensor
    """What is added to the scores (1, n, 1, BAND, S): zero where a query sees a key."""

    def queries(self, x: Tensor, heads: int) -> Tensor:
        """Of (1, H, N, D) these bands (K * n, G * BAND, D): heads that share keys stand below each other."""
        return _banded(x, heads).index_select(1, self.bands).view(heads * len(self.bands), -1, x.shape[3])

    def write(self, x: Tensor, new: Tensor, heads: int) -> None:
        """The inverse, into x."""
        banded, new = _banded(x, heads), new.view(heads, len(self.bands), -1, BAND, x.shape[3])
        for i, band in enumerate(self.bands.tolist()):
            banded[:, band] = new[:, i]

    def seen(self, x: Tensor) -> Tensor:
        """Of (1, K, N, D) the keys (K * n, S, D)."""
        return x[0].index_select(1, self.keys).view(-1, self.bias.shape[4], x.shape[3])

    def add(self, x: Tensor, new: Tensor) -> None:
        """To x (1, K, N, D) what the keys of these bands get."""
        size, new = self.bias.shape[4], new.view(x.shape[1], -1, x.shape[3])
        for i, start in enumerate(self.keys[::size].tolist()):
            x[0, :, start : start + size] += new[:, i * size : (i + 1) * size]


def bands(begins: Tensor, dtype: torch.dtype, window: int | None = None) -> list[Bands]:
    """For each token (N,) where its document begins: what all layers' `apart` needs to know of that.

    Raises ValueError if N is no multiple of BAND.
    """
    if len(begins) % BAND:
        raise ValueError(f"{plural(len(begins), 'token')} in a row; pad them to a multiple of {BAND}")
    place = torch.arange(len(begins), device=begins.device)
    first = begins if window is None else torch.maximum(begins, place - window + 1)
    ends = place[::BAND] + BAND
    # What is left over are then bands of few keys, and shapes are fewer.
    sizes, order = torch.sort(ends - first[::BAND] // BAND * BAND, descending=True, stable=True)
    long = int((sizes > LONG).sum())
    cuts = [*range(long), *range(long, len(order), TOGETHER), len(order)]
    return [_together(order[a:b], first, dtype) for a, b in itertools.pairwise(cuts)]


def _together(numbers: Tensor, first: Tensor, dtype: torch.dtype) -> Bands:
    query = numbers[:, None] * BAND + torch.arange(BAND, device=first.device)
    end = query[:, -1:] + 1
    size = int((end - first[query[:, :1]] // BAND * BAND).max())
    key = (end - size).clamp(min=0) + torch.arange(size, device=first.device)
    hidden = (key[:, None] > query[..., None]) | (key[:, None] < first[query][..., None])
    bias = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return Bands(numbers, key.flatten(), bias[None, :, None])


def _banded(x: Tensor, heads: int) -> Tensor:
    """(1, H, N, D) -> (K, N / BAND, G, BAND, D), a view."""
    return x[0].view(heads, -1, x.shape[2] // BAND, BAND, x.shape[3]).transpose(1, 2)


def apart(q: Tensor, k: Tensor, v: Tensor, every: Sequence[Bands]) -> Tensor:
    """q (1, H, N, D), k and v (1, K, N, D), the bands of `bands` -> (1, H, N, D).

    A query sees the keys of its document up to its own, of a window that many, itself included.
    """
    y: Tensor = _Apart.apply(q, k, v, every)  # type: ignore[no-untyped-call]
    return y


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, every: Sequence[Bands]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.every = every
        # Tokens first in memory, as the map after it reads them.
        y = torch.empty(*(q.shape[i] for i in (0, 2, 1, 3)), dtype=v.dtype, device=q.device).transpose(1, 2)
        for some in every:
            likely = _likely(some.queries(q, k.shape[1]), some.seen(k), some.bias)
            some.write(y, torch.bmm(likely, some.seen(v)), k.shape[1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for some in ctx.every:
            queries, keys, slope = some.queries(q, k.shape[1]), some.seen(k), some.queries(grad, k.shape[1])
            likely = _likely(queries, keys, some.bias)
            some.add(dv, torch.bmm(likely.transpose(1, 2), slope))
            change = torch.bmm(slope, some.seen(v).transpose(1, 2))
            change = torch._softmax_backward_data(change, likely, -1, likely.dtype)
            some.write(dq, _scaled(change, keys), k.shape[1])
            some.add(dk, _scaled(change.transpose(1, 2), queries))
        return dq, dk, dv, None


def _likely(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The weights (K * n, G * BAND, S)."""
    shape = len(q) // bias.shape[1], bias.shape[1], q.shape[1] // BAND, *bias.shape[3:]
    scores = bias.new_empty(shape).copy_(bias).view(*q.shape[:2], -1)
    return scores.baddbmm_(q, k.transpose(1, 2), alpha=q.shape[2] ** -0.5).softmax(-1)


def _scaled(change: Tensor, x: Tensor) -> Tensor:
    """The product times 1 / sqrt(D), which is not another pass over the scores."""
    none = change.new_empty(())
    return torch.baddbmm(none, change, x, beta=0, alpha=x.shape[2] ** -0.5)
