"""Append-only JSON Lines files, such as metrics: damaged lines are skipped."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dunes.checkpoint.files.atomic import add_path_to_errors, write_file

Warn = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, counted from 1: its bytes without the newline, and its object, or None if damaged."""

    number: int
    text: bytes
    record: dict[str, Any] | None


def append_text(path: Path, text: str) -> None:
    """Append text to a file, on a new line.

    If a crash truncated the last line, a newline is added first. Raises OSError that names the file if writing
    fails, and leaves the file unchanged.
    """
    with add_path_to_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            try:
                _write(file, b"\n" * torn + text.encode())
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append an object as a line. Raises what `append_text` does."""
    append_text(path, json.dumps(record) + "\n")


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that are not blank; none if there is no file."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else ()
    return [Line(n, text, _object(text)) for n, text in enumerate(lines, 1) if text.strip()]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_records(
    path: Path, expected: str, fits: Callable[[dict[str, Any]], bool] = bool, warn: Warn | None = None
) -> list[dict[str, Any]]:
    """The objects for which `fits` is true, none if there is no file.

    `warn` gets a line about the others, by default printed to standard error.
    """
    lines = read_lines(path)
    damaged = [line for line in lines if line.record is None or not fits(line.record)]
    warn_of_damage(path, damaged, expected, warn or print_warning)
    return [line.record for line in lines if line.record is not None and fits(line.record)]


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    """Replace a file by some of its lines, byte for byte. Raises OSError, and changes nothing, if that fails."""
    write_file(path, b"".join(line.text + b"\n" for line in lines))


def print_warning(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def warn_of_damage(path: Path, damaged: Sequence[Line], expected: str, warn: Warn) -> None:
    """Warn that these lines are skipped, in one line with the number of the first; nothing if there are none."""
    if damaged:
        first, more = damaged[0], f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(
            f"warning: {path}, line {first.number}: expected {expected}, found {first.text[:60]!r}; skipped{more}"
        )
