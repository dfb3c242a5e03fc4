"""Activation checkpointing: less memory for more arithmetic. https://arxiv.org/abs/1604.06174"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A block that keeps only its inputs for the way back, and computes the rest a second time there.

    `tree.replace(model, "blocks.*", Checkpointed)` gives it to every block. Values and gradients stay the
    same; a forward pass more is paid.
    """

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.base(*inputs)
        return checkpoint(self.base, *inputs, use_reentrant=False)
