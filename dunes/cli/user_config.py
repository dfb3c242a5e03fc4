"""The user's own defaults of flags: a TOML file with a section for each verb, such as [train] or [bench.decode].

The values become arguments that are added to the command line, if the command line does not contain their flag.
"""

import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import is_dataclass
from inspect import formatannotation, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from dunes.cli import VERBS
from dunes.flags import nearest, option

FROM_FILE: ContextVar[Mapping[str, list[str]]] = ContextVar("FROM_FILE")
"""The arguments that were added to the command line, by the name of their field."""
LENGTH = {"minutes", "steps"}
"""Flags that give the length of a run; one on the command line replaces both."""


class Flag(NamedTuple):
    """A flag: its field or parameter, the type of its value, and true if the flag is repeated for several values.

    `recorded` is true for options that a run records, so that it continues with them.
    """

    field: str
    kind: Any
    repeats: bool
    recorded: bool


def flags_of(command: Callable[..., Any]) -> dict[str, Flag]:
    """The flags of a command, or of a dataclass of options, by name without leading dashes."""
    flags, hints = dict[str, Flag](), get_type_hints(command, include_extras=True)
    recorded = isinstance(command, type) and not hasattr(command, "resume")
    for name, parameter in signature(command).parameters.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        if isinstance(kind, type) and is_dataclass(kind):
            flags |= flags_of(kind)
        elif tyro.conf.Positional not in marks and tyro.conf.Suppress not in marks:
            shown = option(next(filter(None, (getattr(mark, "name", None) for mark in marks)), name))
            flag = Flag(name, kind, tyro.conf.UseAppendAction in marks, recorded)
            flags[f"no-{shown}" if parameter.default is True else shown] = flag
    return flags


def file_path() -> str:
    """The file: $DUNES_CONFIG, else dunes.toml in $XDG_CONFIG_HOME or ~/.config; empty if there is none."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = os.path.join(folder, "dunes.toml")
    return os.path.expanduser(os.environ.get("DUNES_CONFIG", path if os.path.isfile(path) else ""))


def _section(words: Sequence[str], subcommands: Collection[str]) -> Mapping[str, Any]:
    """The section of a verb, or of a verb and its subcommand. Raises ValueError for unknown sections beside it."""
    path = file_path()
    try:
        section = tomllib.loads(Path(path).read_text("utf-8")) if path else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None
    for word, known in zip(words, (VERBS, subcommands), strict=False):
        for name, value in section.items():
            if name not in known or not isinstance(value, dict):
                expected = f"expected a section of a verb{nearest(name, known)}"
                raise ValueError(f"{path}: {name} = {value!r:.60}; {expected}")
        section = section.get(word, {})
    return section


def file_arguments(
    words: Sequence[str], commands: Mapping[str, Callable[..., Any]], given: Set[str]
) -> dict[str, list[str]]:
    """The arguments for the flags in the section of the command `words`, by field, but for flags in `given`.

    With --resume, a run continues with the options that it has recorded; only `RunOptions` are added to them.
    Raises ValueError for an unknown flag and for a value of another type.
    """
    section, result = _section(words, commands), dict[str, list[str]]()
    flags = flags_of(commands[words[-1]]) if section else {}
    for key, value in section.items():
        name = option(key)
        flag = flags.get(name) or flags.get(f"no-{name}")
        if flag is None or not _fits(flag.kind, value):
            a_flag = f"a flag of dunes {' '.join(words)}{nearest(name, flags)}"
            expected = a_flag if flag is None else formatannotation(flag.kind)
            raise ValueError(f"{file_path()}: [{'.'.join(words)}] {key} = {value!r:.60}; expected {expected}")
        same = LENGTH if name in LENGTH else {name.replace("-", "_").removeprefix("no_")}
        if given.isdisjoint(same | {"resume"} if flag.recorded else same):
            result[flag.field.removeprefix("no_")] = _arguments(name, value, flag, flags)
    return result


def _fits(kind: Any, value: Any) -> bool:
    """True if a TOML value is of the type `kind` of a flag."""
    parts, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, list) and all(_fits(parts[0], item) for item in value)
    if parts:
        return any(_fits(part, value) for part in parts)
    return type(value) in {float: (float, int), Path: (str,)}.get(kind, (kind,))


def _arguments(name: str, value: Any, flag: Flag, flags: Collection[str]) -> list[str]:
    """The arguments that set a flag; none if the flag is off by default and stays off."""
    if isinstance(value, bool):
        word = name if value else f"no-{name}"
        return [f"--{word}"] if word in flags else []
    if isinstance(value, list) and not flag.repeats:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
