"""Interleaved runs of several sides, each in a process of its own: A B C A B C, then medians."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

Row = dict[str, float]


def child(script: str, arguments: Sequence[str]) -> Row:
    """The JSON that a run of the script prints last, with the seconds from its start to its end."""
    start = time.time()
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    # A child says when its work was done; what it does after that, such as scoring, is not counted.
    return row | {"wall": row.pop("finished", time.time()) - start}


def interleaved(script: str, sides: dict[str, Sequence[str]], rounds: int) -> dict[str, list[Row]]:
    """All rows of all sides."""
    rows: dict[str, list[Row]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, arguments in sides.items():
            rows[side].append(child(script, arguments))
            print(side, {k: round(v, 4) for k, v in rows[side][-1].items()}, flush=True)
    return rows


def middle(rows: list[Row], key: str) -> float:
    return median(r[key] for r in rows)


def said(what: str, figures: dict[str, Any]) -> None:
    """The result for people, and for programs on the last line."""
    print(f"\n{what}")
    for name, value in figures.items():
        print(f"  {name:34} {value:.4g}" if isinstance(value, float) else f"  {name:34} {value}")
    print(json.dumps({"benchmark": what, **figures}))
