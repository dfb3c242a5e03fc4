"""Line completion by runs of `dunes train` with different options, beside copying and an open model by itself.

    python benchmarks/knows_more.py OUT FOLDER:SUFFIX... --arms copying scratch= base="--from RUN" \
        gated="--from smollm2" open=smollm2

Of each folder, files are held out before anything sees them, at most 12 and at most a quarter. All arms complete
the same 12 cursors inside lines of each, from the text above alone. An arm is NAME=OPTIONS of the command,
`copying`, or `open=MODEL`, a model by itself. A run has one thread, and its minutes are processor time, so that
other work on the machine does not change the comparison. Answers are kept in OUT/PROJECT/NAME.json; arms with
answers are not asked again. Figures are means over all cursors; intervals (95 %) of paired differences resample
files.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from statistics import mean

from dunes import checkpoint
from dunes.completion import LineCompleter
from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import file_means, interval
from dunes.completion.keystrokes import cut_points, file_lines
from dunes.completion.text import first_line
from dunes.progress import print_table

import numpy as np
import torch
import tyro
from completion import source_files

COPYING, OPEN = "copying", "open"
FILES, CURSORS, SHARE = 12, 12, 4
"""Held-out files at most, cursors in each, and the part of the files that is held out at most."""
LINES = 20
"""Minimum number of lines of a held-out file."""
CLOCK = """
import threading, queue, concurrent.futures, sys, time
time.monotonic = time.perf_counter = time.process_time
from dunes.cli.main import main
sys.exit(main())
"""
"""The command, whose minutes are those of the processor."""


def split(folder: Path, suffix: str, out: Path) -> None:
    """Write the files of a folder to OUT/train and OUT/test, once."""
    if (out / "train").exists():
        return
    order = lambda file: sha1(file[0].encode()).hexdigest()
    files = sorted(source_files(folder, suffix, set()), key=order)
    long = [file for file in files if len(file_lines(file[1])) >= LINES]
    held_out = long[: min(FILES, len(files) // SHARE)]
    for name, text in files:
        path = out / ("test" if (name, text) in held_out else "train") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="")


def trained(out: Path, arm: str, minutes: float, options: Sequence[str]) -> Path:
    """The run of an arm, which is trained unless it has ended."""
    run = out / arm
    if not (run / "completion" / "gate.json").exists():
        command = ["train", str(out / "train"), f"--minutes={minutes}", f"--out={run}", "--threads=1", *options]
        subprocess.run([sys.executable, "-c", CLOCK, *command], check=True)
    return run


def completer(arm: str, out: Path, minutes: float) -> LineCompleter:
    """The completer of an arm, NAME=OPTIONS."""
    name, _, options = arm.partition("=")
    if name == COPYING:
        files = sorted(p for p in (out / "train").rglob("*") if p.is_file())
        return CopyNearest.of_files([(p.relative_to(out / "train").as_posix(), p.read_text()) for p in files])
    if name == OPEN:
        return CompletionEngine(checkpoint.load_with_tokenizer(checkpoint.locate_model(options).folder))
    return FolderCompleter(trained(out, name, minutes, shlex.split(options)))


def answer(completer: LineCompleter, out: Path) -> list[dict[str, object]]:
    """A row for each cursor: file, rest of the line, the suggestion, if it is right, processor time (ms)."""
    rows = []
    for path in sorted(p for p in (out / "test").rglob("*") if p.is_file()):
        name, text = path.relative_to(out / "test").as_posix(), path.read_text()
        for cut in cut_points(name, text, file_lines(text), count=CURSORS):
            if cut.kind == "character":
                start = time.process_time()
                said = completer.complete(text[: cut.offset], "", name)
                milliseconds, line = 1000 * (time.process_time() - start), first_line(said.text).rstrip()
                row = {"file": name, "offset": cut.offset, "rest": cut.rest, "right": line == cut.rest}
                rows.append(row | {"ms": milliseconds, "text": line, "word": said.word, "line": said.line})
    return rows


def main(
    out: tyro.conf.Positional[Path],
    folders: tyro.conf.Positional[tuple[str, ...]],
    arms: tuple[str, ...] = (COPYING, "scratch="),
    minutes: float = 6.0,
) -> None:
    """Compare the arms on folders.

    Args:
        out: Folder of splits, runs and answers.
        folders: FOLDER:SUFFIX of each project.
        arms: What to compare; the first is what the others are compared with.
        minutes: Processor minutes of each training.
    """
    torch.set_num_threads(1)
    answers: dict[str, dict[str, list[dict[str, object]]]] = {}
    for entry in folders:
        folder, _, suffix = entry.rpartition(":")
        name = Path(folder).name
        split(Path(folder), suffix, out / name)
        for arm in arms:
            title = arm.partition("=")[0]
            if not (kept := out / name / f"{title}.json").exists():
                kept.write_text(json.dumps(answer(completer(arm, out / name, minutes), out / name)))
            answers.setdefault(name, {})[title] = json.loads(kept.read_text())
    arms = tuple(arm.partition("=")[0] for arm in arms)
    rows = [row(name, arms, [by_arm]) for name, by_arm in answers.items()]
    rows.append(row("all", arms, [*answers.values()]))
    columns = ["project", "cursors", *arms, *(f"{arm} - {arms[0]}" for arm in arms[1:])]
    print_table("Right lines, %, and paired differences with 95 % intervals over files", columns, rows)
    for arm in arms:
        ms = [float(str(r["ms"])) for by_arm in answers.values() for r in by_arm[arm]]
        print(f"{arm}: processor time of a suggestion p50 {np.median(ms):.0f}, p95 {np.percentile(ms, 95):.0f} ms")


def row(name: str, arms: Sequence[str], parts: Sequence[dict[str, list[dict[str, object]]]]) -> list[str]:
    """The cells of a table's row."""
    right = {arm: [bool(r["right"]) for part in parts for r in part[arm]] for arm in arms}
    names = [f"{number}{r['file']}" for number, part in enumerate(parts) for r in part[arms[0]]]
    files = [sorted({*names}).index(each) for each in names]
    first = file_means(right[arms[0]], files)
    differences = [interval(file_means(right[arm], files) - first).percent("+") for arm in arms[1:]]
    return [name, str(len(names)), *(f"{100 * mean(right[arm]):.1f}" for arm in arms), *differences]


if __name__ == "__main__":
    tyro.cli(main)
