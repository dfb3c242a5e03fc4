"""Read the rows of a file: JSON lines or a JSON list (plain or gzipped), or a table in a format of `TABLES`."""

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from dunes.context import prefix_errors
from dunes.data.files import open_plain
from dunes.files.json_file import unique_keys
from dunes.files.model_file import HEAD, stand_in
from dunes.text.lines import decode_text

MAX_ROW_BYTES = 1 << 24
"""Maximum bytes of a line."""

DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
"""Reads JSON and refuses duplicate keys. Reusing a decoder is faster than `json.loads` with a hook."""

EXPECTED = "expected one JSON object per line, or one list"

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
JSON = (".json", ".json.gz")
"""Suffixes of files that may contain records. Parquet files and files with a suffix in LINES always do."""

TABLES: dict[str, tuple[bytes, str, str, dict[str, Any]]] = {
    ".parquet": (b"PAR1", "parquet", "scan_parquet", {"hive_partitioning": False}),
    ".csv": (b"", "CSV", "scan_csv", {"infer_schema": False}),
    ".tsv": (b"", "TSV", "scan_csv", {"infer_schema": False, "separator": "\t"}),
}
"""Formats of tables by suffix: the first bytes of a file (empty if only the suffix identifies it), the format's
name, the function of polars that reads it, and its options. All values in CSV are read as text."""
DELIMITED = (".csv", ".tsv")
"""Suffixes of tables that are read as plain text, unless the user asks for records."""
TABLE_ROWS = 8192
"""Number of rows of a table that are in memory at a time."""


def file_format(path: Path) -> str:
    """The name of a file's format, such as "JSON lines". Raises OSError if the file cannot be read."""
    if suffix := _table_suffix(path):
        return TABLES[suffix][1]
    with _open(path) as file:
        return "a JSON list" if _first_byte(file) == b"[" else "JSON lines"


def rows(
    path: Path, fields: Collection[str] = (), names: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place (file and line or row).

    `names` maps new names to the file's field names; a field that already has a new name gets a suffix. Without
    `names`, only the columns in `fields`, if any are given, are read from tables. Raises ValueError that names the
    file, the line or row, the expected value and the actual value.
    """
    if not names:
        yield from _rows(path, fields)
        return
    missing, found = {*names.values()}, dict[str, None]()
    for place, row in _rows(path):
        if isinstance(row, dict):
            missing -= row.keys()
            found |= dict.fromkeys(row)
        yield place, rename_fields(row, names)
    if missing:
        listed = ", ".join(found)[:400]
        raise ValueError(
            f"{path}: --fields: no record has a field {min(missing)!r}; found {listed or 'no fields'}"
        )


def rename_fields(row: Any, names: Mapping[str, str]) -> Any:
    """The row with fields renamed as in `rows`; a row that is not an object is returned unchanged."""
    if not isinstance(row, dict):
        return row
    others = {key: value for key, value in row.items() if key not in names.values()}
    others = {f"{key} (replaced by --fields)" if key in names else key: value for key, value in others.items()}
    return {ours: row[theirs] for ours, theirs in names.items() if theirs in row} | others


def _rows(path: Path, fields: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    with prefix_errors(f"{path}: cannot be read", (OSError, EOFError, zlib.error)):
        if suffix := _table_suffix(path):
            yield from _table_rows(path, suffix, fields)
            return
        with _open(path) as file:
            yield from _list_rows(path, file) if _first_byte(file) == b"[" else _line_rows(path, file)


def first_row(path: Path) -> Any:
    """The first row of a file; no other row is read. Duplicate keys, which `rows` refuses, are allowed.

    Raises ValueError if the file does not start with a row.
    """
    errors = OSError, EOFError, zlib.error, StopIteration, RecursionError
    with prefix_errors(f"{path}: begins with no row", errors):
        if suffix := _table_suffix(path):
            return next(_table_rows(path, suffix))[1]
        with _open(path) as file:
            if _first_byte(file) != b"[":
                return next(_line_rows(path, file, json.JSONDecoder()))[1]
            text = file.read(MAX_ROW_BYTES).decode("utf-8-sig", "ignore")
        return json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; a gzipped file is decompressed."""
    with open_plain(path) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        inner: Any = gzip.GzipFile(fileobj=file) if zipped else file
        with io.BufferedReader(inner) as buffered:
            yield buffered


def _table_suffix(path: Path) -> str | None:
    """The key in TABLES that fits the file's name or first bytes; None if the file is no table."""
    with open_plain(path) as file:
        head = file.read(HEAD)
    if reason := stand_in(head):
        raise ValueError(f"{path}: {reason}")
    name = path.name.lower()
    starts = (s for s, (first, *_) in TABLES.items() if name.endswith(s) or (first and head.startswith(first)))
    return next(starts, None)


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte after a byte order mark and white space; rewinds the file."""
    start = file.read(1 << 16).removeprefix(BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return start


def _list_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    text = decode_text(file.read(), str(path))
    with prefix_errors(f"{path}: not JSON", (ValueError, RecursionError), end=f"; {EXPECTED}"):
        listed = DECODER.decode(text)
    for i, row in enumerate(listed, 1):
        yield f"{path}, row {i}", row


def _line_rows(path: Path, file: BinaryIO, decoder: json.JSONDecoder = DECODER) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        place = f"{path}, line {number}"
        line = line.removeprefix(BOM_UTF8) if number == 1 else line
        if line.strip():
            text = decode_text(line, place)
            try:
                row = decoder.decode(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON: {error}; {EXPECTED}") from None
            yield place, row


def _table_rows(path: Path, suffix: str, fields: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    _, name, scan, options = TABLES[suffix]
    try:
        polars: Any = import_module("polars")
    except ImportError:
        raise ValueError(f"{path}: {name} needs polars; pip install 'astral-dunes[parquet]'") from None
    try:
        table = getattr(polars, scan)(path.absolute(), glob=False, **options)
        found = table.collect_schema().names()
        if twice := [column for column in found if column.removesuffix("_duplicated_0") in {*found} - {column}]:
            raise ValueError(f"{path}: {twice[0].removesuffix('_duplicated_0')!r} names two columns")
        if columns := [column for column in found if column in fields]:
            table = table.select(columns)
        for start in count(0, TABLE_ROWS):
            part = table.slice(start, TABLE_ROWS).collect()
            for i, row in enumerate(part.iter_rows(named=True), start + 1):
                yield f"{path}, row {i}", row
            if part.height < TABLE_ROWS:
                return
    except BaseException as error:
        # A panic in polars is a BaseException, but not an Exception.
        if isinstance(error, polars.exceptions.PolarsError) or type(error).__name__ == "PanicException":
            message = " ".join(str(error).split())[:200]
            raise ValueError(f"{path}: cannot be read as {name}: {message}") from None
        raise
