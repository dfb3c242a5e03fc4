"""What tests of adapters share."""

from functools import partial

import torch

from dunes.augment.adapted import Adapted
from small_models import random_model

IDS = torch.arange(40).view(2, 20)


build = partial(random_model, noise=0.05)


def trained(model, name="default", seed=1, noise=0.1):
    """Numbers as after training, in every adapter of that name."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted) and name in module.adapters:
                for p in module[name].parameters():
                    p.add_(torch.randn(p.shape, generator=draw) * noise)
    return model


def difference(a, b):
    return (a.float() - b.float()).abs().max().item()
