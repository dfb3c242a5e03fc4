"""The decoder: embedding, blocks, norm and head. Each of these parts may be any module."""

# Shapes: B batch, T new tokens, V vocabulary.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from dunes import tree
from dunes.ops.cross_entropy import IGNORE, per_token
from dunes.ops.cross_entropy import fused as linear_cross_entropy
from dunes.ops.scaled_dot_product import QUERY_BLOCK
from dunes.parts.attention import Attention
from dunes.parts.cache import Cache, RollingCache, readable_on_host
from dunes.parts.context import (
    ForwardContext,
    document_starts,
    documents_by_length,
    fitted,
    supports_packing,
    undeclared_modules,
    warn_about_mixing,
    with_context,
)
from dunes.parts.latent_attention import LatentAttention
from dunes.parts.layers import at_least_float32
from dunes.parts.quantized_cache import CacheFormat, QuantizedCache
from dunes.parts.recurrent_cache import RecurrentCache

Read = Callable[[Tensor, ForwardContext], Tensor]
LossSums = tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]
RowLosses = tuple[Tensor, Tensor, dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]
LossInputs = tuple[Tensor, Tensor, bool, dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]

PAD_MULTIPLE = QUERY_BLOCK
"""Rows of packed documents are padded to a multiple of this number of tokens."""
Recorded = dict[Any, list[Tensor]]


class Block(nn.Module):
    """A block: x = x + attn(attn_norm(x)), then x + mlp(mlp_norm(x)).

    `dropout` acts on the outputs of attn and mlp, in training only. `attn_post_norm` and `mlp_post_norm` are
    applied to these outputs before the residual addition. With nn.Identity as `attn_norm` and `mlp_norm`, only
    these outputs are normalized. With `parallel`, the block is x + attn(attn_norm(x)) + mlp(mlp_norm(x)). Without
    an MLP (`mlp_norm` and `mlp` are None), only attn is added. `attn` is called with (x, ctx, layer), or with x if
    it takes only x; all other parts are called with x. Raises ValueError for a part that does not take these
    arguments.
    """

    supports_packing = True
    parallel: bool = False  # a class attribute does not change the saved structure of other blocks

    def __init__(
        self,
        attn_norm: nn.Module,
        attn: nn.Module,
        mlp_norm: nn.Module | None,
        mlp: nn.Module | None,
        dropout: float = 0.0,
        *,
        attn_post_norm: nn.Module | None = None,
        mlp_post_norm: nn.Module | None = None,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn = attn_norm, attn
        self.mlp_norm: Any = mlp_norm
        self.mlp: Any = mlp
        self.dropout = nn.Dropout(dropout)
        self.attn_post_norm: nn.Module | None
        self.mlp_post_norm: nn.Module | None
        for name, norm in (("attn_post_norm", attn_post_norm), ("mlp_post_norm", mlp_post_norm)):
            self.register_module(name, None if norm is None else fitted(name, norm, "x"))
        if parallel:
            self.parallel = True

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):  # also checks parts that `tree.replace` inserts
            value = with_context(name, value) if name == "attn" else fitted(name, value, "x")
        super().__setattr__(name, value)

    def forward(self, x: Tensor, ctx: ForwardContext | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        attended = self.attn(self.attn_norm(x), ctx, layer)
        attended = attended if self.attn_post_norm is None else self.attn_post_norm(attended)
        y: Tensor = x + self.dropout(attended)
        if self.mlp is None:
            return y
        added = self.mlp(self.mlp_norm(x if self.parallel else y))
        added = added if self.mlp_post_norm is None else self.mlp_post_norm(added)
        out: Tensor = y + self.dropout(added)
        return out


class Decoder(nn.Module):
    """A decoder-only language model. With `head=None` the token embedding is also the head (tied weights).

    `softcap` bounds the logits, by softcap * tanh(logits / softcap). Documents packed into one row do not attend
    to each other. If a module's class does not declare `supports_packing`, training and generation are slower:
    each document is computed in its own row, and `cache_for` returns None.
    """

    supports_packing = True
    softcap: float | None = None  # a class attribute does not change the saved structure of other models

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        head: nn.Module | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if softcap is not None:
            self.softcap = softcap
        self.embed: Any = fitted("embed", embed, "ids, ctx")  # an Embedding, or a module of the user
        if head is None and not hasattr(embed, "token"):
            raise ValueError(
                f"{type(embed).__name__} has no `token`, whose weight the head would share; pass a head"
            )
        self.blocks = nn.ModuleList(with_context("a block", block) for block in blocks)
        self.norm = fitted("norm", norm, "x")
        self.head = None if head is None else fitted("head", head, "x")
        if len(set(self.blocks)) < len(self.blocks):
            raise ValueError("the same block occurs twice in `blocks`; build a new one for each layer")

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        last: int | None = None,
        targets: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor | LossSums | RowLosses:
        """Logits (B, T, V) for ids (B, T), or (B, last, V) for the last positions; with `targets`, the loss.

        `positions` (B, T) are -1 for padding. A position that is not the previous position plus one starts a new
        document. With a cache, positions come from `cache.start`, and new keys and values are added to the cache.

        With `targets` (B, T), returns (loss, count, metrics): the summed cross entropy in nats (float32), the
        number of targets other than IGNORE, and metrics by name as (sum, count). In training the loss includes the
        auxiliary losses of parts, times the count; they are also metrics. Raises ValueError for targets together
        with `cache` or `last`.

        With `by_row`, returns (losses, counts, auxiliary, metrics): the cross entropy and the number of targets of
        each row (B,), the auxiliary losses of the parts by name (not in `losses`), and the other metrics.
        """
        if targets is not None:
            if cache is not None or last is not None:
                raise ValueError("targets give the loss of whole texts; pass them without cache and last")
            return (self._row_losses if by_row else self._loss)(ids, targets, positions)
        if self._head_mixes:
            logits = self._apply_separately(self._logits, ids, positions, cache)
            return logits if last is None else logits[:, logits.shape[1] - last :]
        x = self.hidden(ids, positions, cache)
        return self.logits(x if last is None else x[:, x.shape[1] - last :])

    def before_head(self, ids: Tensor, last: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """States (B, last, dim) of the last positions of ids (B, T), and a function from slices of states to
        logits.

        If the head may mix tokens, the logits are computed at once, and the function is the identity.
        """
        if self._head_mixes:
            return self(ids, last=last), lambda logits: logits
        return self.hidden(ids)[:, ids.shape[1] - last :], self.logits

    def hidden(self, ids: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The hidden states (B, T, dim) after the final norm."""
        return self._apply_separately(self._states, ids, positions, cache)

    @property
    def _head_mixes(self) -> bool:
        """True if the head may mix tokens, so that it must be applied to each document separately."""
        return self.head is not None and bool(undeclared_modules(self.head))

    def _apply_separately(
        self, read: Read, ids: Tensor, positions: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        """The result (B, T, ...) of `read(ids, ctx)`, computed so that documents stay separate."""
        if positions is not None and cache is None and not supports_packing(self):
            warn_about_mixing(self, "the model is run on documents of one length at a time")
            return self._by_length(read, ids, positions.expand_as(ids))
        return read(ids, ForwardContext.of(ids, positions, cache))

    def _by_length(self, read: Read, ids: Tensor, positions: Tensor) -> Tensor:
        """Call `read` for batches of documents of equal length, one document per row, without padding."""
        indices = documents_by_length(positions)
        if not indices:
            return read(ids, ForwardContext(positions))
        parts = [read(ids.flatten()[i], ForwardContext(positions.flatten()[i])).flatten(0, 1) for i in indices]
        states = torch.cat(parts)
        index = torch.cat([i.flatten() for i in indices])
        return states.new_zeros(ids.numel(), states.shape[1]).index_copy(0, index, states).view(*ids.shape, -1)

    def _states(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        x = self.embed(ids, ctx)
        for layer, block in enumerate(self.blocks):
            x = block(x, ctx, layer)
        states: Tensor = self.norm(x)
        ctx.close()
        return states

    def _logits(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        return self.logits(self._states(ids, ctx))

    def _loss(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> LossSums:
        """The loss. With a plain linear head, the logits are never materialised."""
        x, targets, flattened, losses, metrics = self._loss_inputs(ids, targets, positions)
        total, count = self._cross_entropy(x, targets, flattened)
        for name, loss in losses.items():
            added = count * loss
            total, metrics[name] = total + added, (added.detach(), count)
        return total, count, metrics

    def _row_losses(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> RowLosses:
        """Loss and number of targets of each row."""
        counts = (targets != IGNORE).sum(1)
        x, targets, flattened, auxiliary, metrics = self._loss_inputs(ids, targets, positions)
        if not flattened:
            losses = self._token_losses(x, targets).view(len(counts), -1).sum(1)
        else:  # `_target_index` returns the targets first, in the order of the rows
            index, sizes = _target_index(targets), counts.tolist()
            each = self._token_losses(x[index], targets[index])[: sum(sizes)]
            losses = torch.stack([row.sum() for row in torch.split(each, sizes)])
        return losses, counts, auxiliary, metrics

    def _loss_inputs(self, ids: Tensor, targets: Tensor, positions: Tensor | None) -> LossInputs:
        """The states (N, dim), or logits (N, V) if the head may mix tokens, and the targets (N,).

        Also returns True if the documents were computed in one row, and the auxiliary losses and the metrics.
        Tensors on a CPU can be read without synchronisation, so `varlen_attention` can be used there. With
        `varlen_attention`, padding is dropped before the first block; tokens without a target can be dropped
        before the head.
        """
        read = self._logits if self._head_mixes else self._states
        starts = None
        with record_auxiliary(self) as recorded:
            if positions is not None and self._uses_varlen(positions := positions.expand_as(ids)):
                ids, targets, positions, starts = _flatten_documents(ids, targets, positions)
                x = read(ids, ForwardContext(positions, document_starts=starts))
            else:
                x = self._apply_separately(read, ids, positions)
        real = None if positions is None or not supports_packing(self) else positions.flatten() >= 0
        return x.flatten(0, 1), targets.flatten(), starts is not None, *auxiliary_losses(recorded, real)

    def _token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy (N,) of targets (N,), 0 for IGNORE; `x` as in `_cross_entropy`."""
        if (head := self._head_weight()) is not None:
            return per_token(x, head, targets)
        x = x.masked_fill((targets == IGNORE)[:, None], 0.0)
        logits = x if self._head_mixes else self.logits(x)
        return F.cross_entropy(at_least_float32(logits), targets, ignore_index=IGNORE, reduction="none")

    def _cross_entropy(self, x: Tensor, targets: Tensor, select: bool) -> tuple[Tensor, Tensor]:
        """Summed cross entropy of targets (N,), and the number of targets.

        `x` are hidden states (N, dim), or logits (N, V) if the head may mix tokens. With `select`, rows of `x`
        without a target are dropped first.
        """
        if select and len(index := _target_index(targets)) < len(targets):
            x, targets = x[index], targets[index]
        count = (targets != IGNORE).sum()
        if (head := self._head_weight()) is not None:
            return linear_cross_entropy(x, head, targets), count
        x = x.masked_fill((targets == IGNORE)[:, None], 0.0)  # ignored states may be inf or NaN
        logits = x if self._head_mixes else self.logits(x)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum"), count

    def _head_weight(self) -> Tensor | None:
        """The matrix (V, dim) of a linear head without softcap and bias, or of a tied embedding; None for other
        heads."""
        if self.softcap is not None:
            return None
        if self.head is None:
            return self.embed.token.weight if isinstance(self.embed.token, nn.Embedding) else None
        return self.head.weight if tree.is_dense(self.head) and self.head.bias is None else None

    def _uses_varlen(self, positions: Tensor) -> bool:
        """True if all documents of the batch can be computed in one row with `varlen_attention`."""
        if not readable_on_host(positions) or not (positions >= 0).any():
            return False
        attentions = [m for m in self.modules() if isinstance(m, Attention)]
        plain = all(m.has_plain_scores and not (m.dropout and m.training) for m in attentions)
        return len(attentions) == len(self.blocks) and plain and supports_packing(self)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head: (..., dim) -> (..., V)."""
        logits: Tensor = F.linear(x, self.embed.token.weight) if self.head is None else self.head(x)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def _flatten_documents(ids: Tensor, targets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put all tokens except padding into one row: returns ids, targets, positions (1, N) and document starts (N,).

    A document start is the index at which a token's document starts. N is padded to a multiple of PAD_MULTIPLE,
    since oneDNN compiles and caches a kernel for every new shape.
    """
    starts, real = document_starts(positions), positions >= 0
    extra = -len(starts) % PAD_MULTIPLE
    row = (F.pad(t[real], (0, extra), value=v)[None] for t, v in ((ids, 0), (targets, IGNORE), (positions, -1)))
    padding = torch.arange(len(starts), len(starts) + extra, device=positions.device)
    return *row, torch.cat([starts, padding])  # type: ignore[return-value]


def _target_index(targets: Tensor) -> Tensor:
    """Indices of the targets (N,) that are not IGNORE, followed by indices of IGNORE targets, so that the number
    of indices is a multiple of PAD_MULTIPLE if possible."""
    has_target = targets != IGNORE
    count = int(has_target.sum())
    return torch.sort(~has_target, stable=True).indices[: count + -count % PAD_MULTIPLE]


def vocabulary_size(model: nn.Module) -> int | None:
    """Number of ids in a decoder's token embedding; None if unknown. The decoder may be compiled or wrapped."""
    inner = next((m for m in model.modules() if isinstance(m, Decoder)), None)
    return getattr(getattr(getattr(inner, "embed", None), "token", None), "num_embeddings", None)


def cache_for(
    model: nn.Module,
    batch: int,
    capacity: int,
    device: torch.device | str = "cpu",
    format: CacheFormat | None = None,
) -> Cache | None:
    """An empty cache for `batch` rows of up to `capacity` tokens.

    The cache is a `RecurrentCache` for a model with recurrent states, a `QuantizedCache` if there is a `format`, a
    `RollingCache` if every layer has a window smaller than the capacity, and otherwise a `Cache`.

    Returns None, with a warning, if a module may mix tokens in ways that a KV cache cannot reproduce. The model
    may be compiled or wrapped, but then gets a `Cache` instead of a `RollingCache`. Raises ValueError for a
    `format` with recurrent states or a `LatentAttention`.
    """
    inner = next((m for m in model.modules() if isinstance(m, Decoder)), None)
    if inner is not None and undeclared_modules(inner):
        warn_about_mixing(inner, "the whole text is computed again for each new token")
        return None
    if name := recurrent_part(model):
        if format is not None:
            raise ValueError(f"the cache of a model with recurrent states ({name}) cannot be quantized")
        return RecurrentCache(batch, capacity, device)
    if format is not None:
        if place := next((n for n, m in model.named_modules() if isinstance(m, LatentAttention)), None):
            raise ValueError(
                f"{place}: the cache of a LatentAttention cannot be quantized; it is compressed already"
            )
        return QuantizedCache(batch, capacity, device, format)
    windows = [m.window for m in model.modules() if isinstance(m, Attention)]
    limited = [w for w in windows if w is not None]
    depth = len(model.blocks) if isinstance(model, Decoder) else -1
    if len(limited) == depth and max(limited) < capacity:
        return RollingCache(batch, max(limited), device)
    return Cache(batch, capacity, device)


def recurrent_part(model: nn.Module) -> str:
    """Class name of a model's first part with a recurrent state; "" if no part has a recurrent state.

    Classes with a recurrent state set `recurrent = True`.
    """
    return next((type(m).__name__ for m in model.modules() if getattr(m, "recurrent", False)), "")


# Shapes: N tokens.


@contextmanager
def record_auxiliary(model: nn.Module) -> Iterator[Recorded]:
    """Inside this context, parts in training record tensors for auxiliary losses; yields the tensors by part."""
    recorded: Recorded = {m: [] for m in model.modules() if hasattr(m, "auxiliary_losses") and model.training}
    for part, tensors in recorded.items():
        part.recorded = tensors
    try:
        yield recorded
    finally:
        # Forwards that activation checkpointing runs again later must not record.
        for part in recorded:
            part.recorded = None


def auxiliary_losses(
    recorded: Recorded, real: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """The auxiliary losses and the metrics of the parts, both by name.

    A loss is averaged over the parts of each kind (such as mixtures, or LoRA experts), and the means are added, so
    that each kind is balanced as if it were alone. Parts are of one kind if the same method computes their losses.

    A metric's sums in all parts are stacked to (parts, ...); vectors of different lengths are padded with -1.
    `real` (N,) is False for padding; if `real` is given, each call of a part must process exactly these N tokens.
    """
    values: dict[str, list[tuple[Any, Any]]] = {}
    for part, tensors in recorded.items():
        for name, value in part.auxiliary_losses(tensors, real).items() if tensors else ():
            values.setdefault(name, []).append((type(part).auxiliary_losses, value))
    losses: dict[str, Tensor] = {}
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pairs in values.items():
        if isinstance(pairs[0][1], Tensor):
            losses[name] = _sum_of_means(pairs)
        else:
            sums = pad_sequence([total for _, (total, _) in pairs], batch_first=True, padding_value=-1.0)
            metrics[name] = sums, pairs[0][1][1]
    return losses, metrics


def _sum_of_means(values: list[tuple[Any, Tensor]]) -> Tensor:
    """The mean loss of each kind, summed over the kinds; `values` are pairs of a kind and a loss."""
    by_method: dict[Any, list[Tensor]] = {}
    for method, loss in values:
        by_method.setdefault(method, []).append(loss)
    means = [torch.stack(losses).mean() for losses in by_method.values()]
    return sum(means[1:], start=means[0])


class Checkpointed(nn.Module):
    """Activation checkpointing: stores only a block's inputs and recomputes its activations in the backward pass.

    `tree.replace(model, "blocks.*", Checkpointed)` wraps every block. Outputs and gradients stay the same;
    training costs one more forward pass.
    """

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *inputs: Any) -> Any:
        """The base's output for these arguments, which must be positional."""
        if not torch.is_grad_enabled():
            return self.base(*inputs)
        return checkpoint(self.base, *inputs, use_reentrant=False)
