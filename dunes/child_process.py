"""Command line and environment of a child Python process."""

import os
import sys


def python_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment that run Python with these arguments and this process's `sys.path`.

    `-P` keeps the working directory, where a user's `json.py` may lie, out of `sys.path`.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": path}
