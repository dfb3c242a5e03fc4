"""Scaled dot-product attention, grouped when there are fewer key/value heads than heads.

Two forms with one meaning. `fused` is PyTorch's kernel. `plain` is two matrix products and a
softmax: on a CPU the fused kernel's backward in bfloat16 is slow for short sequences (B=16, 4
heads of 64, T=256, 2 threads: 21 ms against 9 ms, forward and backward; at T=512 fused wins).

Documents in a row that see only themselves have a third form, `apart`: bands of queries, each with the keys from
the beginning of its first document on, so that little is computed that a mask hides, and no score is held for the
way back. The bands lie on a grid, since oneDNN makes and keeps a kernel for each new shape.
"""

# Shapes: N tokens in a row, B batch, T queries, S keys, H heads, K key/value heads (H = K * G), D head dim.

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BAND = 64
"""Queries at a time: longer bands compute more scores that nothing sees, shorter ones more calls."""

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


def apart(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, window: int | None = None) -> Tensor:
    """q (1, H, N, D), k and v (1, K, N, D), for each token where its document begins (N,) -> (1, H, N, D).

    A query sees the keys of its document up to its own, of a window that many, itself included.
    """
    y: Tensor = _Apart.apply(q, k, v, begins, window)  # type: ignore[no-untyped-call]
    return y


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v, begins)
        ctx.window = window
        # Tokens first in memory, as the map after it reads them.
        y = torch.empty(*(q.shape[i] for i in (0, 2, 1, 3)), dtype=v.dtype, device=q.device).transpose(1, 2)
        for here, seen, bias in _bands(q, begins, window):
            likely = _likely(_grouped(q, k, here), k[0, :, seen], bias)
            y[0, :, here] = torch.bmm(likely, v[0, :, seen]).view(q.shape[1], -1, q.shape[3])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, begins = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for here, seen, bias in _bands(q, begins, ctx.window):
            queries, keys, slope = _grouped(q, k, here), k[0, :, seen], _grouped(grad, k, here)
            likely = _likely(queries, keys, bias)
            dv[0, :, seen] += torch.bmm(likely.transpose(1, 2), slope)
            change = torch.bmm(slope, v[0, :, seen].transpose(1, 2))
            change = torch._softmax_backward_data(change, likely, -1, likely.dtype).mul_(q.shape[3] ** -0.5)
            dq[0, :, here] = torch.bmm(change, keys).view(q.shape[1], -1, q.shape[3])
            dk[0, :, seen] += torch.bmm(change.transpose(1, 2), queries)
        return dq, dk, dv, None, None


def _bands(q: Tensor, begins: Tensor, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, the keys that some of them see, and what is added to the scores (T, S)."""
    place = torch.arange(len(begins), device=q.device)
    first = begins if window is None else torch.maximum(begins, place - window + 1)
    for start in range(0, len(begins), BAND):
        here = slice(start, min(start + BAND, len(begins)))
        seen = slice(int(first[start]) // BAND * BAND, here.stop)
        hidden = (place[None, seen] > place[here, None]) | (place[None, seen] < first[here, None])
        yield here, seen, torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)


def _grouped(x: Tensor, k: Tensor, here: slice) -> Tensor:
    """Of (1, H, N, D) the band (K, G * T, D): heads that share keys stand below each other."""
    return x[0, :, here].reshape(k.shape[1], -1, x.shape[3])


def _likely(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The weights (K, G * T, S) of a band."""
    bias = bias.repeat(q.shape[1] // len(bias), 1)
    return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[2] ** -0.5).softmax(-1)
