"""Create, save and resume a run."""

import json
import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf, isnan
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dunes import checkpoint, measure, tree
from dunes.augment.quantized import Quantized
from dunes.checkpoint import LoadedModel
from dunes.evaluate.text_loss import Score
from dunes.files import json_file
from dunes.files.atomic import folder_lock, staging_folder, write_file
from dunes.files.json_file import append_record, parse_line, print_warning, read_lines, read_records
from dunes.measure import ranks
from dunes.parts import Decoder
from dunes.progress import Line
from dunes.runs.autosize import autocast_dtype
from dunes.runs.check_state import (
    check_optimizer,
    check_tensors,
    first_difference,
    invalid_state,
    read_state,
    shard_optimizer,
)
from dunes.runs.config import MEASURED, RunConfig, T
from dunes.text import Tokenizer
from dunes.train import Schedule, Trainer, mutable_buffers
from dunes.train.loss import Loss, next_token_loss
from dunes.units import plural

METRICS = "metrics.jsonl"
"""File in a run's folder with a JSON record for each step, and for changes of the run."""
FORMAT = 2
"""Format version of plan.json."""
STATE_FIELDS = ("elapsed", "begin", "best_step", "best_weights", "checks_since_best", "compiled")
"""Attributes of `Run` that are stored unchanged in its state."""
SCORES = ("validation_loss", "bits_per_byte")
FALL = 0.5
CHECK_TOKENS, FINAL_TOKENS, FEWEST_TOKENS = 16_384, 262_144, 2_048
"""Maximum numbers of validation tokens to score during a run, and at its end, and the minimum of both."""
CHECK_SHARE, FINAL_SHARE, SAMPLE_SHARE = 0.03, 0.06, 0.03
"""Maximum parts of a time limit for a validation during the run, the validation at its end, and a sample."""
CLOSING = 3.0
"""Seconds at the end of a run to save the model and plot, in addition to the task's `closing_seconds`."""
WARMUP = 20
Item = TypeVar("Item")


@dataclass
class Timings:
    """Seconds of each phase of a run. `with timings("saves"):` adds the time of its block to the phase "saves".

    Each use costs about a microsecond.
    """

    seconds: Counter[str] = field(default_factory=Counter)
    start: float = field(default_factory=lambda: monotonic())

    @property
    def elapsed(self) -> float:
        """Seconds since this object was created."""
        return monotonic() - self.start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(phase, perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase; negative seconds subtract time that is counted elsewhere."""
        self.seconds[phase] += seconds  # type: ignore[assignment]

    def each(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; the time spent fetching each one is added to the phase's total."""
        stream, end = iter(items), object()
        while True:
            with self(phase):
                item = next(stream, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def lines(self) -> list[str]:
        """Lines of a plain-text table with the seconds of each phase and its percentage of the total."""
        total, width = sum(self.seconds.values()) or 1.0, max(map(len, self.seconds), default=0)
        return [f"{name:{width}}  {time:8.1f} s  {time / total:6.1%}" for name, time in self.seconds.most_common()]


class Task(Protocol):
    """The task of a run. `fingerprints` are digests of its data, `tokens` is the number of validation targets."""

    @property
    def loaded(self) -> LoadedModel:
        """The model in training, with the tokenizer, card and architecture to save."""
        ...

    @property
    def fingerprints(self) -> Mapping[str, str]: ...

    @property
    def tokens(self) -> int: ...

    def closing_seconds(self, seconds_per_token: float) -> float:
        """Approximate seconds that `close` takes, not counting the time to save.

        `seconds_per_token` is the measured time to validate a token; 0 before it is measured.
        """
        ...

    def batches(self, start: int) -> Iterator[Any]:
        """Yields batches for the trainer without end, starting with batch number `start`."""
        ...

    def score(self, limit: int | None = None) -> Score:
        """The score of the model on about `limit` validation tokens, or on all of them if `limit` is None."""
        ...

    def sample(self) -> str:
        """Text generated by the model."""
        ...

    def memory_advice(self) -> str:
        """A sentence with the estimated memory of the run and the options that reduce it."""
        ...

    def begin(self, run: "Run") -> Iterable[str]:
        """Write files that are useful during the run; called after the run is started or restored.

        Lines for the user come as they are true; the first line describes the run.
        """
        ...

    def close(self, run: "Run", score: Score, interrupted: bool) -> list[str]:
        """Save the results into the run's folder, and return lines for the final report.

        If `interrupted` by a signal, slow parts of the report are skipped.
        """
        ...


@dataclass
class Run:
    """A run in progress: its task, trainer and schedule, and further state.

    `elapsed` is the run's time in seconds so far; a resumed run adds the time of its earlier processes, and
    `timings` include them too. `start_time` is the current time minus `elapsed`. `begin` is `elapsed` at the first
    step. `warm` is True after the first step of this process. `compiled` is True if the loss is compiled, None if
    undecided. `checks_since_best` counts the validations since the best score. `pace` has the seconds of recent
    steps, except of those that loaded or compiled code. `save_seconds` and `sample_seconds` are those of the
    last save and sample.
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
    save_seconds: float = 0.0
    sample_seconds: float = 0.0
    timings: Timings = field(default_factory=Timings)
    warm: bool = False
    compiled: bool | None = None
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def model(self) -> Decoder:
        return self.task.loaded.model

    @property
    def hardware(self) -> str:
        """Dtype, device and threads, as text."""
        threads = plural(self.config.threads or 1, "thread")
        return f"{self.config.dtype} on {self.trainer.device.type}, {threads}{ranks.describe(self.model)}"

    def done(self, step: int) -> float:
        """Progress of the run after `step` steps, from 0 to 1."""
        return step / self.config.steps if self.config.steps else self.elapsed / self.config.seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; with fixed steps, estimated seconds of the remaining steps."""
        if not self.config.steps:
            return max(0.0, self.config.seconds - self.elapsed)
        timed, number = self.timings.seconds, self.trainer.number
        average = timed["steps"] / max(1, number) or timed["first step"]
        return max(0, self.config.steps - number) * (fmean(self.pace) if self.pace else average)

    @property
    def closing_seconds(self) -> float:
        """Estimated seconds from the last step to the end: its validation, a save, a sample, and the close."""
        check = self.seconds_per_token * min(check_tokens(self.config), self.task.tokens)
        close = self.task.closing_seconds(self.seconds_per_token) + self.final_seconds
        sample = self.sample_seconds or min(CLOSING, SAMPLE_SHARE * self.config.seconds)
        return CLOSING + check + self.save_seconds + sample + close

    @property
    def final_tokens(self) -> int:
        """Number of validation tokens to score at the end."""
        timed = self.seconds_per_token and not self.config.steps
        affordable = int(FINAL_SHARE * self.config.seconds / self.seconds_per_token) if timed else FINAL_TOKENS
        return min(FINAL_TOKENS, affordable) if affordable > CHECK_TOKENS else check_tokens(self.config)

    @property
    def final_seconds(self) -> float:
        """Estimated seconds of the final validation, if it is as fast as the last one was."""
        return 0.0 if self.has_final_score else self.seconds_per_token * min(self.final_tokens, self.task.tokens)

    @property
    def has_final_score(self) -> bool:
        """True if validations during the run score as many tokens as the final one would."""
        return self.best is not None and min(self.final_tokens, self.task.tokens) <= check_tokens(self.config)

    def check(self, limit: int) -> Score:
        """Validate the model on about `limit` tokens, and copy its weights if they are the best so far."""
        start = perf_counter()
        self.last = score = self.task.score(limit)
        (self.seconds_per_token,) = ranks.largest((perf_counter() - start) / score.tokens)
        self.checks_since_best += 1
        # NaN compares as not smaller, so a best score of NaN is replaced explicitly.
        if self.best is None or score.criterion < self.best.criterion or isnan(self.best.criterion):
            self.best, self.best_step, self.checks_since_best = score, self.trainer.number, 0
            self.best_weights = {k: v.detach().cpu().clone() for k, v in trainable_state(self.model).items()}
        return score


def check_tokens(config: RunConfig) -> int:
    """Approximate number of validation tokens to score during a run, the same in all of its validations.

    It follows from the estimated rate: a token is validated in a third of the time that training on it takes.
    """
    if config.steps or not config.rate:
        return CHECK_TOKENS
    return min(CHECK_TOKENS, max(FEWEST_TOKENS, int(CHECK_SHARE * config.seconds * 3 * config.rate)))


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of the state dict that training changes: trainable parameters and mutable buffers.

    Other entries are loaded again from the base model.
    """
    trained = (k for k, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    names = {*mutable_buffers(model), *trained}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def load_trainable_state(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load a result of `trainable_state` into the model. Raises ValueError if it is from another model."""
    state = trainable_state(model)
    check_tensors(state, weights)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(ranks.part(weights[name], tensor))


def set_trainable(model: nn.Module, globs: Sequence[str]) -> None:
    """Make a parameter trainable if its name or its module's name matches the globs, and freeze all others.

    Raises ValueError if no parameter matches, and for "**" if some weights are quantized.
    """
    if tuple(globs) == ("**",) and any(isinstance(module, Quantized) for module in model.modules()):
        raise ValueError("all weights are to be trained, and some are quantized; train an adapter on them instead")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(selects(globs, name))
    if not any(p.requires_grad for p in model.parameters()):
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"{' '.join(globs)} matches no parameter; the model has {names[:300]}")


def selects(globs: Iterable[str], name: str) -> bool:
    """True if some glob matches the parameter's name or its module's name, and the last such glob has no `!`."""
    names, selected = (name, name.rpartition(".")[0]), False
    for glob in globs:
        if any(tree.matches(glob.removeprefix("!"), n) for n in names):
            selected = not glob.startswith("!")
    return selected


def build_schedule(config: RunConfig) -> Schedule:
    """The learning-rate schedule over `config.steps`; for a time limit, a schedule whose end is decided later."""
    return Schedule.steps(config.steps, min(WARMUP, config.steps // 5), FALL) if config.steps else Schedule(WARMUP)


def new_run(
    folder: Path,
    config: RunConfig,
    task: Task,
    optimizer: Optimizer,
    accumulate: int = 1,
    loss: Loss | None = None,
) -> Run:
    """A run at step 0, with the schedule of its config; `loss` is by default `next_token_loss`."""
    ranks.agree(task.fingerprints)
    schedule = build_schedule(config)
    options: dict[str, Any] = {"lr_scale": schedule.lr_scale, "dtype": autocast_dtype(config), "seed": config.seed}
    trainer = Trainer(task.loaded.model, optimizer, loss or next_token_loss, accumulate=accumulate, **options)
    return Run(folder, config, task, trainer, schedule)


class FolderInUse(ValueError):
    """Raised for a folder that already contains a run, or that another process is using."""


def _another_run(folder: Path) -> FolderInUse:
    return FolderInUse(f"{folder}: already contains a run; continue it with --resume, or choose another --out")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the run's folder. Raises FolderInUse if another process has the lock.

    The lock is also released when the process dies.
    """
    if not ranks.is_first():
        yield
        return
    lock = folder / "state" / "lock"  # each save locks the folder itself
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    try:
        with folder_lock(lock, wait=False):
            if lock.read_text() != ranks.job():  # so that a kill in a restart does not leave it empty
                lock.write_text(ranks.job())
            yield
    except BlockingIOError:
        remedy = "wait for it, or choose another --out"
        raise FolderInUse(f"{folder}: in use by another training process; {remedy}") from None


def check_shared(folder: Path) -> None:
    """Raise ValueError, on all ranks, if a rank cannot write where the first does. The folder `state` exists."""

    def write(path: Path) -> None:
        try:
            path.touch()
        except OSError as error:
            remedy = "--out must be on a disk that all machines share and write to"
            raise ValueError(f"{folder}: cannot write where rank 0 does ({error.strerror}); {remedy}") from None

    with ExitStack() as stack:
        stage = lambda: stack.enter_context(staging_folder(folder / "state" / "new")) if ranks.is_first() else None
        (staged, *_) = ranks.together(stage)
        assert staged is not None, "the first rank's"
        ranks.together(lambda: write(staged / str(ranks.rank())))


def was_started_by_job(folder: Path) -> bool:
    """True if the last run in the folder was started by the same torchrun command as this process."""
    lock = folder / "state" / "lock"
    started = ranks.asked() and lock.is_file() and (folder / "state" / "plan.json").exists()
    return started and lock.read_text() == ranks.job()


def start_run(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Save the tokenizer, then the config; a folder counts as a run once it has the config.

    Raises FolderInUse if the folder already contains a run.
    """
    if (folder / "state" / "plan.json").exists():
        raise _another_run(folder)
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
    """The config to use: `config` in a new folder; with `resume`, the stored config with changes in `override`.

    Raises FolderInUse if the folder contains a run and `resume` is False. Raises ValueError if the folder has no
    run to resume, or if an option set by the user (`asked`) differs from the stored one and is not in `override`.
    Options chosen by measuring the machine (dtype, threads, device) are chosen anew if they are in `override`.
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
        if config.missing and not resume:
            raise ValueError(config.missing)
        _check_new_folder(folder)
        if resume:
            raise ValueError(f"{folder}: there is no run to resume; start one without --resume")
        return config
    if not resume:
        raise _another_run(folder)
    differences = config.differences(earlier, config.changed() if asked is None else asked)
    if earlier.steps and "minutes" in differences and not (asked and "steps" in asked):
        ends = plural(earlier.steps, "step")
        raise ValueError(f"{folder}: the run stops after {ends}, not after a time; use --steps N --override steps")
    if refused := [text for name, text in differences.items() if name not in override]:
        remedy = _remedy(config, differences)
        raise ValueError(f"{folder}: cannot resume with other options: {'; '.join(refused)}; {remedy}")
    remeasured: dict[str, Any] = {name: None for name in override if name in MEASURED}
    return replace(earlier, **remeasured | {name: getattr(config, name) for name in differences})


def _remedy(config: RunConfig, differing: Collection[str]) -> str:
    """Advice if options differ from the run's: another --out, or --override if all of these options may change."""
    override = f", or pass --override {' '.join(differing)}" if {*differing} <= {*config.OVERRIDABLE} else ""
    return f"choose another --out{override}"


def _check_new_folder(folder: Path) -> None:
    """Raise ValueError if the folder is not writable, or contains a model that would be overwritten."""
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).exists():
            model = f"a model that was not made by a run ({name})"
            raise ValueError(f"{folder}: contains {model}; choose another --out")
    parent = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{parent}: is not a writable folder; choose another --out")


def run_state(run: Run) -> dict[str, Any]:
    """The state from which the run can be resumed: a nested dict of tensors and JSON values."""
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
        **{name: getattr(run, name) for name in STATE_FIELDS},
    }


def restore_run(run: Run, line: Line, override: Collection[str] = (), strict: bool = False) -> None:
    """Restore the newest undamaged state of the run; without one, start from step 0.

    Raises ValueError, and changes nothing, if the config, data or model differs from the saved one in an option
    that is not in `override`. With `strict`, raises ValueError if the newest state is damaged.
    """

    def damaged(text: str) -> None:
        if strict:
            raise ValueError(text)
        line(text)

    folder = checkpoint.latest_state(run.folder, damaged)
    ranks.agree({"the newest state": folder and folder.name})
    if folder is None:
        line("nothing saved yet; starting from step 0")
        truncate_metrics(run.folder / METRICS, 0)
        return
    state = read_state(folder, type(run.config))
    differences = run.config.differences(state["config"])
    stored = state["fingerprints"]
    if changed := [name for name, value in run.task.fingerprints.items() if stored.get(name, value) != value]:
        differences["model" if "the model" in changed else "corpus"] = f"{' and '.join(changed)} changed"
    architecture = run.task.loaded.architecture.record()
    if "model" in state and (difference := first_difference(state["model"], architecture)):
        differences["model"] = f"the model's {difference}"
    if refused := [text for name, text in differences.items() if name not in override]:
        raise ValueError(f"{run.folder}: cannot resume: {'; '.join(refused)}; {_remedy(run.config, differences)}")
    with invalid_state(folder):
        check_optimizer(run.trainer.optimizer, state["trainer"]["optimizer"])
        if state["best_weights"]:
            check_tensors(trainable_state(run.model), state["best_weights"])
        load_trainable_state(run.model, state["weights"])
        run.trainer.load_state_dict(state["trainer"])
        shard_optimizer(run.trainer.optimizer)
    if not {"steps", "minutes"} & differences.keys():  # else the schedule starts again, towards the new end
        run.schedule.records[:] = state["schedule"]
        run.schedule.warmup = run.schedule.warmup if state["warmup"] is None else state["warmup"]
    for name in (*STATE_FIELDS, "best", "last"):
        setattr(run, name, state[name])
    run.best_weights = {name: tensor.cpu() for name, tensor in run.best_weights.items()}
    run.timings.seconds.update(state["timings"])
    truncate_metrics(run.folder / METRICS, run.trainer.number)
    line(f"resuming after step {run.trainer.number}")
    if differences:
        append_metrics(run.folder, {"step": run.trainer.number, "changed": differences})
        if ranks.is_first():
            write_config(run.config, run.folder)


def card_facts(run: Run, score: Score, verb: str) -> dict[str, Any]:
    """Entries for the card: the training (under the key `verb`), the measured scores, and the timings."""
    progress = {"steps": run.trainer.number, "best_step": run.best_step, "seconds": round(run.elapsed, 1)}
    measured = {**score.facts, "peak_bytes": measure.peak_memory(run.trainer.device)}
    timings = {phase: round(seconds, 3) for phase, seconds in run.timings.seconds.items()}
    return {verb: {**asdict(run.config), **progress}, "measured": measured, "timings": timings}


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    """On the first rank, append a record to the run's metrics.jsonl."""
    if ranks.is_first():
        append_record(folder / METRICS, record)


def read_metrics(path: Path, warn: Line = print_warning) -> list[dict[str, Any]]:
    """The undamaged records of a metrics.jsonl; `warn` is called with a line about damaged records."""
    return read_records(path, "the metrics of a step", _is_metric, warn)


def _is_metric(record: dict[str, Any]) -> bool:
    """True if a record has an integer step and valid numbers in all numeric fields."""
    values = [record[name] for name in SCORES if record.get(name) is not None]
    if "loss" in record:
        values += [record.get(name) for name in ("loss", "grad_norm", "lr_scale", "count", "seconds")]
    if type(record.get("step")) is not int or not all(map(is_number, [record["step"], *values])):
        return False
    return "loss" not in record or ("skipped" in record and 0 < record["seconds"] < inf)


def is_number(value: object) -> bool:
    """True for a float, and for an integer that a float stores exactly."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def truncate_metrics(path: Path, step: int) -> None:
    """Remove the records of later steps than `step` from metrics.jsonl, since a resumed run writes them again."""
    lines = read_lines(path)
    records = map(parse_line, lines)
    later = [record is not None and _is_metric(record) and record["step"] > step for record in records]
    if any(later) and ranks.is_first():
        write_file(path, b"\n".join(line for line, is_later in zip(lines, later, strict=True) if not is_later))
