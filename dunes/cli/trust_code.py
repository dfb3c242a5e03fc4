"""--trust-code and --trust-sources, the same for every command that opens a model folder."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Annotated, Any

import tyro

HELP = {
    "trust_code": "Import functions that models' cards name, which runs code outside of this package.",
    "trust_sources": "Read training text that models' cards name, though this user did not train on it here.",
}
OPTIONS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, tyro.conf.arg(help=text)],
    )
    for name, text in HELP.items()
]


def with_trust(commands: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Add these options to the commands."""
    return {name: _with_options(command) for name, command in commands.items()}


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(command)

    @wraps(command)
    def run(*args: Any, trust_code: bool = False, trust_sources: bool = False, **options: Any) -> Any:
        with ExitStack() as trusted:
            if trust_code:
                from dunes import checkpoint

                trusted.enter_context(checkpoint.trust_cards())
            if trust_sources:
                from dunes.checkpoint import trained_text

                trusted.enter_context(trained_text.trust_sources())
            return command(*args, **options)

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *OPTIONS])  # type: ignore[attr-defined]
    run.__annotations__ = {**inspect.get_annotations(command), **{o.name: o.annotation for o in OPTIONS}}
    del run.__wrapped__  # tyro would follow it to the inner function
    return run
