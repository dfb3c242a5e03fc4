"""The stack: embedding, blocks, norm, head. Any module fits any hole."""

# Shapes: B batch, T new tokens, V vocabulary.

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops.attention import BAND
from dunes.ops.cross_entropy import IGNORE
from dunes.ops.cross_entropy import fused as linear_cross_entropy
from dunes.parts.attention import Attention
from dunes.parts.cache import Cache, IdCache, Rolling
from dunes.parts.context import (
    Context,
    at_hand,
    documents,
    documents_by_length,
    supports_packing,
    undeclared,
    warn_of_mixing,
)
from dunes.parts.embedding import Embedding
from dunes.parts.moe import imbalance, routing

Read = Callable[[Tensor], Tensor]

GRID = BAND
"""Numbers of tokens are multiples of it where that can be chosen."""


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); `dropout` acts on both branches, in training only."""

    supports_packing = True

    def __init__(
        self, attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ctx: Context | None = None, layer: int = 0) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        x = x + self.dropout(self.attn(self.attn_norm(x), ctx, layer))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class Decoder(nn.Module):
    """A language model. With head=None the token embedding is read backwards as the head (tied).

    Documents that share a row do not see each other. If a module is of a class that does not say that it
    `supports_packing`, each document goes through the model in a row of its own, and `cache_for` gives a cache of
    ids alone; both take longer.
    """

    supports_packing = True

    def __init__(
        self, embed: Embedding, blocks: Sequence[nn.Module], norm: nn.Module, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = embed, nn.ModuleList(blocks), norm, head
        if len(set(map(id, blocks))) < len(blocks):
            raise ValueError("the same block stands twice in the list; build each one anew")

    def forward(
        self, ids: Tensor, at: Tensor | None = None, cache: Cache | None = None, last: int | None = None
    ) -> Tensor:
        """Logits (B, T, V) for ids (B, T), of the last `last` columns only if that is given.

        `at` (B, T) are positions, -1 for padding; a restart begins another document. With a cache
        they come from `cache.start`, and the new keys and values are added to it.
        """
        if self._head_mixes:
            scores = self._through(self.logits, ids, at, cache)
            return scores if last is None else scores[:, -last:]
        x = self.hidden(ids, at, cache)
        return self.logits(x if last is None else x[:, -last:])

    def hidden(self, ids: Tensor, at: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The normalised states (B, T, dim) that the head reads."""
        return self._through(lambda x: x, ids, at, cache)

    @property
    def _head_mixes(self) -> bool:
        """Whether the head may mix tokens, so that it has to read each document by itself, too."""
        return self.head is not None and bool(undeclared(self.head))

    def _through(self, read: Read, ids: Tensor, at: Tensor | None, cache: Cache | None = None) -> Tensor:
        """What `read` makes of the states, in which no document sees another."""
        if isinstance(cache, IdCache):
            at = cache.start(torch.ones_like(ids, dtype=torch.bool)) if at is None else at
            whole = self._through(read, *cache.put_ids(ids, at))
            cache.advance((at >= 0).sum(1))
            return whole.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, whole.shape[-1]))
        if at is not None and cache is None and not supports_packing(self):
            warn_of_mixing(self, "documents of one length at a time go through the model")
            return self._by_length(read, ids, at.expand_as(ids))
        return read(self._states(ids, Context.of(ids, at, cache)))

    def _by_length(self, read: Read, ids: Tensor, at: Tensor) -> Tensor:
        """The same with each document in a row of its own, without padding: nothing is there to be seen."""
        places = documents_by_length(at)
        if not places:
            return read(self._states(ids, Context(at)))
        parts = [read(self._states(ids.flatten()[i], Context(at.flatten()[i]))).flatten(0, 1) for i in places]
        states = torch.cat(parts)
        index = torch.cat([i.flatten() for i in places])
        return states.new_zeros(ids.numel(), states.shape[1]).index_copy(0, index, states).view(*ids.shape, -1)

    def _states(self, ids: Tensor, ctx: Context) -> Tensor:
        x = self.embed(ids, ctx)
        for layer, block in enumerate(self.blocks):
            x = block(x, ctx, layer)
        ctx.close()
        states: Tensor = self.norm(x)
        return states

    def nats(self, ids: Tensor, targets: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The summed loss of the targets (B, T), IGNORE counting nothing, and their number.

        Equal to `next_token` of this model's logits, which a plain head never has to hold. In training,
        a mixture of experts adds for each target what its `balance` says of the uneven use of its experts.
        On a CPU, where looking at `at` and `targets` costs no wait, padding is left out before the first block and
        tokens of which nothing is asked before the head, and documents go through attention by themselves.
        """
        begins = None
        if at is not None and self._apart(at := at.expand_as(ids)):
            ids, targets, at, begins = _row(ids, targets, at)
        mixes = self._head_mixes
        with routing(self) as routed:
            if at is None or begins is None:
                x = self._through(self.logits, ids, at) if mixes else self.hidden(ids, at)
            else:
                x = self._states(ids, Context(at, begins=begins))
        x, y = x.flatten(0, 1), targets.flatten()
        if begins is not None:
            asked = _asked(y)
            x, y = (x, y) if len(asked) == len(y) else (x[asked], y[asked])
        head = self._head_weight()
        if head is not None:
            total = linear_cross_entropy(x, head, y)
        else:
            x = x.masked_fill((y == IGNORE)[:, None], 0.0)  # as there, what is ignored may be inf
            scores = x if mixes else self.logits(x)
            total = F.cross_entropy(scores.float(), y, ignore_index=IGNORE, reduction="sum")
        count = (y != IGNORE).sum()
        if routed:
            real = None if at is None or not supports_packing(self) else at.flatten() >= 0
            total = total + count * imbalance(routed, real)
        return total, count

    def _head_weight(self) -> Tensor | None:
        """The matrix (V, dim) that is all of the head; None where a bias or something else is in it."""
        if self.head is None:
            return self.embed.token.weight if isinstance(self.embed.token, nn.Embedding) else None
        plain = isinstance(self.head, nn.Linear) and type(self.head).forward is nn.Linear.forward
        return self.head.weight if plain and self.head.bias is None else None

    def _apart(self, at: Tensor) -> bool:
        """Whether all documents can stand in one row: attention must then take each by itself."""
        if not at_hand(at) or not (at >= 0).any():
            return False
        attentions = [m for m in self.modules() if isinstance(m, Attention)]
        dropped = any(m.dropout and m.training for m in attentions)
        return len(attentions) == len(self.blocks) and not dropped and supports_packing(self)

    def logits(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., V)."""
        if self.head is None:
            return F.linear(x, self.embed.token.weight)
        logits: Tensor = self.head(x)
        return logits


def _row(ids: Tensor, targets: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All tokens but padding in one row (1, N), and where the document of each begins (N,).

    A little padding makes lengths few: oneDNN makes and keeps a kernel for each new shape.
    """
    begins, real = documents(at), at >= 0
    more = -len(begins) % GRID
    row = (F.pad(t[real], (0, more), value=v)[None] for t, v in ((ids, 0), (targets, IGNORE), (at, -1)))
    alone = torch.arange(len(begins), len(begins) + more, device=at.device)
    return *row, torch.cat([begins, alone])  # type: ignore[return-value]


def _asked(targets: Tensor) -> Tensor:
    """Indices of the targets (N,) that are asked for, and of a few others for the same reason."""
    asked = targets != IGNORE
    count = int(asked.sum())
    return torch.sort(~asked, stable=True).indices[: count + -count % GRID]


def cache_for(model: nn.Module, batch: int, context: int, device: torch.device | str = "cpu") -> Cache:
    """An empty cache for `batch` texts of up to `context` tokens: rolling if every layer's window is smaller.

    Of ids alone where modules may mix tokens in ways that keys and values do not hold, also in a model that is
    compiled or wrapped.
    """
    inner = next((m for m in model.modules() if isinstance(m, Decoder)), None)
    if inner is not None and undeclared(inner):
        warn_of_mixing(inner, "the whole text is read again for each new token")
        return IdCache(batch, context, device)
    windows = [m.window for m in model.modules() if isinstance(m, Attention)]
    sees = [w for w in windows if w is not None]
    depth = len(model.blocks) if isinstance(model, Decoder) else -1
    if len(sees) == depth and max(sees) < context:
        return Rolling(batch, max(sees), device)
    return Cache(batch, context, device)
