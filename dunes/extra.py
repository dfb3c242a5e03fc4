"""The Python environment: import late or optional modules, and start child processes with the same `sys.path`."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def extra(module: str, name: str) -> Any:
    """Import a module of an optional package. If the import fails, raises ValueError with the name of the extra to
    install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); to install it: pip install 'astral-dunes[{name}]'"
        ) from None


def attributes_of(package: str, files: Sequence[str], names: Sequence[str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: it finds `names` in the modules `files`, and imports modules at first use."""

    def find(name: str) -> Any:
        if name in names:
            modules = (import_module(f"{package}.{file}") for file in files)
            return next(getattr(module, name) for module in modules if hasattr(module, name))
        if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return find


def python_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run Python with these arguments and this process's `sys.path`.

    `-P` keeps the working directory out of `sys.path`, since that directory may contain the user's own `json.py`.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": path}
