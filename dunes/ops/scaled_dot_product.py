"""Scaled dot-product attention, grouped (GQA) if k and v have fewer heads than q.

`fused` and `plain` compute the same function. `fused` is PyTorch's kernel. `plain` is two matrix products and a
softmax; without a mask, `plain` is causal and computed in blocks of queries. On a CPU the fused kernel is slow in
bfloat16, especially in the backward pass. Forward and backward with 4 heads of 64 take 21 / 9 ms (`fused` /
`plain`) on two threads of a Xeon (B=16, T=256). On one thread of an AMD EPYC with B=8, the times are 101 / 45 ms
for T=512 (71 without blocks) and 260 / 169 ms for T=1,024. On the Xeon with T=1,024 and two key heads, `plain` was
slower (28 / 61 ms, without blocks). Therefore, `plain` is used up to 512 keys.

`varlen_attention` is the attention of documents packed into one row. Queries are computed in blocks; a block reads
the keys from the start of its first query's document on. Therefore, few masked scores are computed. No scores are
saved for the backward pass. Blocks start at multiples of QUERY_BLOCK, and each product computes BLOCKS_PER_PRODUCT
blocks. This limits the number of shapes, since oneDNN compiles and caches a kernel for each shape.
"""

# Shapes: N tokens in a row, B batch, T queries, S keys, H heads, K key/value heads (H = K * G), D head dim,
# V width of values.

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dunes.ops.operation import once_differentiable

QUERY_BLOCK = 64
"""Queries per block in `varlen_attention`. Longer blocks compute more masked scores; shorter blocks need more
calls.
"""

CAUSAL_BLOCK = 512
"""Queries per block in `causal_attention` and in `ForwardContext.attend_scored`."""

PLAIN_BLOCK, LONGEST_PLAIN = 256, 512  # of `plain`: queries per block; maximum keys, since all scores are saved

BLOCKS_PER_PRODUCT = 4
LONG_KEYS = 512
"""A block with more than LONG_KEYS keys is computed alone, since it has many scores."""

Form = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, D), k (B, K, S, D), v (B, K, S, V) -> (B, H, T, V) in q's dtype.

    The bool mask (T, S), (1, T, S) or (B, T, S) is True where a query may attend to a key. Without a mask, query t
    attends to keys 0..t. The output of a query that may attend to no key is NaN.
    """
    return form(q, k, mask)(q, k, v, mask, dropout)


def form(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Form:
    """`plain` or `fused`, whichever is faster for these arguments (times: see the module's docstring)."""
    longest = LONGEST_PLAIN if mask is None else PLAIN_BLOCK
    short_training = q.requires_grad and q.dtype == torch.bfloat16 and k.shape[2] <= longest
    return plain if q.device.type == "cpu" and short_training else fused


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    if (width := v.shape[3]) < q.shape[3]:  # kernels need equal widths; padding 64 to 96 saves 2/3 of the time
        return fused(q, k, F.pad(v, (0, q.shape[3] - width)), mask, dropout)[..., :width]
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.shape[2] == 1 and mask is not None:
        # Query heads become rows, so keys are read once: 1.0 instead of 3.3 ms (16 heads, 4,096 keys, width 288).
        return fused(q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v, mask, dropout).view(*q.shape[:3], -1)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    (b, h, t, d), (kv, s) = q.shape, k.shape[1:3]
    if mask is None:
        if t > PLAIN_BLOCK:
            return torch.cat([_plain_block(q, k, v, start, dropout) for start in range(0, t, PLAIN_BLOCK)], 2)
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    # Query heads that share keys are stacked as rows, so that no key is copied.
    bias = bias.repeat(*[1] * (mask.dim() - 2), h // kv, 1)
    if mask.dim() == 3:
        bias = bias.expand(b, -1, -1).repeat_interleave(kv, 0)
    q = q.reshape(b * kv, h // kv * t, d)
    k, v = k.reshape(b * kv, s, d), v.reshape(b * kv, s, -1)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(d))
    weights = F.dropout(scores.softmax(-1), dropout, training=dropout > 0)
    return torch.bmm(weights, v).view(b, h, t, -1)


def attend_scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: float = 0.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` with softcap * tanh(scores / softcap) + bias in place of the scores.

    `bias` broadcasts to (B, H, T, S). `sinks` (H,) are the logits of one further key per head, whose value is 0.
    With a softcap or sinks, all scores (B, H, T, S) are in memory, in q's dtype.
    """
    (b, h, t, d), kv = q.shape, k.shape[1]
    k, v = k.to(q.dtype), v.to(q.dtype)  # the cache of compiled decoding has another dtype
    mask = mask[:, None] if mask.dim() == 3 else mask
    if softcap is None and sinks is None and bias is not None:
        added = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, added, dropout, enable_gqa=h != kv)
    scores = (torch.unflatten(q, 1, (kv, -1)) @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) / math.sqrt(d)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(b, h, t, 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(v.dtype)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    y: Tensor = (torch.unflatten(weights, 1, (kv, -1)) @ v[:, :, None]).flatten(1, 2)
    return y


def _plain_block(q: Tensor, k: Tensor, v: Tensor, start: int, dropout: float) -> Tensor:
    """Causal attention of the block of queries that starts at `start`."""
    q, k, v = q[:, :, start : start + PLAIN_BLOCK], k[:, :, : start + PLAIN_BLOCK], v[:, :, : start + PLAIN_BLOCK]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(start)
    return plain(q, k, v, mask, dropout)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention for inference; the queries (B, H, T, D) are at the last T positions of k and v.

    A query attends to at most `window` keys, up to and including its own. If no keys are cached and the window
    covers all keys, the kernel needs no mask (1,024 tokens, 6 heads of 64, one thread: 10 ms, with a mask 17 ms).
    Otherwise the kernel is called once per block of queries, each with a small mask.
    """
    (t, s), blocks = (q.shape[2], k.shape[2]), []
    window = s if window is None else min(window, s)
    if t == s == window:
        return attend(q, k, v)
    for start in range(0, t, CAUSAL_BLOCK):
        query = q[:, :, start : start + CAUSAL_BLOCK]
        end = s - t + start + query.shape[2]
        first = max(0, end - query.shape[2] - window + 1)
        mask = _causal_mask(query.shape[2], end - first, window, q.device)
        blocks.append(attend(query, k[:, :, first:end], v[:, :, first:end], mask))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def pair_attention(q: Tensor, k: Tensor, v: Tensor, alone: Tensor) -> Tensor:
    """Attention to the token itself and to the one before: q (B, H, T, D), k and v (B, K, T, D) -> (B, H, T, D).

    `alone` (B or 1, T) is True where a token attends only to itself. The softmax over two scores is a sigmoid of
    their difference (16 x 256 tokens, 3 heads of 64, one thread, with backward: 6 ms; with a mask 21 ms).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    before_k, before_v = (F.pad(x[:, :, :-1], (0, 0, 1, 0)) for x in (k, v))
    difference = (q * (k - before_k)).sum(-1, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
    weight = (difference / math.sqrt(q.shape[-1])).sigmoid().masked_fill(alone[:, None, :, None], 1.0)
    return torch.lerp(before_v, v, weight.to(v.dtype))


def _causal_mask(t: int, s: int, window: int, device: torch.device) -> Tensor:
    """Bool mask (T, S), True where a query attends to a key; the queries are at the last T of S positions."""
    return torch.ones(t, s, dtype=torch.bool, device=device).tril_(s - t).triu_(s - t - window + 1)


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of queries that are computed together in one batched product; all blocks are padded to S keys."""

    numbers: Tensor
    """Indices of the blocks (n,)."""
    key_tokens: Tensor
    """Token indices (n * S,) of the blocks' keys; the S keys of a block are consecutive tokens."""
    bias: Tensor
    """Bias added to the scores (1, n, 1, QUERY_BLOCK, S): 0 where a query attends to a key, -inf elsewhere."""

    def gather_queries(self, x: Tensor, heads: int) -> Tensor:
        """Select these blocks: (1, H, N, D) -> (K * n, G * QUERY_BLOCK, D). Heads that share keys are stacked."""
        blocks = _split_blocks(x, heads).index_select(1, self.numbers)
        return blocks.view(heads * len(self.numbers), -1, x.shape[3])

    def scatter_queries(self, x: Tensor, rows: Tensor, heads: int) -> None:
        """Write rows into these blocks of x: the inverse of `gather_queries`."""
        blocks, rows = _split_blocks(x, heads), rows.view(heads, len(self.numbers), -1, QUERY_BLOCK, x.shape[3])
        for i, number in enumerate(self.numbers.tolist()):
            blocks[:, number] = rows[:, i]

    def gather_keys(self, x: Tensor) -> Tensor:
        """Select the keys (or values) of these blocks: (1, K, N, D) -> (K * n, S, D)."""
        return x[0].index_select(1, self.key_tokens).view(-1, self.bias.shape[4], x.shape[3])

    def add_to_keys(self, x: Tensor, grads: Tensor) -> None:
        """Add the gradients of these blocks' keys (K * n, S, D) to x (1, K, N, D), in place."""
        size, grads = self.bias.shape[4], grads.view(x.shape[1], -1, x.shape[3])
        for i, start in enumerate(self.key_tokens[::size].tolist()):
            x[0, :, start : start + size] += grads[:, i * size : (i + 1) * size]


def query_blocks(document_starts: Tensor, dtype: torch.dtype, window: int | None = None) -> list[QueryBlocks]:
    """The blocks for `varlen_attention`, the same for all layers with this window.

    `document_starts` (N,) int64 is the index at which each token's document starts. N must be a multiple of
    QUERY_BLOCK.
    """
    assert len(document_starts) % QUERY_BLOCK == 0, f"pad rows to a multiple of {QUERY_BLOCK} tokens"
    token = torch.arange(len(document_starts), device=document_starts.device)
    first_key = document_starts if window is None else torch.maximum(document_starts, token - window + 1)
    ends = token[::QUERY_BLOCK] + QUERY_BLOCK
    # Sorted by size, so that an incomplete last batch has few keys and fewer shapes occur.
    lengths = ends - first_key[::QUERY_BLOCK] // QUERY_BLOCK * QUERY_BLOCK
    sizes, order = torch.sort(lengths, descending=True, stable=True)
    single = int((sizes > LONG_KEYS).sum())
    cuts = [*range(single), *range(single, len(order), BLOCKS_PER_PRODUCT), len(order)]
    return [_batch_blocks(order[a:b], first_key, dtype) for a, b in itertools.pairwise(cuts)]


def _batch_blocks(numbers: Tensor, first_key: Tensor, dtype: torch.dtype) -> QueryBlocks:
    query = numbers[:, None] * QUERY_BLOCK + torch.arange(QUERY_BLOCK, device=first_key.device)
    end = query[:, -1:] + 1
    size = int((end - first_key[query[:, :1]] // QUERY_BLOCK * QUERY_BLOCK).max())
    key = (end - size).clamp(min=0) + torch.arange(size, device=first_key.device)
    hidden = (key[:, None] > query[..., None]) | (key[:, None] < first_key[query][..., None])
    bias = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return QueryBlocks(numbers, key.flatten(), bias[None, :, None])


def _split_blocks(x: Tensor, heads: int) -> Tensor:
    """(1, H, N, D) -> (K, N / QUERY_BLOCK, G, QUERY_BLOCK, D), a view."""
    return x[0].view(heads, -1, x.shape[2] // QUERY_BLOCK, QUERY_BLOCK, x.shape[3]).transpose(1, 2)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryBlocks]) -> Tensor:
    """Causal attention within documents: q (1, H, N, D), k (1, K, N, D), v (1, K, N, V) -> (1, H, N, V).

    `groups` is the result of `query_blocks`, whose `window` limits the number of keys that a query attends to.
    """
    y: Tensor = _VarlenAttention.apply(q, k, v, groups)  # type: ignore[no-untyped-call]
    return y


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryBlocks]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.groups = groups
        # Tokens come before heads in memory, as the output projection reads them.
        y = v.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for group in groups:
            probs = _attention_probs(group.gather_queries(q, k.shape[1]), group.gather_keys(k), group.bias)
            group.scatter_queries(y, torch.bmm(probs, group.gather_keys(v)), k.shape[1])
        return y

    @staticmethod
    @partial(once_differentiable, "varlen_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for group in ctx.groups:
            queries, keys = group.gather_queries(q, k.shape[1]), group.gather_keys(k)
            grad_block = group.gather_queries(grad, k.shape[1])
            probs = _attention_probs(queries, keys, group.bias)
            group.add_to_keys(dv, torch.bmm(probs.transpose(1, 2), grad_block))
            grad_probs = torch.bmm(grad_block, group.gather_keys(v).transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            group.scatter_queries(dq, _scaled_product(grad_scores, keys), k.shape[1])
            group.add_to_keys(dk, _scaled_product(grad_scores.transpose(1, 2), queries))
        return dq, dk, dv, None


def _attention_probs(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Softmax of the scores (K * n, G * QUERY_BLOCK, S)."""
    shape = len(q) // bias.shape[1], bias.shape[1], q.shape[1] // QUERY_BLOCK, *bias.shape[3:]
    scores = bias.new_empty(shape).copy_(bias).view(*q.shape[:2], -1)
    return scores.baddbmm_(q, k.transpose(1, 2), alpha=q.shape[2] ** -0.5).softmax(-1)


def _scaled_product(grad_scores: Tensor, x: Tensor) -> Tensor:
    """grad_scores @ x / sqrt(D), in one call, so that the scores are read only once."""
    none = grad_scores.new_empty(())
    return torch.baddbmm(none, grad_scores, x, beta=0, alpha=x.shape[2] ** -0.5)
