"""Run a recipe from the command line: arguments, usage, and one line for a user error."""

import sys
from collections.abc import Callable
from typing import NoReturn

from dunes.cli.main import exit_with


def run_recipe(doc: str, main: Callable[..., int | None]) -> NoReturn:
    """Call `main` with the command-line arguments, and exit with the status it returns (None: 0).

    The line of `doc` that starts with "python" names the arguments; names in brackets are optional. A wrong number
    of arguments prints that line and exits with 2; -h prints `doc`.
    """
    usage = next(line.strip() for line in doc.split("\n") if line.strip().startswith("python "))
    arguments, (_, program, *names) = sys.argv[1:], usage.split()
    if {"-h", "--help"} & {*arguments}:
        print(doc.strip())
        sys.exit(0)
    needed = [name for name in names if not name.startswith("[")]
    if not len(needed) <= len(arguments) <= len(names):
        print(f"usage: {usage}", file=sys.stderr)
        sys.exit(2)
    exit_with(lambda: main(*arguments), program)
