"""What tests of adapters share."""

import torch

from dunes.augment.adapted import Adapted
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from small_models import small_config

IDS = torch.arange(40).view(2, 20)


def build(family="llama", **fields):
    # Other draws have differences near the tolerances of low precision, where the adapter outweighs the base.
    model = initialise(FAMILIES[family].build(small_config(family, **fields)), seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    return model.eval()


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
