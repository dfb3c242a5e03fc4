"""A recipe as a command: its arguments, its usage, and a user's mistake on one line."""

import sys
from collections.abc import Callable
from typing import NoReturn

from dunes.cli.main import exit_with


def run_recipe(doc: str, main: Callable[..., int | None]) -> NoReturn:
    """Call `main` with the arguments of the command line, and exit with what it returns (None: 0).

    The line of `doc` that begins with "python" names the arguments, those in brackets may be left out. Another
    number of them prints that line and exits with 2; -h prints all of `doc`.
    """
    usage = next(line.strip() for line in doc.split("\n") if line.strip().startswith("python "))
    given, (_, program, *names) = sys.argv[1:], usage.split()
    if {"-h", "--help"} & {*given}:
        print(doc.strip())
        sys.exit(0)
    needed = [name for name in names if not name.startswith("[")]
    if not len(needed) <= len(given) <= len(names):
        print(f"usage: {usage}", file=sys.stderr)
        sys.exit(2)
    exit_with(lambda: main(*given), program)
