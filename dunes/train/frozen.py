"""The dtype of frozen weights during training."""

import torch
from torch import Tensor, nn

from dunes import tree


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> int:
    """Cast frozen linear layers to the dtype that autocast would cast them to at each use; returns their number.

    Results of training under autocast are equal bit for bit. The weights are rounded in place, so a digest of the
    base or a save must come before. A quantized layer only changes the dtype of its dense form. Trainable weights
    are not changed, and norms and embeddings only to float32: without autocast all of a forward has one dtype.
    """
    count = 0
    if dtype == torch.float32:
        others = [m for m in model.modules() if not tree.linear(tree.innermost(m))]
        for p in [p for m in others for p in m.parameters(recurse=False) if not p.requires_grad]:
            p.data = p.data.to(dtype)
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
