"""What tests of adapters share."""

import torch

from dunes.augment.adapted import Adapted
from dunes.models import FAMILIES
from dunes.models.initialise import initialise

IDS = torch.arange(40).view(2, 20)


def build(family="llama"):
    module = FAMILIES[family]
    model = initialise(module.build(module.Config.from_size(50, 32, 2, 32)), seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    return model.eval()


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
