"""Append-only JSON Lines files, such as metrics: damaged lines are skipped."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dunes.files.atomic import add_path_to_errors

Warn = Callable[[str], object]


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


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file without their newlines; none if there is no file."""
    return path.read_bytes().split(b"\n") if path.is_file() else []


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The object in a line; None for anything else."""
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
    records, damaged = list[dict[str, Any]](), list[str]()
    for number, text in enumerate(read_lines(path), 1):
        record = parse_line(text)
        if record is not None and fits(record):
            records.append(record)
        elif text.strip():
            damaged.append(f"line {number}: expected {expected}, found {text[:60]!r}; skipped")
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        (warn or print_warning)(f"warning: {path}, {damaged[0]}{more}")
    return records


def print_warning(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)
