"""The command line. Only the verbs' functions import torch, so that help is fast."""

import atexit
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from pkgutil import resolve_name
from time import sleep
from typing import Any

from dunes import __version__
from dunes.cli.command import LateCommand, run, with_trust
from dunes.cli.hints import check_options
from dunes.cli.process import exit_with

VERBS = {
    "train": "training:train", "finetune": "training:finetune",
    "generate": "verbs:generate", "chat": "verbs:chat", "complete": "verbs:complete",
    "serve": "serve:serve", "lsp": "serve:lsp", "doctor": "serve:doctor",
    "eval": "verbs:evaluate", "inspect": "verbs:inspect", "convert": "verbs:convert", "export": "verbs:export",
    "augment": "verbs:augment", "compile": "verbs:compile_", "bench": "verbs:bench",
}  # fmt: skip
"""The verbs, and their functions as module:function in `dunes.cli`."""
GROUPS = {"augment": "augment_verb:run_augment", "bench": "bench:run_bench"}
"""Verbs with subcommands, and the functions that run the subcommands."""
ABOUT = "Build, train, change and use small transformers on your own machine. --version prints the versions."


def main() -> None:
    """Run the command line. After a user error, print one line and exit with status 2."""
    exit_with(partial(run_command, sys.argv[1:]), "dunes")


def run_command(arguments: Sequence[str]) -> int:
    """Run `dunes` with these arguments; returns the exit status."""
    warnings.showwarning = _show_warning
    verb = arguments[0] if arguments else ""
    if int(os.environ.get("WORLD_SIZE") or "1") > 1:
        _begin_rank(verb)
    if [*arguments] == ["--version"]:
        print(version())
        return 0
    if verb in GROUPS:
        return int(resolve_name(f"dunes.cli.{GROUPS[verb]}")(arguments[1:]))
    check_options(verb, arguments)
    return run("dunes", ABOUT, {verb: LateCommand(partial(_load, verb)) for verb in VERBS}, arguments)


def _load(verb: str) -> Callable[..., Any]:
    command: Callable[..., Any] = resolve_name(f"dunes.cli.{VERBS[verb]}")
    return command if verb == "doctor" else with_trust(command)


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

    return f"dunes {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"


def _show_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    """Print a warning in one line, without its source location."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
