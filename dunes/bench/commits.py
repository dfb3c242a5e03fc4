"""The same benchmark on two revisions of the source tree, run in turn."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dunes import measure
from dunes.bench import rows

SOURCE = Path(__file__).parents[2]
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from dunes.cli.main import main; main()"


def measured(commits: Sequence[str], benchmark: str, size: str, rounds: int) -> list[list[rows.Row]]:
    """The rows of each commit: `rounds` processes of each, in turn, back and forth.

    Raises ValueError if one is not a commit of dunes' own repository, or cannot run the benchmark.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; 1 at least")
    found: list[list[rows.Row]] = [[] for _ in commits]
    # Chosen once: a process that measures them anew might choose otherwise.
    what = (benchmark, size, "--threads", str(measure.threads()))
    with TemporaryDirectory(prefix="dunes-commits-") as held:
        trees = [Path(held, str(number)) for number in range(len(commits))]
        try:
            for tree, commit in zip(trees, commits, strict=True):
                _git(commit, "worktree", "add", "--detach", str(tree), commit)
            for number in range(rounds):
                order = range(len(commits)) if number % 2 == 0 else reversed(range(len(commits)))
                for side in order:
                    out = Path(held, f"{side}-{number}.jsonl")
                    found[side].append(_lap(trees[side], commits[side], what, out) | {"round": number})
        finally:
            for tree in trees:
                subprocess.run(["git", "-C", SOURCE, "worktree", "remove", "--force", tree], capture_output=True)
    return found


def _git(commit: str, *arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True)
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise ValueError(f"{commit}: neither a file of measurements nor a commit of {SOURCE}: {told}")


def _lap(tree: Path, commit: str, what: Sequence[str], out: Path) -> rows.Row:
    """One process of that revision, one lap; the code that is here does not reach it."""
    benchmark, size, *alike = what
    arguments = ["bench", benchmark, "--size", size, *alike, "--rounds", "1", "--out", str(out)]
    command = [sys.executable, "-P", "-c", START, str(tree), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}
    )
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:300]
        raise ValueError(f"{commit}: dunes bench {benchmark} did not run there: {told}")
    (row,) = rows.read(out)
    return row | {"commit": commit}
