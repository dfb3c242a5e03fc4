"""The Python environment: import optional packages, and start child processes with the same `sys.path`."""

import os
import sys
from importlib import import_module
from typing import Any


def extra(module: str, name: str) -> Any:
    """Import a module of an optional package. If that fails, raises ValueError that names the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); install it in the folder of dunes' source with: "
            f"pip install -e '.[{name}]'"
        ) from None


def python_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run Python with these arguments and this process's `sys.path`.

    `-P` keeps the working directory out of `sys.path`, since it may contain a `json.py` of the user.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": path}
