"""Where a token stands. Rotary positions: https://arxiv.org/abs/2104.09864"""

# Shapes: B batch, T tokens, H heads, D head dim.

from dataclasses import dataclass

import torch
from torch import Tensor

from dunes.ops.rotary import fused
from dunes.parts.context import Context


@dataclass(frozen=True)
class Rotary:
    """Turns queries and keys by angles that grow with the position.

    Half-split layout, as in Hugging Face's LLaMA: dimension i pairs with i + D/2. Holds no tensor,
    so that no checkpoint has to.
    """

    head_dim: int
    base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    def angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, T, D/2) in float32 for positions (B, T)."""
        half = torch.arange(0, self.head_dim, 2, device=at.device).float() / self.head_dim
        angle = at[:, None, :, None].float() / self.base**half
        return angle.cos(), angle.sin()

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        """Turn x (B, H, T, D) according to the context's positions; dtype stays."""

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = self.angles(ctx.at)
            return cos.to(x.dtype), sin.to(x.dtype)

        cos, sin = ctx.once((self, x.dtype), make)
        return fused(x, cos, sin)
