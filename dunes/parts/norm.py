"""Norms with weights."""

import torch
from torch import Tensor, nn

from dunes.ops.rms_norm import fused


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, reduced in float32. https://arxiv.org/abs/1910.07467"""

    supports_packing = True

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in x's dtype, or in autocast's under autocast."""
        return fused(x, self.weight, self.eps)
