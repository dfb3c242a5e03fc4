"""The dtype that autocast prescribes for matrix products."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype on x's device, or x's own outside of autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
