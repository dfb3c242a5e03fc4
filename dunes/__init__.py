"""astral dunes: build, train, change and use small transformers on your own machine.

Importing this package loads nothing heavy: a room (`dunes.checkpoint`, `dunes.train`, ...) is imported, and torch
with it, when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_ROOMS = (
    "augment", "bench", "checkpoint", "data", "generate", "measure", "models", "ops", "parts", "runs", "text",
    "train", "tree",
)  # fmt: skip

if not TYPE_CHECKING:  # else a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_ROOMS, *(name for name in globals() if name.startswith("__"))]
