"""Changes to an existing model, recorded so that loading a checkpoint repeats them.

Start with `attach` (LoRA), `quantize`, `apply_change`, `merge` and `undo_change`. Each kind of change has its own
module and an entry in `CHANGES`. torch is imported when one of these names is first used; `augment.options` does
not need torch.
"""

from typing import TYPE_CHECKING

from dunes.extra import attributes_of

if TYPE_CHECKING:
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
    from dunes.augment.lora import Merged, adapter_active, base_model, detach, merge, row_adapters, set_adapter
    from dunes.augment.quantization import dequantize
__all__ = [
    "CHANGES", "Adapted", "Adapter", "Change", "Merged", "adapter_active", "apply_change", "attach", "base_model",
    "dequantize", "detach", "make_change", "merge", "quantize", "repeat_structure", "row_adapters", "set_adapter",
    "undo_change",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__, ("changes", "lora", "quantization"), __all__)
    __dir__ = lambda: sorted({*globals(), *__all__})
