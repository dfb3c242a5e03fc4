"""The Python environment: its optional packages, and child processes that import from the same places."""

import os
import sys
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


def python_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment that run Python with these arguments and this process's `sys.path`.

    `-P` keeps the working directory, where a user's `json.py` may lie, out of `sys.path`.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": path}
