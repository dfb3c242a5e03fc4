"""Alternating runs of several sides, each in a new process (A B C A B C), and their medians."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]


def child(script: str, arguments: Sequence[str]) -> Row:
    """Run a script, and return the JSON of its last line with its wall time."""
    return run((sys.executable, script, *arguments))


def run(command: Sequence[str], **options: Any) -> Row:
    """The same for any command. Raises RuntimeError with its last output if it fails or times out."""
    start, shell_command = time.time(), " ".join(map(str, command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{shell_command}: timed out after {error.timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{shell_command} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    # A script may report when its work finished; later work, such as validation, is not counted.
    return row | {"wall": row.pop("finished", time.time()) - start}


def interleaved(script: str, sides: dict[str, Sequence[str]], rounds: int) -> dict[str, list[Row]]:
    """All rows of all sides, which are arguments of one script."""
    return in_turn({side: lambda a=a: child(script, a) for side, a in sides.items()}, rounds)


def in_turn(sides: dict[Any, Callable[[], Row]], rounds: int) -> dict[Any, list[Row]]:
    """The same for sides that are functions."""
    rows: dict[Any, list[Row]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, once in sides.items():
            rows[side].append(once())
            shown = {k: round(v, 4) for k, v in rows[side][-1].items() if isinstance(v, int | float)}
            print(side if isinstance(side, str) else ", ".join(side), shown, flush=True)
    return rows


def middle(rows: list[Row], key: str) -> float:
    return median(r[key] for r in rows)


def print_results(title: str, figures: dict[str, Any]) -> None:
    """Print the results as text, and as JSON on the last line."""
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:34} {value:.4g}" if isinstance(value, float) else f"  {name:34} {value}")
    print(json.dumps({"benchmark": title, **figures}))
