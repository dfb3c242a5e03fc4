"""Rows of files: one JSON object a line, one JSON list, or parquet; the first two gzipped or not."""

import gzip
import io
import json
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from dunes.data.files import open_plain

LIMIT_ROW, LIMIT_LIST = 1 << 24, 1 << 31
"""The longest line, and the longest file that is one JSON list, in bytes."""

LINES, TABLE = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), ".parquet"
JSON = (".json", ".json.gz")
"""How the names of files end that hold rows, and of files that may hold them."""

PARQUET_ROWS = 8192
"""Rows of a table in memory at a time."""


def form(path: Path) -> str:
    """How the rows of a file are written: a JSON list, JSON lines or parquet. Raises OSError."""
    if _is_table(path):
        return "parquet"
    with _opened(path) as file:
        return "a JSON list" if _first(file) == b"[" else "JSON lines"


def rows(path: Path, fields: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Each row with its place, file and line or row; of a table with these fields, if any, only they are read.

    Raises ValueError that names the file, the line or row, what was expected and what was found.
    """
    try:
        if _is_table(path):
            yield from _table(path, fields)
            return
        with _opened(path) as file:
            yield from _listed(path, file) if _first(file) == b"[" else _lines(path, file)
    except EOFError as error:
        raise ValueError(f"{path}: cannot be read: {error}; copy or download it again") from None
    except (OSError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def first_row(path: Path) -> Any:
    """The first row of a file, without reading what follows it. Raises ValueError if it begins with none."""
    try:
        if _is_table(path):
            return next(_table(path, ()))[1]
        with _opened(path) as file:
            if _first(file) != b"[":
                return next(_lines(path, file))[1]
            text = file.read(LIMIT_ROW).decode("utf-8-sig", "ignore")
        return json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]
    except (OSError, EOFError, zlib.error, StopIteration, RecursionError) as error:
        raise ValueError(f"{path}: begins with no row: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unzipped if it begins as gzip's do."""
    with open_plain(path) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        inner: Any = gzip.GzipFile(fileobj=file) if zipped else file
        with io.BufferedReader(inner) as buffered:
            yield buffered


def _is_table(path: Path) -> bool:
    with open_plain(path) as file:
        return file.read(4) == b"PAR1" or path.name.lower().endswith(TABLE)


def _first(file: BinaryIO) -> bytes:
    """The first byte that is neither blank nor of a byte order mark; the file begins anew afterwards."""
    start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    file.seek(0)
    return start


def _listed(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    data = file.read(LIMIT_LIST + 1)
    if len(data) > LIMIT_LIST:
        raise ValueError(f"{path}: a list of more than {LIMIT_LIST} bytes; write one JSON object a line")
    listed = _json(str(path), data)
    for i, row in enumerate(listed, 1):
        yield f"{path}, row {i}", row


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(LIMIT_ROW + 1):
        number += 1
        place = f"{path}, line {number}"
        if len(line) > LIMIT_ROW:
            raise ValueError(f"{place}: more than {LIMIT_ROW} bytes; expected a JSON object a line")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield place, _json(place, line)


def _json(place: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}; expected a JSON object a line, or one list") from None


def _table(path: Path, fields: Collection[str]) -> Iterator[tuple[str, Any]]:
    polars = _polars(path)
    try:
        table = polars.scan_parquet(path.absolute(), glob=False, hive_partitioning=False)
        if wanted := [name for name in table.collect_schema().names() if name in fields]:
            table = table.select(wanted)
        for start in count(0, PARQUET_ROWS):
            part = table.slice(start, PARQUET_ROWS).collect()
            for i, row in enumerate(part.iter_rows(named=True), start + 1):
                yield f"{path}, row {i}", row
            if part.height < PARQUET_ROWS:
                return
    except BaseException as error:
        # A panic in the library is not even an Exception.
        if isinstance(error, polars.exceptions.PolarsError) or type(error).__name__ == "PanicException":
            words = " ".join(str(error).split())[:200]
            raise ValueError(f"{path}: cannot be read as parquet: {words}") from None
        raise


def _polars(path: Path) -> Any:
    try:
        return import_module("polars")
    except ImportError:
        raise ValueError(f"{path}: polars reads parquet, and is missing; pip install -e '.[parquet]'") from None
