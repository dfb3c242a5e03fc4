"""A run in progress: created from its config, saved to disk, resumed."""

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf, isnan
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dunes import checkpoint, measure
from dunes.checkpoint import LoadedModel
from dunes.evaluate.loss import Score
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.files.json_file import Warn, append_record, parse_line, print_warning, read_lines, read_records
from dunes.files.staging import folder_lock
from dunes.parts import Decoder
from dunes.runs.config import MEASURED, RunConfig, T
from dunes.runs.stored_state import check_optimizer, check_tensors, first_difference, invalid_state, read_state
from dunes.runs.timings import Timings
from dunes.text import Tokenizer
from dunes.train import Schedule, Trainer, mutable_buffers
from dunes.units import plural

METRICS = "metrics.jsonl"
"""The file in a run's folder that has a record for each interval."""
FORMAT = 2
"""The format number of plan.json."""
METRIC = "the metrics of a step"
KEPT = ("elapsed", "begin", "best_step", "best_weights", "checks_since_best", "compiled")
"""Attributes of a run that are in its state as they are."""
SCORES = ("validation_loss", "bits_per_byte")
FALL = 0.5
FINAL_TOKENS = 262_144
"""Validation tokens that are scored at the end of a run."""
CLOSING = 3.0
"""Seconds that the end of a run takes besides the task's own: saving the model, plotting."""
WARMUP = 20


class Task(Protocol):
    """The task of a run. `fingerprints` identify its data, `tokens` is the number of validation targets."""

    @property
    def loaded(self) -> LoadedModel:
        """The model in training, with what it will be saved with."""
        ...

    @property
    def fingerprints(self) -> Mapping[str, str]: ...

    @property
    def tokens(self) -> int: ...

    @property
    def closing_seconds(self) -> float:
        """About how long `close` takes besides saving."""
        ...

    def batches(self, start: int) -> Iterator[Any]:
        """Endless batches for the trainer, starting with number `start`."""
        ...

    def score(self, dtype: torch.dtype, limit: int | None = None) -> Score:
        """The validation score, on all validation tokens or on about `limit` of them."""
        ...

    def sample(self) -> str:
        """Text that the model generates."""
        ...

    def memory_advice(self) -> str:
        """A sentence with the memory that the run needs, and how to reduce it."""
        ...

    def begin(self, run: "Run") -> list[str]:
        """Save what is of use while the run, which has started or been restored, goes on; returns lines for the
        user, the first one about the run."""
        ...

    def close(self, run: "Run", score: Score, interrupted: bool) -> list[str]:
        """Save the results into the run's folder, and return lines for the final report.

        `interrupted`: the run was asked to stop; skip the slow parts of the report.
        """
        ...


@dataclass
class Run:
    """A run's model and trainer, and its state besides the trainer's.

    `start_time` is the present minus the elapsed time of all processes of the run, `begin` the elapsed time at the
    beginning of the first step. `timings` cover all of them, `data` is the time spent waiting for batches up to
    the last step, and `warm` tells whether this process has made a step. `compiled` tells whether the loss is,
    None if that is not decided. `checks_since_best` is 0 right after the validation with the best score so far.
    `pace` has the seconds from step to step, without those in which code was loaded or compiled.
    """

    folder: Path
    config: RunConfig
    task: Task
    trainer: Trainer
    schedule: Schedule
    elapsed: float = 0.0
    start_time: float = 0.0
    begin: float = 0.0
    seconds_per_token: float = 0.0
    best: Score | None = None
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    last: Score | None = None
    checks_since_best: int = 0
    timings: Timings = field(default_factory=Timings)
    data: float = 0.0
    warm: bool = False
    compiled: bool | None = None
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def model(self) -> Decoder:
        return self.task.loaded.model

    def done(self, step: int) -> float:
        """The fraction of the run that is done."""
        return step / self.config.steps if self.config.steps else self.elapsed / self.config.seconds

    @property
    def seconds_left(self) -> float:
        """The time that the run still takes: up to its limit, or all its steps at the pace of the last ones."""
        if not self.config.steps:
            return max(0.0, self.config.seconds - self.elapsed)
        timed, number = self.timings.seconds, self.trainer.number
        average = timed["steps"] / max(1, number) or timed["first step"]
        return max(0, self.config.steps - number) * (fmean(self.pace) if self.pace else average)

    def score(self, limit: int | None = None) -> Score:
        """The validation score, on all validation tokens or on about `limit` of them."""
        return self.task.score(self.trainer.dtype, limit)

    @property
    def closing_seconds(self) -> float:
        """Seconds that the end of the run takes, with the final validation at the pace of the last one."""
        return CLOSING + self.task.closing_seconds + self.seconds_per_token * min(FINAL_TOKENS, self.task.tokens)

    def check(self, limit: int) -> Score:
        """Validate the model, and remember the best weights so far."""
        start = perf_counter()
        self.last = score = self.score(limit)
        self.seconds_per_token = (perf_counter() - start) / score.tokens
        self.checks_since_best += 1
        # No score is below NaN.
        if self.best is None or score.bits_per_byte < self.best.bits_per_byte or isnan(self.best.bits_per_byte):
            self.best, self.best_step, self.checks_since_best = score, self.trainer.number, 0
            self.best_weights = {k: v.detach().cpu().clone() for k, v in trainable_state(self.model).items()}
        return score


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of the state dict that training changes: trainable parameters and mutable buffers.

    All else is not included: it is loaded again from the base model.
    """
    trained = (k for k, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    names = {*mutable_buffers(model), *trained}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def load_trainable_state(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of `trainable_state`. Raises ValueError if it belongs to another model."""
    state = trainable_state(model)
    check_tensors(state, weights)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])


def build_schedule(config: RunConfig) -> Schedule:
    """The learning-rate schedule: over `steps`, or without an end for a time limit."""
    return Schedule.steps(config.steps, min(WARMUP, config.steps // 5), FALL) if config.steps else Schedule(WARMUP)


class FolderInUse(ValueError):
    """The folder already contains a run, or another process is using it."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run's lock, which is released when a process dies. Raises FolderInUse if another process has it."""
    lock = folder / "state" / "lock"  # each save locks the folder itself
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    try:
        with folder_lock(lock, wait=False):
            yield
    except BlockingIOError:
        words = "in use by another training process; wait for it, or choose another --out"
        raise FolderInUse(f"{folder}: {words}") from None


def start_run(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Save tokenizer and config. The config is written last: it makes the folder a run.

    Raises FolderInUse if another process has made it one meanwhile.
    """
    if (folder / "state" / "plan.json").exists():
        raise FolderInUse(f"{folder}: already contains a run; continue it with --resume, or choose another --out")
    write_file(folder / "state" / "tokenizer.json", tokenizer.json().encode())
    write_config(config, folder)


def write_config(config: RunConfig, folder: Path) -> None:
    stored = {"format": FORMAT} | asdict(config)
    write_file(folder / "state" / "plan.json", json.dumps(stored, indent=1).encode())


def read_config(folder: Path, config_class: type[T]) -> T | None:
    """The config of the run in this folder, if there is one.

    Raises ValueError, with the remedy, if it belongs to another kind of run, or cannot be read.
    """
    path = folder / "state" / "plan.json"
    if not path.is_file():
        return None
    try:
        stored = json_file.read(path)
    except ValueError as error:
        raise ValueError(f"{error}; choose another --out") from None
    try:
        if (number := stored.pop("format", 1)) != FORMAT:
            raise ValueError(f"written by another version of dunes (format {number}, this version reads {FORMAT})")
        return config_class.of(stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; choose another --out") from None


def resolve_config(
    config: T, folder: Path, resume: bool, asked: Collection[str] | None = None, override: Collection[str] = ()
) -> T:
    """The config to use: this one in a new folder, that of the run when resuming.

    Raises FolderInUse if the folder contains a run and `resume` is not set, ValueError if it contains none, or if
    an option that was `asked` for differs from the run's and is not in `override`. Measured options in `override`
    are measured again.
    """
    for path in (folder, folder / "state"):
        if os.path.lexists(path) and not path.is_dir():
            problem = "is a dangling link" if path.is_symlink() else "is not a folder"
            raise ValueError(f"{path}: {problem}; choose another --out")
    if fixed := sorted(set(override) - set(config.OVERRIDABLE)):
        others = ", ".join(config.OVERRIDABLE)
        raise ValueError(f"--override {fixed[0]}: cannot be changed when resuming; only {others} can")
    if asked and {"steps", "minutes"} <= {*asked}:
        raise ValueError("--steps and --minutes exclude each other; set one of them")
    earlier = read_config(folder, type(config))
    if earlier is None:
        if resume:
            _check_new_folder(folder)
            raise ValueError(f"{folder}: there is no run to resume; start one without --resume")
        if config.missing:
            raise ValueError(config.missing)
        _check_new_folder(folder)
        return config
    if not resume:
        raise FolderInUse(f"{folder}: already contains a run; continue it with --resume, or choose another --out")
    differences = config.differences(earlier, config.changed() if asked is None else asked)
    if earlier.steps and "minutes" in differences and not (asked and "steps" in asked):
        ends = plural(earlier.steps, "step")
        raise ValueError(f"{folder}: the run stops after {ends}, not after a time; use --steps N --override steps")
    if refused := [words for name, words in differences.items() if name not in override]:
        words = f"{'; '.join(refused)}; {_remedy(config, differences)}"
        raise ValueError(f"{folder}: cannot resume with other options: {words}")
    remeasured: dict[str, Any] = {name: None for name in override if name in MEASURED}
    return replace(earlier, **remeasured | {name: getattr(config, name) for name in differences})


def _remedy(config: RunConfig, differing: Collection[str]) -> str:
    """The remedy where these names differ from those of the run: --override if all of them may."""
    override = f", or pass --override {' '.join(differing)}" if {*differing} <= {*config.OVERRIDABLE} else ""
    return f"choose another --out{override}"


def _check_new_folder(folder: Path) -> None:
    """Raise ValueError unless a run can start here without overwriting a model that was not made by a run."""
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).exists():
            model = f"a model that was not made by a run ({name})"
            raise ValueError(f"{folder}: contains {model}; choose another --out")
    parent = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{parent}: is not a writable folder; choose another --out")


def run_state(run: Run) -> dict[str, Any]:
    """Everything that resuming needs."""
    return {
        "config": asdict(run.config),
        "fingerprints": dict(run.task.fingerprints),
        "model": run.task.loaded.architecture.record(),
        "weights": trainable_state(run.model),
        "trainer": run.trainer.state_dict(),
        "schedule": [[r.begin, r.end] for r in run.schedule.records],
        "warmup": run.schedule.warmup,
        "timings": dict(run.timings.seconds),
        "best": [*asdict(run.best).values()] if run.best else None,
        "last": [*asdict(run.last).values()] if run.last else None,
        **{name: getattr(run, name) for name in KEPT},
    }


def restore_run(
    run: Run, warn: Callable[[str], None], override: Collection[str] = (), strict: bool = False
) -> None:
    """Restore the newest undamaged state, if there is one.

    Raises ValueError, and changes nothing, if config, data or model differ from the state's in more than
    `override` names; and with `strict`, if the newest state is damaged.
    """

    def damaged(line: str) -> None:
        if strict:
            raise ValueError(line)
        warn(line)

    if (folder := checkpoint.latest_state(run.folder, damaged)) is None:
        warn("nothing saved yet; starting from step 0")
        truncate_metrics(run.folder / METRICS, 0)
        return
    state = read_state(folder, type(run.config))
    differences = run.config.differences(state["config"])
    stored = state["fingerprints"]
    if changed := [name for name, value in run.task.fingerprints.items() if stored.get(name, value) != value]:
        differences["model" if "the model" in changed else "corpus"] = f"{' and '.join(changed)} changed"
    if "model" in state and (words := first_difference(state["model"], run.task.loaded.architecture.record())):
        differences["model"] = f"the model's {words}"
    if refused := [words for name, words in differences.items() if name not in override]:
        raise ValueError(f"{run.folder}: cannot resume: {'; '.join(refused)}; {_remedy(run.config, differences)}")
    with invalid_state(folder):
        check_optimizer(run.trainer.optimizer, state["trainer"]["optimizer"])
        if state["best_weights"]:
            check_tensors(trainable_state(run.model), state["best_weights"])
        load_trainable_state(run.model, state["weights"])
        run.trainer.load_state_dict(state["trainer"])
    if not {"steps", "minutes"} & differences.keys():  # else warm up again, and decay towards the new end
        run.schedule.records[:] = state["schedule"]
        run.schedule.warmup = run.schedule.warmup if state["warmup"] is None else state["warmup"]
    for name in (*KEPT, "best", "last"):
        setattr(run, name, state[name])
    run.timings.seconds.update(state["timings"])
    run.data = run.timings.seconds["data"]
    truncate_metrics(run.folder / METRICS, run.trainer.number)
    warn(f"resuming after step {run.trainer.number}")
    if differences:
        append_metrics(run.folder, {"step": run.trainer.number, "changed": differences})
        write_config(run.config, run.folder)


def card_facts(run: Run, score: Score, verb: str) -> dict[str, Any]:
    """The card's record of the training, under the key `verb`."""
    made = {"steps": run.trainer.number, "best_step": run.best_step, "seconds": round(run.elapsed, 1)}
    measured = {name: getattr(score, name) for name in ("loss", "perplexity", "bits_per_byte", "tokens")}
    measured["peak_bytes"] = measure.peak_memory(run.trainer.device)
    timings = {phase: round(seconds, 3) for phase, seconds in run.timings.seconds.items()}
    return {verb: {**asdict(run.config), **made}, "measured": measured, "timings": timings}


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """Append a record to the run's metrics."""
    append_record(folder / METRICS, record)


def read_metrics(path: Path, warn: Warn = print_warning) -> list[dict[str, Any]]:
    """The undamaged records of a metrics.jsonl; `warn` gets a line about damaged ones."""
    return read_records(path, METRIC, _is_metric, warn)


def scalar_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record as metrics/NAME, without those that are vectors."""
    metrics = record.get("metrics")
    numbers = metrics.items() if isinstance(metrics, Mapping) else ()
    return {f"metrics/{name}": value for name, value in numbers if _is_number(value)}


def _is_metric(record: dict[str, Any]) -> bool:
    """Whether a record has a step number, and numbers in all numeric fields."""
    if type(record.get("step")) is not int or not _is_number(record["step"]):
        return False
    if not all(_is_number(record[name]) for name in SCORES if record.get(name) is not None):
        return False
    if "loss" not in record:
        return True
    steps = all(_is_number(record.get(name)) for name in ("loss", "grad_norm", "lr_scale", "count", "seconds"))
    return steps and "skipped" in record and 0 < record["seconds"] < inf


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def truncate_metrics(path: Path, step: int) -> None:
    """Remove the metrics after this step, which will be written again."""
    lines = read_lines(path)
    remaining = [text for text in lines if not _is_after(parse_line(text), step)]
    if len(remaining) < len(lines):
        write_file(path, b"\n".join(remaining))


def _is_after(record: dict[str, Any] | None, step: int) -> bool:
    return record is not None and _is_metric(record) and record["step"] > step
