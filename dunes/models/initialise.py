"""Initial weights of a model that is trained from scratch."""

import math
from itertools import chain

import torch
from torch import Tensor, nn

from dunes.measure import ranks
from dunes.parts import Decoder


def initialise(model: Decoder, seed: int = 0, empty: bool = False) -> Decoder:
    """Initialise the weights in place and return the model; the same seed (modulo 2^64) gives the same weights.

    Matrices are drawn from a normal distribution with standard deviation 1/sqrt(fan_in), or 0.02 for embeddings.
    Biases are zero. The projections that add to the residual stream (attention's `out`, each MLP's `down`) are
    zero, so that every block starts as the identity (https://arxiv.org/abs/2203.03466). Projections before a norm
    are not zero, since the norm's gradient at zero would be huge. With `empty`, for a model that was built on the
    meta device, other tensors are set, too: a tensor named in its module's `initial_values` to the value there, a
    norm's weight to 1, and any other tensor to 0.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)

    def normal(weight: Tensor, std: float) -> None:
        weight.copy_(ranks.shard_like(torch.randn(weight.shape, generator=generator) * std, weight))

    blocks = ((name, m, part) for name, m in model.named_modules() for part in ("attn", "mlp"))
    normed = tuple(f"{name}.{part}." for name, m, part in blocks if getattr(m, f"{part}_post_norm", None))

    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()) if empty else ():
            tensor.fill_(name.endswith("weight"))
        for name, module in model.named_modules():
            for key, value in getattr(module, "initial_values", {}).items() if empty else ():
                if (own := getattr(module, key)) is not None:
                    own.copy_(ranks.shard_like(torch.as_tensor(value, dtype=own.dtype).expand(own.shape), own))
            if isinstance(module, nn.Embedding):
                normal(module.weight, 0.02)
            elif isinstance(module, nn.Linear):
                residual = name.endswith(("attn.out", ".down")) and not name.startswith(normed)
                normal(module.weight, 0.0 if residual else 1 / math.sqrt(module.in_features))
                if module.bias is not None:
                    module.bias.zero_()
    return model
