"""Measurements as tidy records, one a lap: kept in a JSONL file as they come, read back, summed up.

A row says what was measured (`benchmark` and the columns in SETTING), where (`machine` and what is
known of it), in which round, and what came out (`seconds` of one run, `amount` of `unit`, ...).
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dunes.runs.extra import extra

Row = dict[str, Any]

SETTING = ("benchmark", "subject", "family", "parameters", "dtype", "batch", "context", "threads", "device")
"""What tells one measured thing from another."""


def append(path: Path, row: Row) -> None:
    """Add a row to the file; an interrupted run keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """All rows of a .jsonl or .parquet file. Raises ValueError that names the line which is not a row."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `dunes bench train --size 3m --out {path}` would make it")
    rows = []
    for number, (row, line) in enumerate(_parquet(path) if path.suffix == ".parquet" else _lines(path), 1):
        if not isinstance(row, dict) or not {"benchmark", "seconds", "amount", "unit"} <= row.keys():
            raise ValueError(
                f"{path}:{number}: expected a measurement as `dunes bench` writes it, found {line[:60]!r}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no measurement")
    return rows


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    polars = extra("polars", "plot")
    try:
        frame = polars.read_parquet(path)
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from None
    yield from ((row, str(row)) for row in frame.to_dicts())


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Each line read as JSON, None where it is none; a last line that was cut short is left out."""
    text = path.read_text(errors="replace")
    for line in text.split("\n")[:-1]:
        try:
            yield json.loads(line), line
        except ValueError:
            yield None, line


def key(row: Row) -> tuple[Any, ...]:
    """What was measured, as one value."""
    return tuple(row.get(name) for name in SETTING)


def groups(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each measured thing, in the order of their first ones."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


def summary(rows: Sequence[Row]) -> Row:
    """One thing's rounds in one record: the medians, and the middle half of the seconds as their spread."""
    first = rows[0]
    seconds = [float(row["seconds"]) for row in rows]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    middle = median(seconds)
    found: Row = {name: first.get(name) for name in SETTING}
    found |= {"rounds": len(rows), "seconds": middle, "low": low, "high": high, "unit": first["unit"]}
    found["rate"] = first["amount"] / middle
    for share in ("flop_share", "byte_share", "joules"):
        if known := [float(row[share]) for row in rows if row.get(share) is not None]:
            found[share] = median(known)
    return found | {name: first[name] for name in ("peak_bytes", "machine") if first.get(name) is not None}


def commit() -> str | None:
    """The revision of the source tree that runs, with + if it was changed; None outside of one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not Path(git("rev-parse", "--show-toplevel"), "dunes", "bench").samefile(here):
            return None
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
