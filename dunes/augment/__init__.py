"""Changes to a built model, one file each. Each returns a note in JSON, from which a checkpoint repeats it."""

from dunes.augment.adapted import Adapted, Adapter
from dunes.augment.lora import adapter_active, attach, base_model, detach, row_adapters, set_adapter
from dunes.augment.merge import Merged, merge, unmerge
from dunes.augment.quantize import dequantize, quantize

__all__ = [
    "Adapted",
    "Adapter",
    "Merged",
    "adapter_active",
    "attach",
    "base_model",
    "dequantize",
    "detach",
    "merge",
    "quantize",
    "row_adapters",
    "set_adapter",
    "unmerge",
]
