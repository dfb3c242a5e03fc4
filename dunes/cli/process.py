"""Standard streams, signals and exit status of a process in a terminal or a pipe; recipes also use this module."""

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from select import select
from types import FrameType
from typing import Any, NoReturn

from dunes.cores import share_cores


class Output(FileIO):
    """A standard stream. If a write fails, the command ends (`is_result` is true), or the data is dropped
    (`is_result` is false)."""

    is_result = False

    def write(self, data: Any) -> int:
        """Write the bytes and return their number. Raises SystemExit if the reader has closed the pipe."""
        try:
            while (written := super().write(data)) is None:  # None: a non-blocking stream is full
                select([], [self], [])
            return written
        except OSError as error:
            if not self.is_result:
                return len(data)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # to drop the data that is still buffered
            if error.errno == errno.EPIPE:
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise OSError(error.errno, error.strerror, "standard output") from None


def drop_lost_output() -> None:
    """Ignore later failures to write to standard output, for commands whose result is not printed."""
    output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(output, Output):
        output.is_result = False


def _open_streams() -> None:
    """Open the standard streams. Closed streams are opened on /dev/null, so that no file gets their descriptors.

    Characters that the locale's encoding lacks are escaped. Streams that a caller has replaced are kept.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # `os.open` returns the lowest free number
        pass
    if all((sys.stdin, sys.stdout, sys.stderr)):
        os.close(null)
    sys.stdin = sys.stdin or os.fdopen(null, closefd=False)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__"):
            descriptor = number if stream else null  # a closed one's may be in use: libffi keeps its own file open
            output, encoding = Output(descriptor, "w", closefd=False), stream.encoding if stream else "utf-8"
            output.is_result = number == 1
            setattr(sys, name, TextIOWrapper(BufferedWriter(output), encoding, "backslashreplace", None, True))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: end the process with cleanup. A second SIGTERM or SIGHUP ends the process at once.

    During an import, the process ends at once, without an exception. torch and numpy would catch the exception and
    continue with a half-imported module.
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
    """Let SIGINT, SIGTERM and SIGHUP end the process at once, without cleanup; ignored signals stay ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def exit_with(work: Callable[[], int | None], program: str) -> NoReturn:
    """Call `work`, and exit with the status that it returns (0 for None).

    For a user error, print one line and exit with 2; after Ctrl-C, exit with 130. A failed write to standard
    output also counts as a user error, unless `work` calls `drop_lost_output`.
    """
    _open_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup ignores SIGHUP
            signal.signal(number, _end)
    share_cores()
    try:
        status = work() or 0
        if not sys.stdout.closed:  # the language server closes standard output
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


def run_recipe(doc: str, main: Callable[..., int | None]) -> NoReturn:
    """Call `main` with the command-line arguments, and exit with the status that it returns (0 for None).

    The line of `doc` that starts with "python" lists the arguments; names in brackets are optional. If the number
    of arguments is wrong, prints this line and exits with 2. With -h, prints `doc`.
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
