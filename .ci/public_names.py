"""The public Python names by room, each of which has a docstring: `python .ci/public_names.py` fails otherwise.

Public names are those that a room's `__init__` exports or its docstring names, and those that recipes, README and
docs import from its modules or write in full. .ci/docs_site.py makes the site's pages of Python names from them.
"""

import ast
import importlib.util
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import dunes  # noqa: E402 - the package beside this file, not an installed one


def guides() -> Iterator[str]:
    """The texts of README and docs, but for the log and the record of decisions."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    yield from (file.read_text() for file in files if file.parent.name != "log" and file.name != "decisions.md")


def examples() -> Iterator[str]:
    """The Python code of recipes, README and docs."""
    yield from (file.read_text() for file in sorted((ROOT / "recipes").glob("*.py")))
    for text in guides():
        yield from re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def full_names() -> list[str]:
    """Dotted names in the guides, and what looks like one: `dunes.json`."""
    return [name for text in guides() for name in re.findall(r"\bdunes(?:\.\w+)+", text)]


def names_in(code: str) -> Iterator[str]:
    """The dotted names below `dunes` that code imports, and the attributes of imported modules that it uses."""
    tree, modules = ast.parse(code), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("dunes."):
            for name in node.names:
                yield f"{node.module}.{name.name}"
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def resolve(dotted: str) -> Any:
    """The object of a dotted name, whose module is imported; None if the name has no object."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def home(dotted: str, value: Any) -> tuple[str, str]:
    """The package that lists the object of a dotted name, and its name there: "dunes.train" and "Trainer"."""
    module, _, name = dotted.rpartition(".")
    origin = getattr(value, "__module__", None) or ""
    module = origin if origin.startswith("dunes.") else module
    room = ".".join(module.split(".")[:2])
    if not hasattr(sys.modules[room], "__path__"):
        room = "dunes"
    elif getattr(sys.modules[room], name, None) is value:
        return room, name
    return room, f"{module.removeprefix(f'{room}.')}.{name}"


def public_names() -> dict[str, list[str]]:
    """The names to list by package, those of the package itself before those of its modules."""
    public = defaultdict[str, set[str]](set)
    for room in (*dunes._ROOMS, "cli"):
        module = importlib.import_module(f"dunes.{room}")
        own = getattr(module, "__all__", None) or [n for n, o in vars(module).items() if is_own(module, n, o)]
        public[module.__name__].update(own)
        for name in re.findall(r"`([a-z_]+\.\w+)`", module.__doc__ or ""):
            if importlib.util.find_spec(f"{module.__name__}.{name.split('.')[0]}"):
                assert resolve(f"{module.__name__}.{name}") is not None, f"{module.__name__} has no {name}"
                public[module.__name__].add(name)
    for dotted in sorted({*full_names(), *(name for code in examples() for name in names_in(code))}):
        value = resolve(dotted)
        if value is not None and not isinstance(value, ModuleType):
            room, name = home(dotted, value)
            public[room].add(name)
    return {room: sorted(names, key=lambda n: ("." in n, n.lower())) for room, names in public.items()}


def is_own(module: ModuleType, name: str, value: Any) -> bool:
    """True for what a module without `__all__` defines for others."""
    return not name.startswith("_") and (name.isupper() or getattr(value, "__module__", "") == module.__name__)


def is_callable(value: Any) -> bool:
    """True for functions, also in wrappers like `cache`, and for classes other than protocols."""
    if inspect.isclass(value):
        return not getattr(value, "_is_protocol", False)
    return inspect.isroutine(value) or hasattr(value, "__wrapped__")


def docstring(dotted: str) -> str:
    """The docstring of a class or function, or the one that follows a constant in its file; "" without one."""
    value = resolve(dotted)
    if inspect.isclass(value):
        return class_docstring(value)
    if is_callable(value):
        return inspect.getdoc(value) or ""
    module, _, name = dotted.rpartition(".")
    return constant_docstring(sys.modules[module], name)


def class_docstring(value: type) -> str:
    """The docstring of a class, or the comment in its first line where `dunes -h` would print a docstring."""
    text = inspect.cleandoc(vars(value).get("__doc__") or "")
    if text and not text.startswith(f"{value.__name__}("):  # the signature that `dataclass` writes
        return text
    comment = re.search(r"^class .*:  # (.*)", inspect.getsource(value), re.MULTILINE)
    return f"{comment[1][0].upper()}{comment[1][1:]}." if comment else ""


def constant_docstring(module: ModuleType, name: str) -> str:
    """The string after the assignment of a constant, in this module or the one from which it imports it."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(name == alias.name for alias in node.names):
            return constant_docstring(importlib.import_module(str(node.module)), name)
    for node, following in pairwise(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = following.value if isinstance(following, ast.Expr) else None
            return str(value.value) if isinstance(value, ast.Constant) else ""
    return ""


def missing_docstrings() -> Iterator[str]:
    """A line for each public name, and public method or property of a public class, that has no docstring."""
    for package, names in public_names().items():
        for dotted in (f"{package}.{name}" for name in names):
            if not docstring(dotted):
                yield f"{dotted} has no docstring"
            value = resolve(dotted)
            members = vars(value).items() if inspect.isclass(value) else ()
            fields = getattr(value, "__dataclass_fields__", {})
            bare = (name for name, member in members if name not in fields and is_undocumented(name, member))
            yield from (f"{dotted}.{name} has no docstring" for name in bare)


def is_undocumented(name: str, member: Any) -> bool:
    """True for a public method or property without a docstring."""
    kinds = (FunctionType, classmethod, staticmethod, property, cached_property)
    return not name.startswith("_") and isinstance(member, kinds) and not member.__doc__


def main() -> int:
    missing = [*missing_docstrings()]
    for line in missing:
        print(line, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
