"""Changes to a built model, one file and one entry in CHANGES each, recorded so that a checkpoint repeats them."""

from dunes.augment.adapted import Adapted, Adapter
from dunes.augment.change import Change
from dunes.augment.changes import (
    CHANGES,
    apply_change,
    attach,
    make_change,
    quantize,
    repeat_structure,
    undo_change,
)
from dunes.augment.lora import adapter_active, base_model, detach, row_adapters, set_adapter
from dunes.augment.merge import Merged, merge, unmerge
from dunes.augment.quantize import dequantize

__all__ = [
    "CHANGES",
    "Adapted",
    "Adapter",
    "Change",
    "Merged",
    "adapter_active",
    "apply_change",
    "attach",
    "base_model",
    "dequantize",
    "detach",
    "make_change",
    "merge",
    "quantize",
    "repeat_structure",
    "row_adapters",
    "set_adapter",
    "undo_change",
    "unmerge",
]
