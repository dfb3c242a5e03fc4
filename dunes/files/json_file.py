"""Read and write JSON objects and JSON lines. Files may be untrusted, so error messages are limited."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from os.path import lexists
from pathlib import Path
from typing import Any

from dunes.context import prefix_errors
from dunes.files.atomic import add_path_to_errors, open_handle
from dunes.files.model_file import read_file
from dunes.progress import Line


def read(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ValueError for content that is not one JSON object, for a link that leads out of its folder, and for a
    duplicate key.
    """
    return parse(read_file(path), path)


def read_if_present(path: Path) -> dict[str, Any]:
    """The object in a config file; empty if the file does not exist. Raises ValueError like `read`."""
    return read(path) if lexists(path) else {}


def parse(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON file's bytes into an object; `path` is for error messages. Raises ValueError like `read`."""
    with prefix_errors(f"{path}: not JSON", (ValueError, RecursionError)):
        content = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from key-value pairs, as a hook for `json.loads`. Raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {duplicate[:80]!r} occurs twice")
    return content


def append_text(path: Path, text: str) -> None:
    """Append text to a file, on a new line.

    If a crash truncated the last line, a newline is added first. If writing fails, raises OSError with the file's
    name and leaves the file unchanged.
    """
    with add_path_to_errors(path), open_handle(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = b"\n" * torn + text.encode()
        try:
            while data:
                data = data[os.write(file, data) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append an object to a file as a line of JSON. Raises OSError like `append_text`."""
    append_text(path, json.dumps(record) + "\n")


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file without their newlines; empty if the file does not exist."""
    return path.read_bytes().split(b"\n") if path.is_file() else []


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if the line is not a JSON object, or has a key twice."""
    with suppress(ValueError, RecursionError):
        record = json.loads(text.decode(), object_pairs_hook=unique_keys)
        return record if isinstance(record, dict) else None
    return None


def read_records(
    path: Path, expected: str, fits: Callable[[dict[str, Any]], bool] = bool, warn: Line | None = None
) -> list[dict[str, Any]]:
    """The objects for which `fits` is True in a file of JSON lines; empty if the file does not exist.

    Other lines are skipped; `warn` (by default `print_warning`) is called with a message about skipped lines.
    """
    records, damaged = list[dict[str, Any]](), list[str]()
    for number, text in enumerate(read_lines(path), 1):
        record = parse_line(text)
        if record is not None and fits(record):
            records.append(record)
        elif text.strip():
            damaged.append(f"line {number}: expected {expected}, found {text[:60]!r}; skipped")
    if damaged:
        rest = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        (warn or print_warning)(f"warning: {path}, {damaged[0]}{rest}")
    return records


def print_warning(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)
