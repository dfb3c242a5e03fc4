"""Scaled dot-product attention, grouped when there are fewer key/value heads than heads.

Two forms with one meaning. `fused` is PyTorch's kernel. `plain` is two matrix products and a
softmax: on a CPU the fused kernel's backward in bfloat16 is slow for short sequences (B=16, 4
heads of 64, T=256, 2 threads: 21 ms against 9 ms, forward and backward; at T=512 fused wins).
"""

# Shapes: B batch, T queries, S keys, H heads, K key/value heads (H = K * G), D head dim.

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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
