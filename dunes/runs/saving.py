"""The files of a run in progress: lock, config, metrics and training states; signals to stop or save."""

import json
import math
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from dunes import checkpoint, measure
from dunes.context import prefix_errors
from dunes.evaluate.preferences import PreferenceScore
from dunes.evaluate.text_loss import Score
from dunes.files import json_file
from dunes.files.atomic import folder_lock, fsync_path, staging_folder, write_file
from dunes.files.json_file import append_record, parse_line, print_warning, read_lines, read_records
from dunes.measure import ranks
from dunes.pictures import svg_curves
from dunes.progress import Line
from dunes.runs.config import RunConfig, T
from dunes.runs.task import Run, check_tensors, load_trainable_state, trainable_state
from dunes.text import Tokenizer
from dunes.train import Record

METRICS = "metrics.jsonl"
"""File in a run's folder with a JSON record for each step, each validation and each changed option."""
FORMAT = 3
"""Format version of plan.json."""
STATE_FIELDS = ("elapsed", "begin", "best_step", "best_weights", "checks_since_best", "compiled")
"""Attributes of `Run` that are stored unchanged in its state."""
SAVE_SECONDS = 60.0
"""Minimum seconds between saves; see `Saver.interval`. https://doi.org/10.1145/361147.361115"""
CHEAP = SAVE_SECONDS**2 / (2 * 8 * 3600)
"""Longest duration of a save, in seconds, for which `Saver.interval` is SAVE_SECONDS, given a failure every eight
hours."""
STOPPING = b"\nstopping after this step and saving; interrupt again to exit at once\n"
CLOSING = b"\nall steps are done; saving; interrupt again to exit at once\n"
ANOTHER_RUN = "already contains a run; continue it with --resume, or choose another --out"


class FolderInUse(ValueError):
    """Raised if a folder contains a run, or if another process is using the folder."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the run's folder. Raises FolderInUse if another process has the lock.

    The lock is also released when the process dies. The locked file contains the ids of the torchrun command and
    of this process.
    """
    if not ranks.is_first():
        yield
        return
    lock = folder / "state" / "lock"  # not the lock of the folder, which each save takes
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    try:
        with folder_lock(lock, wait=False):
            with lock.open("r+") as file:  # not truncated first, since a kill could leave the file empty
                file.write(f"{ranks.job()}\n{ranks.process_id(os.getpid())}")
                file.truncate()
            yield
    except BlockingIOError:
        remedy = "wait for it, or choose another --out"
        raise FolderInUse(f"{folder}: in use by another training process; {remedy}") from None


def check_shared(folder: Path) -> None:
    """Raise ValueError, on all ranks, if a rank cannot write to the first rank's folder. Needs the folder
    `state`."""

    def write(path: Path) -> None:
        try:
            path.touch()
        except OSError as error:
            remedy = "--out must be on a disk that all machines share and write to"
            raise ValueError(f"{folder}: cannot write where rank 0 does ({error.strerror}); {remedy}") from None

    with ExitStack() as stack:
        stage = lambda: stack.enter_context(staging_folder(folder / "state" / "new")) if ranks.is_first() else None
        (staged, *_) = ranks.all_gather(stage)
        assert staged is not None, "the first rank's"
        ranks.all_gather(lambda: write(staged / str(ranks.rank())))


def was_started_by_job(folder: Path) -> bool:
    """True if the last run in the folder was started by the same torchrun command as this process."""
    lock = folder / "state" / "lock"
    started = ranks.under_torchrun() and lock.is_file() and (folder / "state" / "plan.json").exists()
    return started and lock.read_text().split("\n")[0] == ranks.job()


def signal_run(folder: Path, number: int = 0) -> bool:
    """Send a signal (see `stop_signals`) to the process on this machine that has the run's lock; 0 sends none.

    Returns False if there is no such process, or if it is another user's.
    """
    lock = folder / "state" / "lock"
    is_readable = os.access(lock, os.R_OK | os.W_OK) and lock.is_file()
    process = lock.read_text(errors="replace").partition("\n")[2] if is_readable else ""
    pid = process.partition(" ")[0]
    if process != ranks.process_id(pid):
        return False  # without trying the lock, since a run may be about to take it
    try:
        with folder_lock(lock, wait=False):
            return False
    except BlockingIOError:
        os.kill(int(pid), number)
        return True


def start_run(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Save the tokenizer, then the config; a folder with a config counts as a run.

    Raises FolderInUse if the folder already contains a run.
    """
    if (folder / "state" / "plan.json").exists():
        raise FolderInUse(f"{folder}: {ANOTHER_RUN}")
    write_file(folder / "state" / "tokenizer.json", tokenizer.json().encode())
    write_config(config, folder)


def write_config(config: RunConfig, folder: Path) -> None:
    stored = {"format": FORMAT} | asdict(config)
    write_file(folder / "state" / "plan.json", json.dumps(stored, indent=1).encode())


def read_config(folder: Path, config_class: type[T]) -> T | None:
    """The config of the run in this folder; None if the folder contains no run.

    Raises ValueError, with a remedy, if the config is of another kind of run or cannot be read.
    """
    path = folder / "state" / "plan.json"
    if not path.is_file():
        return None
    stored = json_file.read(path)
    with prefix_errors(path, (TypeError, ValueError), end="; choose another --out"):
        if (number := stored.pop("format", None)) != FORMAT:
            raise ValueError(f"written by another version of dunes (format {number}, this version reads {FORMAT})")
        return config_class.of(stored)


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """On the first rank, append a record to the run's metrics.jsonl."""
    if ranks.is_first():
        append_record(folder / METRICS, record)


class Metrics(list[dict[str, Any]]):
    """Records of a run's metrics.jsonl, or others with "step" and "loss"; notebooks show the losses as curves."""

    def _repr_html_(self) -> str:
        curves = dict[str, list[tuple[float, float]]]()
        for label, key in (("training loss", "loss"), ("validation loss", "validation_loss")):
            points = [(r["step"], r[key]) for r in self if r.get(key) is not None and math.isfinite(r[key])]
            curves |= {f"{label} {loss:.3f}": points[:: 1 + len(points) // 1000] for _, loss in points[-1:]}
        return svg_curves(curves)


def read_metrics(path: Path, warn: Line = print_warning) -> Metrics:
    """The undamaged records of a metrics.jsonl; `warn` is called with a line about damaged records."""
    return Metrics(read_records(path, "the metrics of a step", is_metric, warn))


def is_metric(record: dict[str, Any]) -> bool:
    """True if a JSON object has the fields that each record of a metrics.jsonl has."""
    return "step" in record and ("loss" not in record or "seconds" in record)


def truncate_metrics(path: Path, step: int) -> None:
    """Remove the records after `step` from metrics.jsonl, since a resumed run writes these records again."""
    lines = read_lines(path)
    records = map(parse_line, lines)
    later = [record is not None and is_metric(record) and record["step"] > step for record in records]
    if any(later) and ranks.is_first():
        write_file(path, b"\n".join(line for line, is_later in zip(lines, later, strict=True) if not is_later))


def run_state(run: Run) -> dict[str, Any]:
    """The state from which the run can be resumed: a nested dict of tensors and JSON values."""
    return {
        "config": asdict(run.config),
        "fingerprints": dict(run.task.facts.fingerprints),
        "model": run.task.loaded.architecture.record(),
        "weights": trainable_state(run.model),
        "trainer": run.trainer.state_dict(),
        "schedule": [[r.begin, r.end] for r in run.schedule.records],
        "warmup": run.schedule.warmup,
        "timings": dict(run.timings.seconds),
        "best": [*asdict(run.best).values()] if run.best else None,
        "last": [*asdict(run.last).values()] if run.last else None,
        **{name: getattr(run, name) for name in STATE_FIELDS},
    }


def read_state(folder: Path, config_class: type[RunConfig]) -> dict[str, Any]:
    """Read the state in a folder like `step-000123`, and construct its config, scores and schedule.

    Raises ValueError, naming the folder, if the config, a score or the schedule is invalid. The digests of a state
    do not ensure that its values are valid.
    """
    state = checkpoint.load_state(folder)
    with invalid_state(folder):
        return state | {
            "config": config_class.of(state["config"]),
            "schedule": [Record(*pair) for pair in state["schedule"]],
            "best": read_score(state["best"]),
            "last": read_score(state["last"]),
        }


def invalid_state(folder: Path) -> AbstractContextManager[None]:
    """Turn errors caused by a state's content into a ValueError with the folder and a remedy."""
    errors = AttributeError, LookupError, TypeError, ValueError
    reason = lambda e: str(e) if type(e) is ValueError else f"not the state of a run: {e!r:.200}"
    return prefix_errors(folder, errors, "; remove this state to resume from an older one", reason)


def load_run_state(run: Run, state: Mapping[str, Any], folder: Path) -> None:
    """Restore a run, except its schedule, from a result of `read_state`.

    Raises ValueError, naming the folder, if the state is from another model.
    """
    with invalid_state(folder):
        if state["best_weights"]:
            check_tensors(trainable_state(run.model), state["best_weights"])
        load_trainable_state(run.model, state["weights"])
        run.trainer.load_state_dict(state["trainer"])
        shard_optimizer(run.trainer.optimizer)
        for name in (*STATE_FIELDS, "best", "last"):
            setattr(run, name, state[name])
    run.best_weights = {name: tensor.cpu() for name, tensor in run.best_weights.items()}
    run.timings.seconds.update(state["timings"])


def read_score(values: Any) -> Score | None:
    """Restore a score from a list: three values are a `Score`, eight a `PreferenceScore`. None stays None."""
    if values is None:
        return None
    return PreferenceScore(*values) if len(values) == len(fields(PreferenceScore)) else Score(*values)


def shard_optimizer(optimizer: Optimizer) -> None:
    """Shard the tensors of a loaded optimizer state in the same way as the parameters."""
    for each in getattr(optimizer, "optimizers", [optimizer]):
        for p, entry in each.state.items():
            entry.update({name: ranks.shard_like(t, p) for name, t in entry.items() if t.shape == p.shape})


@dataclass
class Saver:
    """Saves the run in a thread of `pool` while training continues. Each rank saves its part; there is one save at
    a time.

    If a save fails, earlier states remain, `line` is called with a warning, and the next save tries again. With
    `strict`, there is no warning, and the next method call raises the error. `seconds` is the duration of the last
    save.
    """

    pool: ThreadPoolExecutor
    line: Line
    strict: bool = False
    seconds: float = 0.0
    _pending: Future[Path] | None = None

    @property
    def interval(self) -> float:
        """Seconds between saves: sqrt(2 * seconds of a save * seconds between failures), at least SAVE_SECONDS."""
        return SAVE_SECONDS * max(1.0, math.sqrt(self.seconds / CHEAP))

    def start(self, run: Run) -> None:
        """Start to save the current state. No other save may be in progress."""
        measure.return_freed_memory()  # so that the copy does not fragment memory of the next step
        snapshot = checkpoint.snapshot(run_state(run), unchanging=["best_weights"])
        self._pending = self.pool.submit(self._write, run.folder, run.trainer.number, snapshot)

    def _write(self, folder: Path, step: int, snapshot: checkpoint.Snapshot) -> Path:
        start = perf_counter()
        try:
            with_metrics = ranks.is_first() and (folder / METRICS).exists()  # resuming reads them
            ranks.all_gather(lambda: fsync_path(folder / METRICS) if with_metrics else None)
            return checkpoint.save_state(folder, step, snapshot)
        finally:
            self.seconds = perf_counter() - start

    @property
    def busy(self) -> bool:
        """True if a save is in progress."""
        return self._pending is not None and not self._pending.done()

    def ready(self) -> bool:
        """True if no save is in progress; also reports the previous save if it failed."""
        if idle := not self.busy:
            self.wait()
        return idle

    def last(self, run: Run) -> bool:
        """Save the current state and wait until it is saved; False if saving failed."""
        ranks.expect(0)
        self.wait()
        self.start(run)
        return self.wait()

    def wait(self) -> bool:
        """Wait for the save in progress, if any; False if that save failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
            return True
        except (OSError, ValueError) as error:
            if self.strict:
                raise
            self.line(f"warning: saving the state failed: {error}; the previous state is kept")
            return False


@dataclass
class StopRequest:
    """The requests that signals have made: to stop, or to save. `signal` is the number of the signal that
    requested a stop, or 0.

    `save` is True if a signal requested a save; `closing` is True after the last step.
    """

    signal: int = 0
    save: bool = False
    closing: bool = False

    def asked(self) -> bool:
        """True if a signal should stop long work like validation. Always False with several ranks, since signals
        may differ between ranks."""
        return bool(self.signal) and ranks.count() == 1


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Handle signals inside the `with` block: SIGINT, SIGTERM and SIGHUP request a stop after the current step,
    and a second signal exits at once. SIGUSR1 requests a save. An ignored SIGHUP (nohup) stays ignored."""
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if request.signal:
            os._exit(128 + number)
        request.signal = number
        if ranks.is_first():
            # Writes without the display, since the signal may have interrupted the display within a line.
            with suppress(OSError):  # the terminal may be closed
                os.write(2, CLOSING if request.closing else STOPPING)

    def save(number: int, frame: FrameType | None) -> None:
        request.save = True

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGUSR1: save}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = stop
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
