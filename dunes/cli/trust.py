"""--trust-code, the same for every command that opens a model folder."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import tyro

OPTION = inspect.Parameter(
    "trust_code",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        tyro.conf.arg(help="Import functions that models' cards name, which runs code outside of this package."),
    ],
)


def with_trust_code(commands: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The commands with that option."""
    return {name: _with_option(command) for name, command in commands.items()}


def _with_option(command: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(command)

    @wraps(command)
    def run(*args: Any, trust_code: bool = False, **options: Any) -> Any:
        if not trust_code:
            return command(*args, **options)
        from dunes import checkpoint

        with checkpoint.trust_cards():
            return command(*args, **options)

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), OPTION])  # type: ignore[attr-defined]
    run.__annotations__ = {**inspect.get_annotations(command), OPTION.name: OPTION.annotation}
    del run.__wrapped__  # tyro looks at what is inside
    return run
