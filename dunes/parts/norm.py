"""Root mean square norm: https://arxiv.org/abs/1910.07467"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, reduced in float32 whatever the dtypes are."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), dtype of x."""
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).type_as(x) * self.weight.type_as(x)
