"""Where a token stands. Rotary positions: https://arxiv.org/abs/2104.09864

A scaling stretches them over more positions than a model was trained on: a record that gives the
inverse frequencies (D/2, float32), and a factor for cosines and sines. The operations and their order are
those of transformers, since at position 100,000 another rounding of a frequency is an angle of 0.006.
"""

# Shapes: B batch, T tokens, H heads, D head dim.

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dunes.ops.rotary import fused
from dunes.parts.context import Context


class Scaling(Protocol):
    """Frozen and without tensors, so that a Rotary can be compared and hashed."""

    @property
    def attention(self) -> float:
        """What cosines and sines are multiplied by."""

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        """The angle of each pair of dimensions, (D/2,) or (B, 1, 1, D/2), at position 1 when (B, T) are turned."""


def unscaled(dim: int, base: float | Tensor, device: torch.device) -> Tensor:
    inverse: Tensor = 1.0 / (base ** (torch.arange(0, dim, 2, device=device).float() / dim))
    return inverse


@dataclass(frozen=True)
class Unscaled:
    """The angles as the model was trained with."""

    attention: float = 1.0

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        return unscaled(dim, base, at.device)


@dataclass(frozen=True)
class Linear:
    """All positions closer together. https://arxiv.org/abs/2306.15595"""

    factor: float
    attention: float = 1.0

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        return unscaled(dim, base, at.device) / self.factor


@dataclass(frozen=True)
class Dynamic:
    """A base that grows with the text once that is longer than `length` tokens (NTK-aware).

    https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/

    The base follows from the newest position of each row in the forward. So past `length` a step with a cache
    turns its own query and key by a larger base than the keys that lie in the cache were turned by, and its
    logits are not those of a forward over the whole text. (In transformers the base is that of all rows together,
    and a model remembers the longest text it has met since a short one; here a row depends on itself alone.)
    """

    factor: float
    length: int
    attention: float = 1.0

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        now = (at.amax(1)[:, None, None, None] + 1).clamp(min=self.length)
        grown = base * (self.factor * now / self.length - (self.factor - 1)) ** (dim / (dim - 2))
        return unscaled(dim, torch.where(now > self.length, grown, base), at.device)


@dataclass(frozen=True)
class Yarn:
    """Fast pairs as they were, slow ones as in Linear, a ramp between. https://arxiv.org/abs/2309.00071

    A pair is fast if it turns `fast` times or more within the `length` tokens of training, slow if
    `slow` times or less.
    """

    factor: float
    length: int
    attention: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        first, last = self._ramp(dim, base)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device=at.device)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        wavelength = base ** (torch.arange(0, dim, 2, device=at.device).float() / dim)
        stretched: Tensor = 1.0 / (self.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept
        return stretched

    def _ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The pairs between which the ramp lies."""

        def pair(turns: float) -> float:
            return dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.fast), pair(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return first, last + 0.001 if first == last else last


@dataclass(frozen=True)
class Llama3:
    """Short wavelengths as they were, long ones as in Linear, a ramp between. https://arxiv.org/abs/2407.21783

    Short is under `length / high`, long is over `length / low`.
    """

    factor: float
    low: float
    high: float
    length: int
    attention: float = 1.0

    def inverse(self, dim: int, base: float, at: Tensor) -> Tensor:
        inverse = unscaled(dim, base, at.device)
        wavelength = 2 * math.pi / inverse
        kept = (self.length / wavelength - self.low) / (self.high - self.low)
        between = (1 - kept) * inverse / self.factor + kept * inverse
        stretched = torch.where(wavelength > self.length / self.low, inverse / self.factor, between)
        return torch.where(wavelength < self.length / self.high, inverse, stretched)


UNSCALED = Unscaled()


@dataclass(frozen=True)
class Rotary:
    """Turns queries and keys by angles that grow with the position.

    Half-split layout, as in Hugging Face's LLaMA: dimension i pairs with i + D/2. With `adjacent`,
    as in Meta's and Mistral's own code, dimension 2i pairs with 2i + 1. Holds no tensor, so that no
    checkpoint has to. Raises ValueError for an odd head_dim.
    """

    head_dim: int
    base: float = 10_000.0
    scaling: Scaling = UNSCALED
    adjacent: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    @property
    def supports_packing(self) -> bool:
        """Whether a token's angles depend on its own position alone."""
        return not isinstance(self.scaling, Dynamic)

    def angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, T, D/2) in float32 for positions (B, T)."""
        angle = at[:, None, :, None].float() * self.scaling.inverse(self.head_dim, self.base, at)
        return angle.cos() * self.scaling.attention, angle.sin() * self.scaling.attention

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        """Turn x (B, H, T, D) according to the context's positions; dtype stays."""

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = self.angles(ctx.at)
            return cos.to(x.dtype), sin.to(x.dtype)

        cos, sin = ctx.once((self, x.dtype), make)
        return fused(x, cos, sin, self.adjacent)
