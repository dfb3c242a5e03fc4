"""Measurements as plain text."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dunes.bench.rows import SETTING
from dunes.runs.progress import quantity

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def duration(seconds: float) -> str:
    """1.23 s, 45.6 ms, 789 µs."""
    size, unit = next((u for u in UNITS if abs(seconds) >= u[0]), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def size(count: float) -> str:
    """1.2 GB, 34 MB, 56 kB."""
    scale, unit = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if abs(count) >= u[0]), (1.0, "B"))
    return f"{count / scale:.3g} {unit}"


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """A table: the first column of words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = console or Console(soft_wrap=True)
    # A narrow screen scrolls; cut-off figures would lie.
    console.print(table, width=max(console.width, 60 + 14 * len(columns)), soft_wrap=True)


def summary(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """A line for each contestant: what tells it from the others, and what came out."""
    telling = [n for n in SETTING if n != "benchmark" and len({str(f.get(n)) for f in found}) > 1] or ["subject"]
    shown = {
        "a run": lambda f: duration(f["seconds"]),
        "middle half": lambda f: f"{duration(f['low'])} to {duration(f['high'])}",
        "rate": lambda f: f"{quantity(f['rate'])} {f['unit']}/s",
        "of matmul": lambda f: f"{f['flop_share']:.0%}" if "flop_share" in f else "",
        "of reading": lambda f: f"{f['byte_share']:.0%}" if "byte_share" in f else "",
        "energy": lambda f: f"{f['joules']:.3g} J" if "joules" in f else "",
        "memory": lambda f: size(f["peak_bytes"]),
    }
    used = {name: text for name, text in shown.items() if any(text(f) for f in found)}
    lines = [[_value(f[n]) for n in telling] + [text(f) for text in used.values()] for f in found]
    fixed = ", ".join(f"{n} {_value(found[0][n])}" for n in SETTING[1:] if n not in telling and n != "family")
    show(f"{found[0]['benchmark']}: {fixed}; {found[0]['rounds']} rounds", [*telling, *used], lines, console)


def _value(value: object) -> str:
    return quantity(value) if isinstance(value, int) and value >= 10_000 else str(value)
