"""What tests of adapters share."""

import torch

from dunes.augment.adapted import Adapted


def trained(model, name="default", seed=1):
    """Numbers as after training, in every adapter of that name."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted) and name in module.adapters:
                for p in module[name].parameters():
                    p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    return model


def difference(a, b):
    return (a.float() - b.float()).abs().max().item()
