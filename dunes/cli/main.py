"""The command line. Only the verbs' functions import torch, so that help is fast."""

import atexit
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from time import sleep
from typing import Any

from dunes.cli import GROUPS, VERBS
from dunes.cli.command import LateCommand, run, with_trust
from dunes.cli.hints import check_options
from dunes.cli.process import exit_with

OPENS_NO_MODEL = ("doctor", "help")
ABOUT = """Build, train, change and use small transformers on your own machine.

--version prints the versions, --completion bash|zsh|fish a script for the Tab key."""


def main() -> None:
    """Run the command line. After a user error, print one line and exit with status 2."""
    exit_with(partial(run_command, sys.argv[1:]), "dunes")


def run_command(arguments: Sequence[str]) -> int:
    """Run `dunes` with these arguments; returns the exit status."""
    warnings.showwarning = _show_warning
    verb = arguments[0] if arguments else ""
    processes = os.environ.get("WORLD_SIZE") or "1"
    if not processes.isdecimal():
        raise ValueError(f"WORLD_SIZE is {processes!r}; expected a number of processes; unset it without torchrun")
    if int(processes) > 1:
        _begin_rank(verb)
    if [*arguments] == ["--version"]:
        print(version())
        return 0
    if verb == "--completion":
        if arguments[1:] not in (["bash"], ["zsh"], ["fish"]):
            raise ValueError(f"--completion {' '.join(arguments[1:])}: expected bash, zsh or fish")
        print(Path(__file__).with_name(f"completion.{arguments[1].replace('zsh', 'bash')}").read_text(), end="")
        return 0
    check_options(verb, arguments[1:])
    if verb in GROUPS:
        module = import_module(f"dunes.cli.{GROUPS[verb]}")
        return run(f"dunes {verb}", module.ABOUT, module.commands(), arguments[1:])
    return run("dunes", ABOUT, {verb: LateCommand(partial(load_command, verb)) for verb in VERBS}, arguments)


def load_command(verb: str) -> Callable[..., Any]:
    """The function of a verb, with the options of commands that open models."""
    command: Callable[..., Any] = resolve_name(f"dunes.cli.{VERBS[verb]}")
    return command if verb in OPENS_NO_MODEL else with_trust(command)


def _begin_rank(verb: str) -> None:
    """Prepare a process that torchrun has started. Raises ValueError for verbs that run in a single process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end a waiting rank
    if os.environ.get("RANK") not in (None, "0"):  # only rank 0 reports errors of the command line
        sys.stderr = errors = StringIO()  # `ranks.process_group` restores stderr
        atexit.register(_report_late, errors)
    if verb not in ("train", "finetune"):
        raise ValueError("torchrun can start only train and finetune; start other commands without it")


def _report_late(errors: StringIO) -> None:
    """At exit, print this rank's errors after a delay of 20 s. If rank 0 failed, torchrun ends this process during
    the delay."""
    if sys.stderr is errors and errors.getvalue():
        sleep(20)
        print(errors.getvalue(), file=sys.__stderr__, end="")


def version() -> str:
    """A line with the versions of dunes, torch and Python."""
    from importlib import metadata

    from dunes import __version__

    return f"dunes {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"


def _show_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    """Print a warning in one line, without its source location."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
