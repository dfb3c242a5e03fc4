"""A router of two layers, with noise and its own balance loss in training (LLaMA-MoE).

https://arxiv.org/abs/2406.16554, after https://arxiv.org/abs/1701.06538
"""

# Shapes: N tokens, E experts, D width.

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_NOISE = 1e-2


class NoisyGate(nn.Module):
    """out(tanh(hidden(x))); in training plus noise of standard deviation softplus(noise(x)) + 0.01.

    The balance loss is `balance` times the sum of two squared coefficients of variation over the experts: of their
    weights (importance), and of the probabilities that redrawn noise would choose them (load).
    """

    supports_packing = True

    def __init__(self, dim: int, experts: int, top_k: int, balance: float = 0.01) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, experts, bias=False)
        self.out = nn.Linear(experts, experts, bias=False)
        self.noise = nn.Linear(dim, experts, bias=False)
        self.top_k, self.balance = top_k, balance
        self.recorded: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> logits (N, E)."""
        logits: Tensor = self.out(self.hidden(x).tanh())
        if not self.training:
            return logits
        deviation = F.softplus(self.noise(x)) + LEAST_NOISE
        noisy = logits + torch.randn_like(logits) * deviation
        if self.recorded is not None and self.balance:
            self.recorded.append(torch.stack([logits, noisy, deviation], 1))
        return noisy

    def auxiliary_losses(self, recorded: Sequence[Tensor], real: Tensor | None) -> dict[str, Any]:
        """Balance loss of the recorded logits. Only `real` tokens count."""
        parts = torch.cat([*recorded]).float()
        count = parts.new_ones(len(parts), 1) if real is None else real.repeat(len(recorded))[:, None].float()
        logits, noisy, deviation = parts.masked_fill(count[..., None] == 0, 1.0).unbind(1)  # padding may be NaN
        importance = _top_weights(noisy, self.top_k) * count
        load = _chances(logits, noisy, deviation, self.top_k) * count
        return {"balance": self.balance * (_squared_variation(importance) + _squared_variation(load))}


def _top_weights(logits: Tensor, top_k: int) -> Tensor:
    """Softmax over the highest `top_k` logits (N, E), zero for the others."""
    top = logits.topk(top_k)
    return torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))


def _chances(logits: Tensor, noisy: Tensor, deviation: Tensor, top_k: int) -> Tensor:
    """Probability (N, E) that an expert's logit with new noise is among the top k, with other logits unchanged."""
    if top_k == noisy.shape[-1]:
        return torch.ones_like(noisy)
    top = noisy.topk(top_k + 1).values
    last, next_ = top[:, top_k - 1, None], top[:, -1, None]
    rival = torch.where(noisy >= last, next_, last)
    chances: Tensor = torch.special.ndtr((logits - rival) / deviation)
    return chances


def _squared_variation(x: Tensor) -> Tensor:
    """Squared coefficient of variation of the sums over tokens (N, E)."""
    sums = x.sum(0)
    return sums.var() / (sums.mean().square() + 1e-10)
