"""Line completion in several repositories: for each, a model is trained for some minutes and scored on test files.

FILE is a JSON list with name, address, commit, suffix and SHA-256 (by `digest`) of each repository. FOLDERS/name
has its files, as from `git archive` of the commit. Each repository is split, trained and scored in a process of
its own; repositories with a result are skipped.
"""

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from dunes.completion.fit import interval
from dunes.progress import print_table

import numpy as np

HERE = Path(__file__).parent


class Repository(NamedTuple):
    """A repository: files with the `suffix` are completed."""

    name: str
    address: str
    commit: str
    suffix: str
    sha256: str


def digest(folder: Path) -> str:
    """The SHA-256 of the paths and the bytes of all files in a folder, but links."""
    hashed = sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        hashed.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def read_repositories(file: Path, folders: Path) -> list[Repository]:
    """The repositories of a file. Raises ValueError if the text of one is missing, or another one."""
    repositories = [Repository(**entry) for entry in json.loads(file.read_text())]
    for name, address, commit, _, expected in repositories:
        if not (folder := folders / name).is_dir():
            raise ValueError(f"{folder}: no such folder; put the files of {address} at {commit} there")
        if (found := digest(folder)) != expected:
            raise ValueError(f"{folder}: its files have the SHA-256 {found}, not {expected}; get {commit} again")
    return repositories


def score_repositories(file: Path, folders: Path, out: Path, asked: list[str]) -> list[dict[str, Any]]:
    """The results of all repositories, each in OUT/name; `asked` are further options of completion.py."""
    results = []
    for repository in read_repositories(file, folders):
        folder = out / repository.name
        if not (folder / "result.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left
            command = [sys.executable, str(HERE / "completion.py"), str(folder), *asked]
            command += ["--corpus", str(folders / repository.name), "--suffix", repository.suffix, "--all-files"]
            subprocess.run(command, check=True)
        results.append({"name": repository.name, **json.loads((folder / "result.json").read_text())})
    return results


def report(results: list[dict[str, Any]]) -> None:
    """Print a row of each repository, and the means with intervals over repositories."""
    rows = []
    for r in results:
        ours, copy = r["rows"]["run"], r["rows"]["copy nearest"]
        error = np.std(r["differences"], ddof=1) / len(r["differences"]) ** 0.5 if len(r["differences"]) > 1 else 0
        rows.append([
            r["name"], str(r["files"]["test"]), str(r["steps"]), f"{100 * ours['exact']:.1f}",
            interval(np.array(r["differences"])).percent("+"), f"{100 * error:.1f}",
            f"{100 * ours['keys_by_words']:.1f}", f"{100 * copy['keys_by_words']:.1f}",
            f"{r['validated']:.3f}", f"{r['held_out']:.3f}", f"{100 * (r['validated'] / r['held_out'] - 1):+.1f}",
        ])  # fmt: skip
    columns = ["repository", "files", "steps", "exact match %", "minus copying", "standard error"]
    columns += ["keys saved by words %", "copying", "validation bits/byte", "held out", "apart %"]
    print_table("Whole files that were held out, means over files with 95 % intervals", columns, rows)
    differences = np.array([np.mean(r["differences"]) for r in results])
    sides = [(r["rows"]["run"], r["rows"]["copy nearest"]) for r in results]
    keys = np.array([ours["keys_by_words"] - copy["keys_by_words"] for ours, copy in sides])
    apart = np.array([r["validated"] / r["held_out"] - 1 for r in results])
    print(f"exact match minus copying, mean over repositories: {interval(differences).percent('+')}")
    print(f"keys saved by words minus copying: {interval(keys).percent('+')}")
    print(
        f"validation bits/byte minus held out: median of the size {100 * np.median(abs(apart)):.1f} %, "
        f"mean {interval(apart).percent('+')} %"
    )
