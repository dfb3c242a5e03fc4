"""Compare two commits of this repository: one `dunes bench` on both, in alternation.

python benchmarks/commits.py HEAD~1 HEAD --benchmark train --size 3m
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from dunes import measure
from dunes.bench import rows, table
from dunes.bench.compare import CONFIDENCE, compare

import tyro

SOURCE = Path(__file__).parents[1]
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from dunes.cli.main import main; main()"


def measure_commits(commits: Sequence[str], benchmark: str, size: str, rounds: int) -> list[list[rows.Row]]:
    """The rows of each commit, from `rounds` processes in alternating order.

    Raises ValueError for an unknown commit, and if a commit cannot run the benchmark.
    """
    results: list[list[rows.Row]] = [[] for _ in commits]
    # Choose the threads once: each process might choose differently.
    command = (benchmark, size, "--threads", str(measure.choose_threads()))
    with TemporaryDirectory(prefix="dunes-commits-") as folder:
        trees = [Path(folder, str(number)) for number in range(len(commits))]
        try:
            for tree, commit in zip(trees, commits, strict=True):
                _git(commit, "worktree", "add", "--detach", str(tree), commit)
            for number in range(rounds):
                order = range(len(commits)) if number % 2 == 0 else reversed(range(len(commits)))
                for side in order:
                    out = Path(folder, f"{side}-{number}.jsonl")
                    results[side].append(_lap(trees[side], commits[side], command, out) | {"round": number})
        finally:
            for tree in trees:
                subprocess.run(["git", "-C", SOURCE, "worktree", "remove", "--force", tree], capture_output=True)
    return results


def _git(commit: str, *arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise ValueError(f"{commit}: no commit of {SOURCE}: {error}")


def _lap(tree: Path, commit: str, what: Sequence[str], out: Path) -> rows.Row:
    """Run one round of that commit in a new process, isolated from the code in this folder."""
    benchmark, size, *options = what
    arguments = ["bench", benchmark, "--size", size, *options, "--rounds", "1", "--out", str(out)]
    command = [sys.executable, "-P", "-c", START, str(tree), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}
    )
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise ValueError(f"{commit}: dunes bench {benchmark} did not run there: {error}")
    (row,) = rows.read_rows(out)
    return row | {"commit": commit}


def main(
    a: Annotated[str, tyro.conf.Positional],
    b: Annotated[str, tyro.conf.Positional],
    benchmark: str = "train",
    size: str = "1m",
    rounds: int = 10,
) -> None:
    """Run a benchmark on two commits, checked out beside each other, and compare them round by round."""
    comparison = compare(*measure_commits((a, b), benchmark, size, rounds))
    table.print_comparison(comparison, CONFIDENCE)
    print(json.dumps({"benchmark": benchmark, **comparison.record()}))


if __name__ == "__main__":
    tyro.cli(main)
