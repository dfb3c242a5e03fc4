"""Forty defects, put into the package one by one: the tests that `mutations.toml` names must fail with each.

    python benchmarks/mutations.py [--only 3 17] [--processes 1]

Each defect replaces one text of a source, in a copy of the checkout. Run it after tests were merged or removed; it
takes some ten minutes. A defect that no test sees is printed as MISSED, and the status is then 1. The tests must
pass without a defect, which `make test` shows.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import tyro

HERE = Path(__file__).parent


def is_caught(number: int, mutation: dict[str, Any]) -> bool:
    """True if a named test fails with this defect. Raises ValueError if the source does not have its text once."""
    start = perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Path(temporary)
        for name in ("dunes", "tests", "recipes", "benchmarks", "docs"):
            shutil.copytree(HERE.parent / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "budget.toml"):
            shutil.copy(HERE.parent / name, checkout / name)
        source = checkout / "dunes" / mutation["file"]
        text = source.read_text()
        if text.count(mutation["old"]) != 1:
            raise ValueError(
                f"{mutation['file']}: {text.count(mutation['old'])} times {mutation['old']!r}; expected 1"
            )
        source.write_text(text.replace(mutation["old"], mutation["new"]))
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        tests = [f"tests/{name}" for name in mutation["tests"] if (checkout / "tests" / name).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", "--tb=line", *tests]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    if done.returncode not in (0, 1):
        raise ValueError(f"pytest ended with status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    verdict = "caught" if done.returncode else "MISSED"
    print(f"{number:2} {verdict} {perf_counter() - start:4.0f} s  {mutation['file']}: {failed[:120]}", flush=True)
    return bool(done.returncode)


def main(only: tuple[int, ...] = (), processes: int = 1) -> None:
    """Put each defect into a copy, and run its tests.

    Args:
        only: Numbers of the defects, from 1; all if empty.
        processes: Defects at a time.
    """
    mutations = tomllib.loads((HERE / "mutations.toml").read_text())["mutation"]
    numbers = only or tuple(range(1, len(mutations) + 1))
    with ThreadPoolExecutor(processes) as pool:
        caught = [*pool.map(lambda number: is_caught(number, mutations[number - 1]), numbers)]
    print(f"{sum(caught)} of {len(caught)} caught")
    sys.exit(not all(caught))


if __name__ == "__main__":
    tyro.cli(main)
