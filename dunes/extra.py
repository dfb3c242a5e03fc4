"""Optional packages."""

from importlib import import_module
from typing import Any


def extra(module: str, name: str) -> Any:
    """Import a module of an optional package. Raises ValueError that names the extra if it cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); install it in the folder of dunes' source with: "
            f"pip install -e '.[{name}]'"
        ) from None
