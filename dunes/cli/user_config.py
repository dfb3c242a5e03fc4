"""The user's own defaults of flags: a TOML file with a section for each verb, such as [train] or [bench.decode].

The values become arguments that are added to the command line, if the command line does not contain their flag.
"""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence, Set
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from dunes.cli import VERBS
from dunes.context import prefix_errors
from dunes.flags import nearest, option

FROM_FILE: ContextVar[Mapping[str, list[str]]] = ContextVar("FROM_FILE")
"""The arguments that were added to the command line, by the name of their field."""
LENGTH = {"minutes", "steps", "epochs"}
"""Flags that give the length of a run; one on the command line replaces all."""
REPEATED = {"track", "adapter", "allow_host"}
"""Flags that are repeated for several values."""


def file_path() -> str:
    """The file: $DUNES_CONFIG, else dunes.toml in $XDG_CONFIG_HOME or ~/.config; empty if there is none."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = os.path.join(folder, "dunes.toml")
    return os.path.expanduser(os.environ.get("DUNES_CONFIG", path if os.path.isfile(path) else ""))


def _section(words: Sequence[str], subcommands: Collection[str]) -> Mapping[str, Any]:
    """The section of a verb, or of a verb and its subcommand. Raises ValueError for unknown sections beside it."""
    path = file_path()
    with prefix_errors(f"{path} cannot be read as TOML", (OSError, ValueError)):
        section = tomllib.loads(Path(path).read_text("utf-8")) if path else {}
    for word, known in zip(words, (VERBS, subcommands), strict=False):
        for name, value in section.items():
            if name not in known or not isinstance(value, dict):
                expected = f"expected a section of a verb{nearest(name, known)}"
                raise ValueError(f"{path}: {name} = {value!r:.60}; {expected}")
        section = section.get(word, {})
    return section


def file_arguments(words: Sequence[str], subcommands: Collection[str], given: Set[str]) -> dict[str, list[str]]:
    """The arguments for the flags in the section of the command `words`, by field, but for flags in `given`.

    Raises ValueError for a file that cannot be read, and for an unknown section.
    """
    result = dict[str, list[str]]()
    for key, value in _section(words, subcommands).items():
        name = option(key)
        field = name.replace("-", "_").removeprefix("no_")
        if given.isdisjoint(LENGTH if field in LENGTH else {field}):
            result[field] = _arguments(name, value, field in REPEATED)
    return result


def _arguments(name: str, value: Any, is_repeated: bool) -> list[str]:
    """The arguments that set a flag."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list) and not is_repeated:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
