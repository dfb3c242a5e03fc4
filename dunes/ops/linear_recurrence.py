"""Linear recurrences of a matrix state with decay; updates may follow the delta rule.

The state is S_t = a_t S_{t-1} + k_t u_t^T, and the output is S_t^T q_t. Without `beta`, u_t is v_t, as in Mamba-2
(https://arxiv.org/abs/2405.21060). With `beta`, u_t follows the gated delta rule: beta_t (v_t - a_t S_{t-1}^T k_t)
(https://arxiv.org/abs/2412.06464). `plain` computes one token after another, `recurrence` chunks of tokens by
matrix products.
"""

# Shapes: B batch, H heads, T tokens, K width of keys, V width of values, N chunks of C tokens.

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32
"""Tokens in a chunk; a training step takes equally long with 32 and 64, and 1.3 times as long with 16."""


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs (B, H, T, V) and the last state, computed by chunks.

    `q` and `k` are (B, H, T, K), `v` (B, H, T, V), `log_decay` (at most 0) and `beta` (B, H, T), `state` (B, H, K,
    V), all of one dtype, float32 or wider. `documents` (B or 1, T) contains, for each token, the number of its
    document. The first document continues `state`; the state is zero at the start of each later document. In a
    chunk, a triangular system gives the delta rule's updates. A single token is computed by `plain`.
    """
    if v.shape[2] == 1:
        return plain(q, k, v, log_decay, state, beta, documents)
    length = v.shape[2]
    size = min(CHUNK, length)
    extra = -length % size
    # Compiled code expects a contiguous result of `pad`, but `pad` keeps the strides if `extra` is 0.
    q, k, v = (torch.unflatten(F.pad(x.contiguous(), (0, 0, 0, extra)), 2, (-1, size)) for x in (q, k, v))
    total = torch.unflatten(F.pad(log_decay, (0, extra)), 2, (-1, size)).cumsum(-1)  # BHNC
    visible = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    enters, leaves = total.exp(), (total[..., -1:] - total).exp()
    if documents is not None:
        last = documents[:, -1:].expand(-1, extra)
        number = torch.unflatten(torch.cat([documents, last], 1), 1, (-1, size))[:, None]  # B1NC
        before = torch.cat([number[:, :, :1, :1], number[:, :, :-1, -1:]], 2)
        visible = visible & (number[..., :, None] == number[..., None, :])
        enters, leaves = enters * (number == before), leaves * (number == number[..., -1:])
    # Masked before `exp`, since the exponents of later tokens may overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~visible, -torch.inf).exp()
    scores, removed = (q @ k.mT) * decay, None
    if beta is not None:
        beta = torch.unflatten(F.pad(beta, (0, extra)), 2, (-1, size))[..., None]
        system, both = (k @ k.mT) * decay * beta, torch.cat([v, k * enters[..., None]], -1) * beta
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        v, removed = solved.split([v.shape[-1], k.shape[-1]], -1)
    q, k, outputs = q * enters[..., None], k * leaves[..., None], []
    for n in range(v.shape[2]):
        update = v[:, :, n] if removed is None else v[:, :, n] - removed[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + scores[:, :, n] @ update)
        state = state * enters[:, :, n, -1, None, None] + k[:, :, n].mT @ update
    return torch.cat(outputs, 2)[:, :, :length], state


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of `recurrence`, computed one token after another."""
    decay, outputs = log_decay.exp(), []
    if documents is not None:
        decay = decay * (documents.diff(dim=1, prepend=documents[:, :1]) == 0)[:, None]
    for t in range(v.shape[2]):
        state, update = state * decay[:, :, t, None, None], v[:, :, t]
        if beta is not None:
            update = beta[:, :, t, None] * (update - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * update[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(outputs, 2), state
