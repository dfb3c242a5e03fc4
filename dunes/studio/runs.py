"""Read runs, also while they are written: metrics (thinned for charts), states, samples, and what differs.

Files that this user may not read count as missing.
"""

import os
import shlex
from math import nan
from pathlib import Path
from time import localtime, strftime
from typing import Any, Self

import numpy as np

from dunes.checkpoint.card import CARD
from dunes.files.json_file import parse_line
from dunes.runs.config import RECORDED
from dunes.runs.picture import centered_mean, is_drawable
from dunes.runs.saving import METRICS, is_metric, signal_run
from dunes.runs.trackers import read_samples
from dunes.studio.folders import Entry, showable

FIELDS = ("step", "count", "seconds", "loss", "lr_scale", "memory", "validation_loss")
"""Numbers that are read from the records of metrics.jsonl."""
POINTS, TAIL = 1000, 1 << 14
"""A thinned series has about POINTS points; the list of runs reads the last TAIL bytes of a metrics.jsonl."""


class MetricsFile:
    """The metrics of a run; `update` reads what was added. `damaged` is the number of lines that were skipped.

    With `tail`, only the last TAIL bytes of the file are read at first.
    """

    def __init__(self, folder: Path, tail: bool = False) -> None:
        self.path, self.tail, self._inode, self._offset = folder / METRICS, tail, 0, 0
        self._rows, self.damaged = np.empty((0, len(FIELDS))), 0

    def update(self) -> Self:
        """Read the lines added since the last call, except an incomplete last line.

        A file that was truncated or replaced, as by a resumed run, is read again.
        """
        if not (os.access(self.path, os.R_OK) and self.path.is_file()):
            return self
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset or status.st_ino != self._inode:
                self._rows, self.damaged, self._inode = self._rows[:0], 0, status.st_ino
                self._offset = max(0, status.st_size - TAIL) if self.tail else 0
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        records = [parse_line(line) or {} for line in lines.split(b"\n") if line.strip()]
        rows = [[record.get(name, nan) for name in FIELDS] for record in records if is_metric(record)]
        rows = [row for row in rows if all(type(v) is float or (type(v) is int and is_drawable(v)) for v in row)]
        self._rows = np.concatenate([self._rows, np.array(rows, float).reshape(-1, len(FIELDS))])
        self._offset, self.damaged = self._offset + len(lines + newline), self.damaged + len(records) - len(rows)
        return self

    def points(self, name: str, axis: str = "step", smooth: bool = False) -> list[tuple[float, float]]:
        """A series, thinned: a field, "tokens/s" or "memory, GB" over "step", "tokens" or "minutes".

        With `smooth`, the values are moving means over 21 steps, or over 1 % of the steps if those are more.
        """
        values: Any = dict(zip(FIELDS, self._rows.T, strict=True))
        seconds = np.where(values["seconds"] > 0, values["seconds"], nan)
        values |= {"tokens": np.nancumsum(values["count"]), "minutes": np.nancumsum(values["seconds"]) / 60}
        values |= {"tokens/s": values["count"] / seconds, "memory, GB": values["memory"] / 1e9}
        drawable = is_drawable(values[name])
        x, y = values[axis][drawable], values[name][drawable]
        return thin(x, np.array(centered_mean(y.tolist(), max(10, len(y) // 200))) if smooth else y)


def thin(x: Any, y: Any, points: int = POINTS) -> list[tuple[float, float]]:
    """About `points` of the points in two arrays; each bucket keeps its minimum and maximum, so spikes stay."""
    if len(y) > points:
        buckets = np.array_split(np.arange(len(y)), points // 2)
        kept = np.unique([[b[y[b].argmin()], b[y[b].argmax()]] for b in buckets])
        x, y = x[kept], y[kept]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def describe(entry: Entry) -> str:
    """The state, last change, last step and last losses of a run; after a semicolon, the command that continues an
    unfinished run."""
    folder, metrics = entry.path, MetricsFile(entry.path, tail=True).update()
    config, card = read_object(folder / "state" / "plan.json"), read_object(folder / CARD)
    last = {name: y for name in ("step", "loss", "validation_loss") for _, y in metrics.points(name)}
    facts = [f"{name.replace('_', ' ')} {round(value, 3):,.9g}" for name, value in last.items()]
    state, done = "unfinished", card.get("finetuned", card.get("trained"))
    if signal_run(folder):
        state = "training" if last else "preparing"
    elif isinstance(done, dict) and last.get("step") == done.get("steps"):
        state = "ended"  # its model was saved after its last step
    verb, changed = "train" if "sources" in config else "finetune", localtime(entry.modified)
    command = f"; continue with: dunes {verb} --out {shlex.quote(str(folder))} --resume"
    return ", ".join([state, *facts, strftime("%Y-%m-%d %H:%M", changed)]) + command * (state == "unfinished")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is damaged, or cannot be read."""
    return (parse_line(path.read_bytes()) if os.access(path, os.R_OK) and path.is_file() else None) or {}


def config_differences(folders: dict[str, Path]) -> list[dict[str, str]]:
    """Rows of a table: an option that differs between runs, and its value in each run by the run's name."""
    configs = {run: read_object(folder / "state" / "plan.json") for run, folder in folders.items()}
    names = dict.fromkeys(name for config in configs.values() for name in config if name not in RECORDED)
    rows = {name: {run: showable(config.get(name)) for run, config in configs.items()} for name in names}
    return [{"option": name} | row for name, row in rows.items() if len({*row.values()}) > 1]


def samples_at(folders: dict[str, Path], place: int) -> tuple[int, str]:
    """The number of steps after which a run has a sample, and the samples of the runs at one of them as text."""
    samples = {run: read_samples(folder / "samples.md") for run, folder in folders.items()}
    steps = sorted({step for texts in samples.values() for step in texts})
    shown = [(run, step) for step in steps[place:][:1] for run, texts in samples.items() if step in texts]
    return len(steps), "\n\n".join(f"{run}, after {step:,} steps:\n{samples[run][step]}" for run, step in shown)
