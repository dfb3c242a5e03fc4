"""Cross entropy of a linear head, without materialising all logits.

The plain version writes (N, V) logits, their log-softmax and both gradients to memory: 64 MB each for 4,096 tokens
and a vocabulary of 4,096. The fused version processes the tokens in chunks. The forward pass computes the
gradients, from each chunk's probabilities; the backward pass only multiplies the gradients by a scalar. A chunk's
logits fit into the CPU's cache, unless the chunk would have fewer than MIN_TOKENS tokens. Small chunks are slow,
since each chunk reads the head and adds to the head's gradient: 512 tokens in chunks of 65 / 262 / 524 take 572 /
227 / 210 ms (D=768, V=32,000, bfloat16, two threads).
"""

# Shapes: N tokens, D width, V vocabulary.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dunes.ops.operation import autocast_dtype, once_differentiable, without_autocast

IGNORE = -100
"""Target id of a position that does not count in the loss, as in PyTorch."""
CHUNK = {"cpu": 1 << 21}  # logits per chunk that fit the cache
SLICE = {"cpu": 1 << 19}  # logits in float32 at a time; a chunk's float32 copies would leave the cache
MIN_TOKENS = 256  # minimum tokens per chunk; the head's width if smaller, to limit the memory of logits
LARGE_CHUNK = 1 << 28  # logits per chunk on GPUs, where launching a kernel costs more than memory


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    x = x.masked_fill((targets == IGNORE)[:, None], 0.0)
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORE, reduction="sum")


def fused(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross entropy (nats, float32) of the logits x @ weight.T for targets (N,) int64.

    x (N, D) are hidden states, `weight` (V, D) is the head. Positions whose target is IGNORE do not count; their
    states may be inf or NaN.
    """
    needs_grad = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    # Eager calls avoid the custom operator, whose first call takes a second.
    apply: Any = linear_cross_entropy if torch.compiler.is_compiling() else _Fused.apply
    loss: Tensor = apply(x, weight, targets, autocast_dtype(x), *needs_grad)[0]
    return loss


def per_token(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy (N,) of each target, in float32 or wider; 0 for IGNORE. Arguments as in `fused`.

    Gradients depend on how each token's loss is used, so each chunk's logits are computed again in the backward
    pass.
    """
    dtype = autocast_dtype(x)

    def losses(x: Tensor, targets: Tensor) -> Tensor:
        with without_autocast(x):
            x = x.to(dtype).masked_fill((targets == IGNORE)[:, None], 0.0)
            logits = F.linear(x, weight.to(dtype)).to(torch.promote_types(dtype, torch.float32))
            return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")

    size = _chunk_size(x, weight)
    parts = zip(torch.split(x, size), torch.split(targets, size), strict=True)
    return torch.cat([checkpoint(losses, *p, use_reentrant=False, preserve_rng_state=False) for p in parts])


def _chunk_size(x: Tensor, weight: Tensor) -> int:
    fewest = min(MIN_TOKENS, weight.shape[1])
    return max(fewest, CHUNK.get(x.device.type, LARGE_CHUNK) // len(weight))


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, states: bool, head: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and float32 gradients for the hidden states (if `states`) and for the head (if `head`).

    A gradient that is not requested is an empty tensor.
    """
    loss = x.new_zeros((), dtype=torch.float32)
    # A frozen head, often the largest matrix, needs no gradient.
    dx, dw = (
        torch.zeros_like(t, dtype=torch.float32) if needs_grad else loss.new_empty(0)
        for t, needs_grad in ((x, states), (weight, head))
    )
    matrix = weight.to(dtype)
    size = _chunk_size(x, weight)
    with without_autocast(x):
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            mask = targets[rows] != IGNORE
            # Ignored states are masked before any product, as infinity times zero is NaN.
            part = x[rows].to(dtype).masked_fill(~mask[:, None], 0.0)
            part_loss, grad_logits = _chunk(part, matrix, targets[rows], mask, states or head)
            loss += part_loss
            if states:
                dx[rows] = grad_logits @ matrix * mask[:, None]
            if head:
                dw += grad_logits.T @ part
    return loss, dx, dw


# A torch operator, since torch.compile would unroll the chunks and recompile for each number of tokens.
linear_cross_entropy = torch.library.custom_op("dunes::linear_cross_entropy", _loss_and_gradients, mutates_args=())


@linear_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, states: bool, head: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.float32)
    dx, dw = (loss.new_empty(t.shape if needs_grad else 0) for t, needs_grad in ((x, states), (weight, head)))
    return loss, dx, dw


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtypes, ctx.needs_grad = (inputs[0].dtype, inputs[1].dtype), inputs[4:]
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    saved, grad = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_grad, strict=True), grads[0]
    has_grad = grad is not None
    return *((g * grad).to(dtype) if needs and has_grad else None for g, dtype, needs in saved), *[None] * 4


linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


class _Fused(torch.autograd.Function):
    forward = staticmethod(_loss_and_gradients)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(once_differentiable("cross_entropy", _backward))


def _chunk(x: Tensor, head: Tensor, targets: Tensor, mask: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Summed loss of the tokens in `mask`, and with `needs_grad` its gradient with respect to the logits."""
    logits, loss = x @ head.T, x.new_zeros((), dtype=torch.float32)
    size = max(1, SLICE.get(x.device.type, LARGE_CHUNK) // len(head))
    for part, *labels in zip(*(torch.split(t, size) for t in (logits, targets, mask)), strict=True):
        part_loss, probs = _slice(part.float(), *labels)
        loss += part_loss
        if needs_grad:
            part.copy_(probs)
    return loss, logits


def _slice(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of float32 logits, and its gradient."""
    probs = logits.softmax(-1)
    index = targets.where(mask, 0)[:, None]
    # logsumexp is exact if computed from the largest probability, which never underflows.
    logsumexp = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    loss = (logsumexp - logits.gather(1, index))[:, 0].where(mask, 0.0).sum()
    return loss, probs.scatter_add_(1, index, torch.full_like(logsumexp, -1.0))
