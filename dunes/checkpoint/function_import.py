"""Import the function that a card names.

A card is a stranger's file, and to import a module is to run it. So only networks of `dunes.models` are imported
without being asked to, and others inside of `trust_cards`.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from torch import nn

from dunes.checkpoint.weights.header import quote

NAME = re.compile(r"([\w-]+\.py|[A-Za-z_]\w*(\.\w+)*):[A-Za-z_]\w*(\.\w+)*", re.ASCII)
OURS = re.compile(r"dunes\.models\.[a-z]\w*:[A-Za-z]\w*", re.ASCII)


def is_ours(name: str) -> bool:
    """Whether "module:name" would be in `dunes.models`."""
    return OURS.fullmatch(name) is not None


def import_build(name: str, folder: Path) -> Callable[..., nn.Module]:
    """The function or class that "module:name" or "file.py:name" names, for the model in this folder.

    Modules and files are also looked for in the current folder. Raises ValueError if it is not there, or if it is
    one of ours that builds no network.
    """
    module_name, _, attributes = name.partition(":")
    try:
        if NAME.fullmatch(name) is None:
            raise ValueError("expected module:name; functions inside of functions cannot be imported")
        value: Any = _import_module(module_name)
        for attribute in attributes.split("."):
            if not hasattr(value, attribute):
                raise ValueError(f"{module_name} has no {attributes}")
            value = getattr(value, attribute)
        if not callable(value) or (is_ours(name) and not _builds_network(value, module_name)):
            raise ValueError(f"{attributes} builds no network")
    except Exception as error:  # whatever the module raises when it runs
        reason = " ".join(f"{'' if type(error) is ValueError else type(error).__name__ + ': '}{error}".split())
        raise ValueError(
            f"{folder}: built by {quote(name)}, which cannot be imported: {reason[:300]}; run in the folder that "
            "has its file, or pass the function in Python: build="
        ) from None
    build: Callable[..., nn.Module] = value
    return build


def _builds_network(value: Any, module: str) -> bool:
    """Whether this is a module's own class of networks, or a function whose result is annotated as one."""
    result = value if isinstance(value, type) else get_type_hints(value).get("return")
    return value.__module__ == module and isinstance(result, type) and issubclass(result, nn.Module)


def _import_module(name: str) -> ModuleType:
    """A module by its name, or that of a script in the current folder, which may be the one that runs."""
    if not name.endswith(".py"):
        with _current_folder():
            return importlib.import_module(name)
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").name == name:
        return main
    if not Path(name).is_file():
        raise ValueError(f"no file {name} in the current folder")
    specification = importlib.util.spec_from_file_location(Path(name).stem, Path(name).resolve())
    assert specification is not None, "the suffix is Python's"
    assert specification.loader is not None, "the suffix is Python's"
    module = importlib.util.module_from_spec(specification)
    with _current_folder():
        specification.loader.exec_module(module)
    return module


@contextmanager
def _current_folder() -> Iterator[None]:
    """Imports that also look into the current folder, last."""
    before = [*sys.path]
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
