"""Changes to a built model, one file each. Each leaves a note in JSON, with which a checkpoint can repeat it."""

from dunes.augment.adapted import Adapted, Adapter
from dunes.augment.lora import attach, bare, detach, select, using
from dunes.augment.merge import Merged, merge, unmerge
from dunes.augment.quantize import dequantize, quantize

__all__ = [
    "Adapted",
    "Adapter",
    "Merged",
    "attach",
    "bare",
    "dequantize",
    "detach",
    "merge",
    "quantize",
    "select",
    "unmerge",
    "using",
]
