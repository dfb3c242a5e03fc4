"""How a model begins when it is trained from scratch."""

import math

import torch
from torch import Tensor, nn

from dunes.parts import Decoder


def initialise(model: Decoder, seed: int = 0) -> Decoder:
    """Fill the weights for a start from scratch, in place; the same seed (modulo 2^64) gives the same weights.

    Matrices get normal noise of deviation 1/sqrt(inputs), embeddings 0.02, biases zero, and what a
    branch adds to the residual stream (attention's `out`, each MLP's `down`) starts at zero, so that
    every block begins as the identity. https://arxiv.org/abs/2203.03466
    """
    noise = torch.Generator().manual_seed(seed % 2**64)

    def normal(weight: Tensor, deviation: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=noise) * deviation)

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                normal(module.weight, 0.02)
            elif isinstance(module, nn.Linear):
                residual = name.endswith(("attn.out", ".down"))
                normal(module.weight, 0.0 if residual else 1 / math.sqrt(module.in_features))
                if module.bias is not None:
                    module.bias.zero_()
    return model
