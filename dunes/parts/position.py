"""Rotary position embeddings: https://arxiv.org/abs/2104.09864

A scaling extends a model to longer contexts than in training. A scaling is a dataclass that computes the inverse
frequencies (D/2,) in float32 and has a factor for cosines and sines. The operations and their order are the same
as in transformers, because a frequency that is rounded differently changes the angle at position 100,000 by 0.006.
"""

# Shapes: B batch, T tokens, H heads, D head dim.

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dunes.ops.rotary import fused
from dunes.parts.context import ForwardContext

Position = Callable[[Tensor, ForwardContext], Tensor]
"""A function that encodes positions into queries or keys (B, H, T, D)."""


class Scaling(Protocol):
    """The interface of a scaling: a frozen dataclass without tensors, so that a Rotary is hashable."""

    @property
    def attention_factor(self) -> float:
        """Factor by which cosines and sines are multiplied."""

    def inverse_frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        """The angle (D/2,), in radians, by which each pair of dimensions is rotated per position."""


def base_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """The unscaled frequencies (D/2,): base^(-2i/D) for pair i."""
    frequencies: Tensor = 1.0 / (base ** (torch.arange(0, dim, 2, device=device).float() / dim))
    return frequencies


@dataclass(frozen=True)
class Unscaled:
    """No scaling: the frequencies that the model was trained with."""

    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        return base_frequencies(dim, base, device)


@dataclass(frozen=True)
class Linear:
    """Position interpolation: all frequencies are divided by `factor`. https://arxiv.org/abs/2306.15595"""

    factor: float
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        return base_frequencies(dim, base, device) / self.factor


@dataclass(frozen=True)
class Yarn:
    """YaRN: divides low frequencies by `factor`, keeps high ones, and interpolates linearly for those in between.

    A frequency is high if its pair of dimensions makes `beta_fast` or more rotations within the original context
    of `length` tokens. With `beta_slow` or fewer rotations, the frequency is low. https://arxiv.org/abs/2309.00071
    """

    factor: float
    length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inverse_frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        first, last = self._ramp(dim, base)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
        unchanged = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        wavelength = base ** (torch.arange(0, dim, 2, device=device).float() / dim)
        frequencies: Tensor = 1.0 / (self.factor * wavelength) * (1 - unchanged) + 1.0 / wavelength * unchanged
        return frequencies

    def _ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The indices of the pairs at which the ramp starts and ends."""

        def pair(rotations: float) -> float:
            return dim * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return first, last + 0.001 if first == last else last


@dataclass(frozen=True)
class Llama3:
    """Llama 3's scaling: divides the frequencies of long wavelengths by `factor`, and keeps those of short ones.

    A wavelength (in tokens) is short below `length / high_freq_factor`, and long above `length / low_freq_factor`.
    In between, divided and original frequencies are blended. https://arxiv.org/abs/2407.21783
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    length: int
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        frequencies = base_frequencies(dim, base, device)
        wavelength = 2 * math.pi / frequencies
        unchanged = (self.length / wavelength - low) / (high - low)
        ramp = (1 - unchanged) * frequencies / self.factor + unchanged * frequencies
        scaled = torch.where(wavelength > self.length / low, frequencies / self.factor, ramp)
        return torch.where(wavelength < self.length / high, frequencies, scaled)


UNSCALED = Unscaled()


@dataclass(frozen=True)
class Rotary:
    """Rotates pairs of dimensions of queries and keys by angles proportional to the position.

    By default dimension i pairs with i + D/2 (half-split layout), as in Hugging Face's LLaMA. With `adjacent`,
    dimension 2i pairs with 2i + 1, as in Meta's and Mistral's own code. A Rotary has no tensors, so it adds
    nothing to a checkpoint. Raises ValueError for an odd head_dim.
    """

    head_dim: int
    base: float = 10_000.0
    scaling: Scaling = UNSCALED
    adjacent: bool = False
    supports_packing: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.head_dim % 2:  # without this error, one dimension would be left out, with a warning
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, T, D/2) in float32 of the angles at positions (B, T)."""
        frequencies = self.scaling.inverse_frequencies(self.head_dim, self.base, positions.device)
        angle = positions[:, None, :, None].float() * frequencies
        return angle.cos() * self.scaling.attention_factor, angle.sin() * self.scaling.attention_factor

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Rotate x (B, H, T, D) by the context's positions; the dtype stays the same."""

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = self.angles(ctx.positions)
            return cos.to(x.dtype), sin.to(x.dtype)

        cos, sin = ctx.once((self, x.dtype), make)
        rotated: Tensor = fused(x, cos, sin, self.adjacent)
        return rotated


@dataclass(frozen=True)
class PartialRotary:
    """Rotates only the first `rotary.head_dim` dimensions of each head.

    GPT-NeoX rotates a quarter: https://arxiv.org/abs/2204.06745
    """

    rotary: Rotary
    supports_packing: ClassVar[bool] = True

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        rotated, rest = x.tensor_split([self.rotary.head_dim], -1)
        return torch.cat([self.rotary(rotated, ctx), rest], -1)


@dataclass(frozen=True)
class Alibi:
    """ALiBi: a bias of slope * (key position - query position), with one slope per head and no other position
    encoding.

    Head h of H has slope 2^(-8 h / H). If H is not a power of two, let P be the next smaller power of two. The
    first P heads have the slopes of a model with P heads. The other heads have every second slope of a model with
    2 P heads. https://arxiv.org/abs/2108.12409
    """

    heads: int
    supports_packing: ClassVar[bool] = True

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return x

    def slopes(self, device: torch.device) -> Tensor:
        """The slopes (H,), float32."""
        power = 1 << (self.heads.bit_length() - 1)
        first = torch.arange(1, power + 1, device=device) * (8 / power)
        others = (torch.arange(self.heads - power, device=device) + 0.5) * (8 / power)
        return torch.exp2(-torch.cat([first, others]))

    def bias(self, query: Tensor, key: Tensor) -> Tensor:
        """The bias (B or 1, H, T, S) for positions of queries (B or 1, T) and keys (B or 1, S)."""
        distance = key[:, None, None, :] - query[:, None, :, None]
        return self.slopes(key.device)[:, None, None] * distance
