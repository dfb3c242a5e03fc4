"""astral dunes: build, train, change and use small transformers on your own machine.

Importing this package is light: a subpackage (`dunes.checkpoint`, ...) and torch are imported on first access.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from dunes.cores import OWN_CHOICE, waits_are_told

__version__ = "0.2.0"
_ROOMS = (
    "augment", "bench", "checkpoint", "completion", "data", "evaluate", "files", "generate", "inference",
    "measure", "models", "ops", "parts", "runs", "serve", "text", "train", "tree",
)  # fmt: skip

# Where `share_cores` cannot measure how long threads wait, waiting threads always sleep early. OpenMP reads this
# variable once, when torch is loaded.
if "torch" not in sys.modules and not os.environ.keys() & OWN_CHOICE and not waits_are_told():
    os.environ["GOMP_SPINCOUNT"] = "3000"

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute name

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_ROOMS, *(name for name in globals() if name.startswith("__"))]
