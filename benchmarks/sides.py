"""Interleaved runs of several sides, each in a process of its own: A B C A B C, then medians."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]


def child(script: str, arguments: Sequence[str]) -> Row:
    """The JSON that a run of the script prints last, with the seconds from its start to its end."""
    return run((sys.executable, script, *arguments))


def run(command: Sequence[str], **how: Any) -> Row:
    """The same for any command. Raises RuntimeError with the end of what it said if it fails or takes too long."""
    start, said = time.time(), " ".join(map(str, command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{said}: not over after {late.timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{said} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    # A child says when its work was done; what it does after that, such as scoring, is not counted.
    return row | {"wall": row.pop("finished", time.time()) - start}


def interleaved(script: str, sides: dict[str, Sequence[str]], rounds: int) -> dict[str, list[Row]]:
    """All rows of all sides."""
    return in_turn({side: lambda a=a: child(script, a) for side, a in sides.items()}, rounds)


def in_turn(sides: dict[Any, Callable[[], Row]], rounds: int) -> dict[Any, list[Row]]:
    """The same for sides of any kind and name, each a function that runs it once."""
    rows: dict[Any, list[Row]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, once in sides.items():
            rows[side].append(once())
            shown = {k: round(v, 4) for k, v in rows[side][-1].items() if isinstance(v, int | float)}
            print(side if isinstance(side, str) else ", ".join(side), shown, flush=True)
    return rows


def middle(rows: list[Row], key: str) -> float:
    return median(r[key] for r in rows)


def said(what: str, figures: dict[str, Any]) -> None:
    """The result for people, and for programs on the last line."""
    print(f"\n{what}")
    for name, value in figures.items():
        print(f"  {name:34} {value:.4g}" if isinstance(value, float) else f"  {name:34} {value}")
    print(json.dumps({"benchmark": what, **figures}))
