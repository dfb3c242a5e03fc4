"""Token and position embeddings."""

# Shapes: B batch, T tokens.

from torch import Tensor, nn

from dunes.parts.context import ForwardContext
from dunes.units import plural


class Embedding(nn.Module):
    """Token embedding, plus a learned embedding for each of `positions` positions if given.

    `dropout` acts on the sum, in training only.
    """

    supports_packing = True

    def __init__(self, vocab: int, dim: int, positions: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.place = nn.Embedding(positions, dim) if positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids (B, T) -> (B, T, dim). Raises ValueError past the last learned position."""
        x: Tensor = self.token(ids)
        if self.place is not None:
            length = ids.shape[1] if ctx.cache is None else ctx.cache.max_length
            if ctx.consecutive and length > self.place.num_embeddings:
                raise ValueError(
                    f"{plural(length, 'token')}, but only "
                    f"{plural(self.place.num_embeddings, 'position was', 'positions were')} learned"
                )
            x = x + self.place(ctx.positions.clamp(min=0))
        y: Tensor = self.dropout(x)
        return y
