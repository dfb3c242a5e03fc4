"""The dtype of frozen weights during training."""

import torch
from torch import Tensor, nn

from dunes import tree


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> int:
    """Cast frozen linear layers to the dtype that autocast would cast them to at each use; returns how many.

    Results of training under autocast are equal bit for bit. The weights are rounded in place, so a digest of the
    base or a save must come before. A quantized layer only changes the dtype of its dense form. Norms, embeddings
    and trainable weights are not changed.
    """
    count = 0
    for place in tree.places(model):
        base = tree.innermost(place.module)
        weight = getattr(base, "weight", None)
        if not tree.linear(base) or any(p.requires_grad for p in base.parameters()):
            continue
        if isinstance(weight, Tensor) and weight.dtype != dtype:
            for p in base.parameters():
                p.data = p.data.to(dtype)
            count += 1
        elif weight is None and hasattr(base, "dtype") and base.dtype != dtype:
            base.dtype = dtype  # type: ignore[assignment]
            count += 1
    return count
