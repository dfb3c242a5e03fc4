"""What frozen weights are kept as while others beside them learn."""

import torch
from torch import Tensor, nn

from dunes import tree


def halved(model: nn.Module, dtype: torch.dtype) -> int:
    """Keep frozen linear maps in the dtype that autocast would cast them to at each use; how many were changed.

    The results of training under autocast are the same, bit for bit. The weights are rounded for good: what is
    said of the base by its numbers (a digest, a save) is to be taken before. What is kept in few bits only
    changes the dtype of its dense form. Norms, embeddings and all that learns stay as they are.
    """
    changed = 0
    for place in tree.places(model):
        base = tree.innermost(place.module)
        weight = getattr(base, "weight", None)
        if not tree.linear(base) or any(p.requires_grad for p in base.parameters()):
            continue
        if isinstance(weight, Tensor) and weight.dtype != dtype:
            for p in base.parameters():
                p.data = p.data.to(dtype)
            changed += 1
        elif weight is None and hasattr(base, "dtype") and base.dtype != dtype:
            base.dtype = dtype  # type: ignore[assignment]
            changed += 1
    return changed
