"""Which dtype matrix products run in right now."""

import torch
from torch import Tensor


def computing(x: Tensor) -> torch.dtype:
    """The dtype that autocast asks for on x's device, or x's own outside of autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
