"""Changes to a built model, recorded so that a checkpoint repeats them.

Start with `attach` (LoRA), `quantize`, `apply_change`, `merge` and `undo_change`. Each change has a file and an
entry in `CHANGES`. torch is imported when one of these names is first used; `augment.options` does not need it.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

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
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            files = ("changes", "lora", "quantization")
            modules = (importlib.import_module(f"{__name__}.{file}") for file in files)
            return next(getattr(module, name) for module in modules if hasattr(module, name))
        if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


__all__ = [
    "CHANGES", "Adapted", "Adapter", "Change", "Merged", "adapter_active", "apply_change", "attach", "base_model",
    "dequantize", "detach", "make_change", "merge", "quantize", "repeat_structure", "row_adapters", "set_adapter",
    "undo_change",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
