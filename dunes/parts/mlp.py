"""Feed-forward layers, which act on each token separately."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dunes.ops import gated

Act = Callable[[Tensor], Tensor]
"""An elementwise function."""


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared. https://arxiv.org/abs/2109.08668"""
    return x.relu().square()


class MLP(nn.Module):
    """down(act(up(x)))."""

    supports_packing = True

    def __init__(self, dim: int, hidden: int, act: Act = F.gelu, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU with silu. https://arxiv.org/abs/2002.05202"""

    supports_packing = True

    def __init__(self, dim: int, hidden: int, act: Act = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias)
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        y: Tensor = self.down(gated.fused(gate, up) if self.act is F.silu else self.act(gate) * up)
        return y
