"""Activation checkpointing: less memory for more computation. https://arxiv.org/abs/1604.06174"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A block that saves only its inputs for the backward pass and recomputes the rest there.

    `tree.replace(model, "blocks.*", Checkpointed)` wraps every block. Values and gradients stay the same, at the
    cost of one more forward pass.
    """

    supports_packing = True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.base(*inputs)
        return checkpoint(self.base, *inputs, use_reentrant=False)
