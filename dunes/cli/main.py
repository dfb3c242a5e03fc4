"""Run the command line, also for recipes. Only the verbs' functions import torch, so that help is fast."""

import atexit
import errno
import gc
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from io import BufferedWriter, FileIO, StringIO, TextIOWrapper
from select import select
from time import sleep
from types import FrameType
from typing import Annotated, Any, NoReturn

from dunes import __version__
from dunes.cores import share_cores

VERBS = (
    "train", "finetune", "generate", "chat", "complete", "serve", "lsp", "doctor", "eval",
    "inspect", "convert", "export", "augment", "compile", "bench",
)  # fmt: skip
MODULES = dict.fromkeys(("train", "finetune"), "training") | dict.fromkeys(("serve", "lsp", "doctor"), "serve")
"""Names of the modules of verbs that are not in `verbs`."""
QUICK = ("generate", "chat", "complete")
"""Verbs whose arguments are parsed without the other verbs, since people wait for their first token."""
FUNCTIONS = {"eval": "evaluate", "compile": "compile_"}
"""Names of the functions for verbs that have the name of a Python builtin."""
WORK = ("train", "finetune", "convert", "export", "augment", "compile", "serve", "lsp")
"""Verbs whose result is not their output, unless REPORTS are set: they succeed if it cannot be written."""
REPORTS = {"-h", "--help", "--dry-run", "--config"}
TRUST = {
    "trust_code": "Import functions that models' cards name, which runs code outside of this package.",
    "trust_sources": "Read training text that models' cards name, though this user did not train on it here.",
}
"""Options of every command that opens a model folder."""
ABOUT = "Build, train, change and use small transformers on your own machine. --version prints the versions."


def main() -> None:
    """Run the command line. A user error prints one line and exits with status 2."""
    options = {word.partition("=")[0] for word in sys.argv[2:]}
    exit_with(_main, "dunes", sys.argv[1:2] not in [[verb] for verb in WORK] or not REPORTS.isdisjoint(options))


def _main() -> int:
    warnings.showwarning = _show_warning
    if int(os.environ.get("WORLD_SIZE") or "1") > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, for a rank that may wait for another
        if os.environ.get("RANK") not in (None, "0"):  # errors of the command line are reported by the first rank
            sys.stderr = errors = StringIO()  # until `ranks.joined`
            atexit.register(_report_late, errors)
        if sys.argv[1:2] not in (["train"], ["finetune"]):
            raise ValueError("several processes of torchrun train and finetune; start other commands without it")
    if sys.argv[1:] == ["--version"]:
        print(version())
        return 0
    if sys.argv[1:2] == ["bench"]:
        from dunes import measure
        from dunes.cli import bench

        measure.keep_freed_memory()
        measure.flush_denormals()
        return run("dunes bench", bench.ABOUT, bench.commands(), sys.argv[2:])
    if sys.argv[1:2] == ["augment"]:
        from dunes.cli import augment_verb

        return run("dunes augment", augment_verb.ABOUT, with_trust(augment_verb.COMMANDS), sys.argv[2:])
    call = _parse_alone(sys.argv[1]) if sys.argv[1:] and sys.argv[1] in QUICK else None
    return int(call() or 0) if call else run("dunes", ABOUT, _commands(VERBS), sys.argv[1:])


def _parse_alone(verb: str) -> Callable[[], int | None] | None:
    """The call of this verb; None for help, and for errors, whose messages name options of other verbs."""
    calls, command = [], _commands([verb])[verb]

    @wraps(command)
    def later(*args: Any, **options: Any) -> None:
        calls.append(partial(command, *args, **options))

    del later.__wrapped__  # tyro would follow it
    with suppress(SystemExit), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        run("dunes", "", {verb: later}, sys.argv[1:])
    return calls[0] if calls else None


def _commands(verbs: Sequence[str]) -> dict[str, Callable[..., Any]]:
    modules = {verb: import_module(f"dunes.cli.{MODULES.get(verb, 'verbs')}") for verb in verbs}
    commands = {verb: getattr(modules[verb], FUNCTIONS.get(verb, verb)) for verb in verbs}
    return {verb: work if verb == "doctor" else _with_options(work) for verb, work in commands.items()}


def _report_late(errors: StringIO) -> None:
    """Report errors before `ranks.joined`, unless torchrun ends this process since the first rank failed, too."""
    if sys.stderr is errors and errors.getvalue():
        sleep(20)
        print(errors.getvalue(), file=sys.__stderr__, end="")


class Output(FileIO):
    """A standard stream: what cannot be written ends the command if it `is_result`, and is dropped otherwise."""

    is_result = False

    def write(self, data: Any) -> int:
        """Write the bytes and return their number. Raises SystemExit if the reader has closed the pipe."""
        try:
            while (written := super().write(data)) is None:  # another process has made it non-blocking
                select([], [self], [])
            return written
        except OSError as error:
            if not self.is_result:
                return len(data)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is still buffered
            if error.errno == errno.EPIPE:
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise OSError(error.errno, error.strerror, "standard output") from None


def _open_streams(is_result: bool) -> None:
    """Open the standard streams. Those that were closed become /dev/null, for other files would get their numbers.

    Characters that the locale's encoding lacks are escaped. Streams that a caller has replaced stay.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest that is free
        pass
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__"):
            output, encoding = Output(number, "w", closefd=False), stream.encoding if stream else "utf-8"
            output.is_result = is_result and number == 1
            setattr(sys, name, TextIOWrapper(BufferedWriter(output), encoding, "backslashreplace", None, True))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End by a signal: with cleanup, after which a second SIGTERM or SIGHUP ends the process at once.

    While a module is imported, end at once: torch and numpy catch what is raised in their imports, and the process
    would go on with half of a module.
    """
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is not None:
        os._exit(128 + number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    die_by_signals()
    sys.exit(128 + number)


def die_by_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end the process at once, without cleanup, unless they are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def exit_with(work: Callable[[], int | None], program: str, is_result: bool = True) -> NoReturn:
    """Call `work`, and exit with the status that it returns (0 for None).

    For a user error, print one line and exit with 2; after Ctrl-C, exit with 130. Output that cannot be written is
    such an error if it `is_result`, and is dropped otherwise.
    """
    _open_streams(is_result)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup ignores SIGHUP
            signal.signal(number, _end)
    share_cores()
    try:
        status = work() or 0
        if not sys.stdout.closed:  # a language server has closed it
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        if os.environ.get("DUNES_TRACEBACK"):
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    gc.freeze()  # collecting all of torch's objects takes longer than the rest of the exit
    sys.exit(status)


def version() -> str:
    """A line with the versions of dunes, torch and Python."""
    from importlib import metadata

    return f"dunes {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"


def _show_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    """Print a warning in one line, without its source location."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def run(program: str, about: str, commands: dict[str, Callable[..., Any]], arguments: list[str]) -> int:
    """Parse the arguments and call the command that they name; returns its exit status."""
    import tyro  # late: an interrupt before `exit_with` would print a traceback

    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    status = tyro.extras.subcommand_cli_from_dict(
        commands, args=arguments, prog=program, description=about, config=config
    )
    return int(status or 0)


def with_trust(commands: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The commands, with the options in TRUST added to each."""
    return {name: _with_options(command) for name, command in commands.items()}


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    import tyro

    trust = [keyword(name, False, Annotated[bool, tyro.conf.arg(help=text)]) for name, text in TRUST.items()]

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

    del run.__wrapped__  # tyro would follow it to the inner function
    return with_parameters(run, [*signature(command).parameters.values(), *trust])


def keyword(name: str, default: Any, annotation: Any) -> Parameter:
    """A keyword-only parameter of a command."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_parameters(command: Callable[..., Any], parameters: Sequence[Parameter]) -> Callable[..., Any]:
    """The command with this signature, from which tyro makes its flags."""
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def run_recipe(doc: str, main: Callable[..., int | None]) -> NoReturn:
    """Call `main` with the command-line arguments, and exit with the status that it returns (0 for None).

    The line of `doc` that starts with "python" lists the arguments; names in brackets are optional. If the number
    of arguments is wrong, prints that line and exits with 2. With -h, prints `doc`.
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
