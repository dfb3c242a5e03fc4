"""This Python in another process."""

import os
import sys


def python_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run Python with these arguments and this process's modules.

    Without them `-c` and `-m` would look into the working directory first, where a user's `json.py` may lie.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": path}
