"""A change of a test's own: blocks that are copied behind themselves and add nothing at first (LLaMA Pro).

https://arxiv.org/abs/2401.02415
"""

from copy import deepcopy

import torch
from torch import nn

from dunes import tree
from dunes.augment import Adapted, Change
from dunes.augment.quantized import Quantized

VERSION = 1


class Gate(nn.Module):
    """A block whose contribution is scaled, so that no Hugging Face config describes the model."""

    supports_packing = True

    def __init__(self, block):
        super().__init__()
        self.base, self.scale = block, nn.Parameter(torch.empty((), device=next(block.parameters()).device))

    def forward(self, x, ctx=None, layer=0):
        return x + self.scale * (self.base(x, ctx, layer) - x)


def decide(model, options):
    for place in tree.places(model):
        if isinstance(tree.innermost(place.module), Quantized) or isinstance(place.module, Adapted):
            earlier = "quantized" if isinstance(tree.innermost(place.module), Quantized) else "adapted"
            raise ValueError(f"{place.name}: already {earlier}; expand the dense model first")
    places = {f"blocks.{2 * i + 1}": {"of": i} for i in range(len(model.blocks))}
    return Change("expand", VERSION, options.request(), places, tuple(f"{place}.**" for place in places))


def shape(model, change):
    for place, decided in change.places.items():
        index = int(place.split(".")[1])
        model.blocks.insert(index, Gate(deepcopy(model.blocks[index - 1])))
        assert decided["of"] == index // 2


@torch.no_grad()
def fill(model, change, weights):
    for place in change.places:
        model.get_submodule(place).scale.zero_()
