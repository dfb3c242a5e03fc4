"""Read, write and summarize measurements: a JSONL file has one record (row) per lap.

A row contains the case (the columns in SETTING), the machine (`machine` and its properties), the round, and the
result (`seconds` of one run, `amount` of `unit`, ...).
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dunes.files.json_file import print_warning, read_records
from dunes.progress import Line

Row = dict[str, Any]

SETTING = (
    "benchmark", "subject", "family", "parameters", "dtype", "batch", "context", "threads", "device", "form",
)  # fmt: skip
"""Columns whose values identify a case."""
CASE = (*SETTING, "machine", "commit")
"""Columns whose values identify a case on one machine, at one commit."""


def read_rows(path: Path, warn: Line = print_warning) -> list[Row]:
    """All valid rows of a .jsonl file; `warn` is called with a message about invalid lines.

    Raises ValueError, naming the file, if the file is missing or contains no measurements.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; create it with: dunes bench train --size 3m --out {path}")
    rows = read_records(path, "a measurement as `dunes bench` writes it", lambda row: "seconds" in row, warn)
    if not rows:
        raise ValueError(f"{path}: has no measurements")
    return rows


def read_folder(folder: Path, warn: Line) -> list[Row]:
    """All records in files that `dunes bench` wrote, in a folder and four levels below it.

    `warn` is called with a message about invalid lines.
    """
    records = list[Row]()
    for path in (p for level in range(5) for p in sorted(folder.glob("*/" * level + "*.jsonl")) if p.is_file()):
        with path.open("rb") as file:
            if file.read(12) == b'{"benchmark"':
                records += read_records(path, "a measurement", lambda row: "benchmark" in row, warn)
    return records


def group_rows(rows: Iterable[Row], columns: Sequence[str] = SETTING) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by their values in these columns; groups are in the order of first occurrence."""
    results: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        results[tuple(row.get(name) for name in columns)].append(row)
    return dict(results)


def summarize(rows: Sequence[Row]) -> Row:
    """Summarize the rounds of one case in one record: medians, and the quartiles of the seconds.

    `limit` is the roofline rate in units per second: the highest measured read rate divided by the bytes per unit,
    or the matrix product rate divided by the FLOPs per unit, whichever is lower.
    """
    first = rows[0]
    seconds = [float(row["seconds"]) for row in rows]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    middle = median(seconds)
    results: Row = {name: first.get(name) for name in CASE}
    results |= {"rounds": len(rows), "seconds": middle, "low": low, "high": high, "unit": first["unit"]}
    results["rate"] = first["amount"] / middle
    for name in ("flop_share", "first_token"):
        if values := [float(row[name]) for row in rows if row.get(name) is not None]:
            results[name] = median(values)
    if first.get("bytes") and (reads := [float(row["read"]) for row in rows if row.get("read")]):
        results["byte_share"] = first["bytes"] / middle / max(reads)
    if "byte_share" in results:
        results["limit"] = results["rate"] / max(results["byte_share"], results.get("flop_share", 0.0))
    return results | ({"peak_bytes": first["peak_bytes"]} if first.get("peak_bytes") is not None else {})


def summaries(rows: Iterable[Row]) -> list[Row]:
    """Summaries of the rows: one record per case, machine and commit; those of a case follow one another."""
    return [summarize(laps) for case in group_rows(rows).values() for laps in group_rows(case, CASE).values()]


def differing_columns(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of CASE in which summaries differ; the subject's name stands for its family and parameters."""
    return [n for n in CASE[1:] if n not in ("family", "parameters") and len({str(r.get(n)) for r in results}) > 1]


def source_commit() -> str | None:
    """The git commit of the running source tree, with "+" if files have changed; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not Path(git("rev-parse", "--show-toplevel"), "dunes", "bench").samefile(folder):
            return None
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
