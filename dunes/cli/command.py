"""Parse a command line and call the command's function. Several commands share the options defined here."""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache, reduce, wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from operator import or_
from typing import Annotated, Any, cast

from dunes.files.model_file import trust_cards

TRUST = {
    "trust_code": "Import the functions listed in a model's card; this runs code from outside this package.",
    "trust_sources": "Read the training text listed in a model's card, even if this user did not train on it.",
}
"""Additional options of every command that opens a model folder, with their help texts."""
GIVEN: ContextVar[Set[str]] = ContextVar("GIVEN", default=frozenset())
"""Names of the options on the command line, without "no_", including options set to their defaults."""


class LateCommand:
    """A command that is imported only when its parameters are needed; `load` returns the command."""

    def __init__(self, load: Callable[[], Callable[..., Any]]) -> None:
        self._load = cache(load)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._load()(*args, **options)

    __signature__ = property(lambda self: signature(self._load()))
    __annotations__ = property(lambda self: self._load().__annotations__)
    __doc__ = property(lambda self: self._load().__doc__)


def run(program: str, about: str, commands: Mapping[str, Callable[..., Any]], arguments: Sequence[str]) -> int:
    """Parse the arguments and call the chosen command; returns its exit status."""
    import tyro  # imported late, since an interrupt before `exit_with` would print a traceback

    from dunes.cli.user_config import FROM_FILE, file_arguments, file_path

    end = [*arguments, "--"].index("--")  # then only text follows
    flags = [word.partition("=")[0][2:].replace("-", "_") for word in arguments[:end] if word.startswith("--")]
    GIVEN.set({name.removeprefix("no_") for name in flags})
    verb = arguments[0] if arguments and arguments[0] in commands else None
    reads_file = verb is not None and {"-h", "--help"}.isdisjoint(arguments[:end])
    added = file_arguments([*program.split()[1:], *arguments[:1]], commands, GIVEN.get()) if reads_file else {}
    FROM_FILE.set(added)
    arguments = [*arguments[:end], *chain(*added.values()), *arguments[end:]]
    choices = []
    for name, command in commands.items():
        summary = None if verb in (None, name) else "-"  # reading the docstring would import the command
        choices.append(Annotated[Any, tyro.conf.subcommand(name, description=summary, constructor=command)])
    config, form = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes), cast(Any, reduce(or_, choices))
    try:
        return tyro.cli(form, args=arguments, prog=program, description=about, config=config) or 0
    except (ValueError, OSError, SystemExit) as error:
        if added and getattr(error, "code", 2) == 2:  # tyro's; others are those of signals
            print(f"from {file_path()}: {' '.join(chain(*added.values()))}", file=sys.stderr)
        raise


def with_trust(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the additional options in TRUST."""
    import tyro

    trust = [keyword(name, False, Annotated[bool, tyro.conf.arg(help=text)]) for name, text in TRUST.items()]

    @wraps(command)
    def run(*args: Any, trust_code: bool = False, trust_sources: bool = False, **options: Any) -> Any:
        with ExitStack() as trusted:
            trusted.enter_context(trust_cards(trust_code))
            if trust_sources:
                from dunes.checkpoint import trained_text

                trusted.enter_context(trained_text.trust_sources())
            return command(*args, **options)

    del run.__wrapped__  # tyro would follow `__wrapped__` to the command without TRUST
    return with_parameters(run, [*signature(command).parameters.values(), *trust])


def keyword(name: str, default: Any, annotation: Any) -> Parameter:
    """A keyword-only parameter of a command."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_parameters(command: Callable[..., Any], parameters: Sequence[Parameter]) -> Callable[..., Any]:
    """Give the command a signature with these parameters; tyro derives the flags from it."""
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
