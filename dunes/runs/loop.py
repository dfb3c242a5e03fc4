"""The training loop: runs the steps, and between them validation, samples, saves and progress reports."""

import math
import os
import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, process_time
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dunes import __version__, checkpoint, measure
from dunes.checkpoint.state import KEEP_STATES
from dunes.data.duplicates import SPLIT_VERSION
from dunes.evaluate.text_loss import Score
from dunes.files.atomic import fsync_path
from dunes.files.json_file import append_text
from dunes.measure import ranks
from dunes.progress import Display, Interrupted, Line, interruptible, phase, shown_by
from dunes.runs.autosize import OVERHEAD_SECONDS, autocast_dtype, flops
from dunes.runs.compiled_loss import compile_loss
from dunes.runs.config import RunConfig, RunOptions, T
from dunes.runs.memory import measure_step
from dunes.runs.picture import load_picture, loss_picture, smooth, with_violation
from dunes.runs.run import (
    FALL,
    METRICS,
    FolderInUse,
    Run,
    Timings,
    append_metrics,
    check_shared,
    check_tokens,
    load_trainable_state,
    read_config,
    read_metrics,
    resolve_config,
    restore_run,
    run_lock,
    run_state,
    start_run,
)
from dunes.runs.tensorboard import TensorBoard
from dunes.train import Clock, Diverged, Record, Step, Trainer
from dunes.units import format_bytes, format_count, format_seconds, plural

SAVE_SECONDS = 60.0
"""Seconds between saves, if a save takes at most CHEAP seconds. https://doi.org/10.1145/361147.361115"""
CHEAP = SAVE_SECONDS**2 / (2 * 8 * 3600)
"""Seconds of a save that is worth SAVE_SECONDS of lost work, with a failure in eight hours."""
LOAD_PICTURE = "expert_load.png"
SAMPLES = (5, 50, 200, 500, 2_500, 8_500)
PATIENCE, WORSE = 3, 1.01  # validations without improvement, and ratio to the best loss, for a warning
# A time-limited run that memorises a small text (docs/log/training.md, "A small text is learned by heart") ends
# early at LONG_AGO times its best step, if validation loss is above RISEN times the best, and training loss below
# MEMORISED times validation loss.
LONG_AGO, RISEN, MEMORISED = 3, 1.03, 0.6
SLOW = 0.5
"""A run is slow if its rate is below this fraction of the estimate, or its processor time is below this fraction
of its threads' maximum."""
WATCHED = 10
"""Number of steps that are timed before the user is warned of a slow run."""
HOT = "not for other programs: the processor is slower than when it was measured (heat, power saving)"
SMALL_STEP = 1_000
"""In steps of fewer tokens, fixed costs may dominate; the estimate does not include fixed costs."""

STOPPING = b"\nstopping after this step and saving; interrupt again to exit at once\n"
CLOSING = b"\nall steps are done; saving; interrupt again to exit at once\n"
NOT_SAVED = 3
DIVERGED = 4


def begin_run(config: T, folder: Path, display: Display, options: RunOptions) -> T | None:
    """The config of a new run, or of the run to resume in the folder; no files are written.

    Returns None if a dry run only reports on the existing run. Raises ValueError for invalid options, and for a
    folder that cannot be used. Also sets the device.
    """
    TensorBoard(folder if options.tensorboard else None, NonFatal(display))  # raises if it is not installed
    config = config.with_absolute_paths()
    ranks.agree({"--out": str(folder.absolute()), "a run in it": (folder / "state" / "plan.json").exists()})
    with _warn_in_dry_run(display, options.dry_run):
        config = resolve_config(config, folder, options.resume, options.asked, options.override)
    if ranks.is_first() and (folder / "state" / "lock").exists():
        with _warn_in_dry_run(display, options.dry_run), run_lock(folder):  # fail before reading the data
            pass
    if options.dry_run and (earlier := read_config(folder, type(config))) is not None:
        state = checkpoint.latest_state(folder, display.line)
        progress = f"last saved state: step {int(state.name[5:])}" if state else "no training state"
        continuation = f"; --resume continues from there up to {config.length}" if options.resume and state else ""
        display.line(f"the run in {folder}: {earlier.about}; {progress}{continuation}")
        if config.missing:
            return None
    if not options.resume:
        config = replace(config, split_version=SPLIT_VERSION)
    if config.batch:
        ranks.rows(config.batch)
    ranks.agree({"dunes": __version__, "torch": torch.__version__, **asdict(config)})
    measure.set_device(config.device)
    measure.keep_freed_memory()
    measure.flush_denormals()
    return config


def report_step(
    config: RunConfig,
    trainer: Trainer,
    batch: tuple[Tensor, ...],
    display: Display,
    fit: Callable[[float], float] = lambda per_token: 0.0,
) -> float:
    """Measure a step whose micro-batches are like `batch`, and show the run's tokens/s, steps, time and disk.

    `fit` are the seconds of all that is fitted, of a model that evaluates a token in `per_token` seconds. Returns
    these seconds per token; 0 if no step was measured.
    """
    per_token = 0.0
    if cost := measure_step(trainer, batch):
        per_token = cost.gradients / 3 / cost.tokens  # a backward pass takes twice as long as the forward pass
        outside = OVERHEAD_SECONDS + 2 * check_tokens(config) * per_token + fit(per_token)
        steps = config.steps or max(1, round((config.seconds - outside) / cost.seconds))
        rate, total = format_count(cost.tokens / cost.seconds), format_seconds(steps * cost.seconds + outside)
        disk, seconds = format_bytes((KEEP_STATES + 1) * cost.state), format_seconds(cost.seconds)
        display.detail(
            f"measured: {rate} tokens/s, {seconds} per step; {plural(steps, 'step')} in about {total}; "
            f"training states take up to {disk} of disk"
        )
    return per_token


def execute_run(run: Run, display: Display, options: RunOptions, timings: Timings) -> int:
    """Train the model of a run; a resumed run first restores its last state. Call it inside `run_lock`.

    `timings` are the seconds of the preparation, which count as elapsed time. Returns an exit status: 0, 128 + the
    number of the signal that ended the run, 3 if the last state could not be saved, or 4 if training did not
    recover from NaN or infinity.
    """
    if ranks.count() > 1:
        check_shared(run.folder)
    with ThreadPoolExecutor(1, "saver") as pool:
        saver = Saver(pool, display.line, options.strict)
        with timings("building the model"):
            if options.resume:
                restore_run(run, display.line, options.override, options.strict)
            elif ranks.is_first():
                start_run(run.config, run.folder, run.task.loaded.require_tokenizer())
        run.timings.seconds.update(timings.seconds)
        board_folder = run.folder if options.tensorboard and ranks.is_first() else None
        place = lambda: f"out of memory after step {run.trainer.number}; {run.task.memory_advice()}"
        with out_of_memory(run.folder, place), TensorBoard(board_folder, NonFatal(display)) as board:
            with shown_by(display.state):
                for line in run.task.begin(run):
                    display.detail(line)
            measure.return_freed_memory()
            run.elapsed += timings.elapsed
            status = _train(run, saver, display, board)
        if options.profile:
            display.line("\n".join(["wall-clock time:", *run.timings.lines()]))
        return status


@contextmanager
def out_of_memory(folder: Path, describe: Callable[[], str]) -> Iterator[None]:
    """Inside the `with` block, turn lack of memory into a ValueError that describes what the run needs."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not measure.out_of_memory(error):
            raise
        raise ValueError(f"{describe()}; {folder} has what was ready") from None


@contextmanager
def _warn_in_dry_run(display: Display, dry: bool) -> Iterator[None]:
    """In a dry run, print a warning instead of raising FolderInUse."""
    try:
        yield
    except FolderInUse as error:
        if not dry:
            raise
        display.line(f"warning: {error}")


@dataclass
class StopRequest:
    """Requests by signals: `signal` is the number of the signal that requested a stop, or 0.

    `save` is True if a signal requested a save, `closing` after the last step.
    """

    signal: int = 0
    save: bool = False
    closing: bool = False

    def asked(self) -> bool:
        """True if validation and the like are to be left; several ranks would leave them in different places."""
        return bool(self.signal) and ranks.count() == 1


@dataclass
class Saver:
    """Saves the run, each rank its part, one save at a time, in a thread of `pool` while training continues.

    If a save fails, earlier states remain, `line` gets a warning, and the next save tries again. With `strict`,
    the next call raises the save's error instead. `seconds` is the duration of the last save.
    """

    pool: ThreadPoolExecutor
    line: Line
    strict: bool = False
    seconds: float = 0.0
    _pending: Future[Path] | None = None

    @property
    def interval(self) -> float:
        """Seconds between saves: by Young's rule, sqrt(2 * seconds of a save * seconds between failures)."""
        return SAVE_SECONDS * max(1.0, math.sqrt(self.seconds / CHEAP))

    def start(self, run: Run) -> bool:
        """Start to save the current state. Returns False, without saving, if the previous save is in progress."""
        if not self.ready():
            return False
        measure.return_freed_memory()  # else the copy's blocks would split what the next step needs
        snapshot = checkpoint.snapshot(run_state(run), unchanging=["best_weights"])
        self._pending = self.pool.submit(self._write, run.folder, run.trainer.number, snapshot)
        return True

    def _write(self, folder: Path, step: int, snapshot: checkpoint.Snapshot) -> Path:
        start = perf_counter()
        try:
            return _write(folder, step, snapshot)
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


def _train(run: Run, saver: Saver, display: Display, board: TensorBoard) -> int:
    compile_loss(run, display.line)
    with _signals() as request:
        try:
            with interruptible(request.asked):
                train_loop(run, request, saver, display, board)
        except Diverged as error:
            saver.last(run)
            display.line(f"{error} (the last state is in {run.folder}/state)")
            return DIVERGED
        except OSError as error:
            if not ranks.is_shared(error):
                raise
            display.line(f"stopped: {error}; the last good state is in {run.folder}/state")
            return NOT_SAVED
        except ValueError:  # from the data, so that the weights are worth saving
            if ranks.count() == 1:  # else the others do not know
                saver.last(run)
            raise
        return _finish(run, request, saver, display, board)


@contextmanager
def _signals() -> Iterator[StopRequest]:
    """Handle signals: the first SIGINT, SIGTERM or SIGHUP requests a stop after the current step, a second exits
    at once; SIGUSR1 requests a save. An ignored SIGHUP (nohup) stays ignored."""
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if request.signal:
            os._exit(128 + number)
        request.signal = number
        if ranks.is_first():
            # Not through the display, in which the handler may have interrupted a line.
            with suppress(OSError):  # a terminal that was closed
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


def train_loop(run: Run, request: StopRequest, saver: Saver, display: Display, board: TensorBoard) -> None:
    """Train, with validation, samples and saves between steps, until the schedule ends or a stop is requested.

    Raises Diverged if training does not recover from NaN or infinity, ValueError if the tokens changed on disk,
    and OSError if a strict save fails.
    """
    config = run.config
    (run.elapsed,) = ranks.largest(run.elapsed)
    run.start_time, saved, warned = monotonic() - run.elapsed, run.elapsed, 0
    run.begin = run.begin or run.elapsed
    clock = None if config.steps else Clock(run.schedule, config.seconds, FALL, run.begin)
    pace, durations = PaceCheck(run), deque[float](maxlen=100)
    report, non_fatal = _step_reporter(run, display), board.non_fatal
    over, waited = run.schedule.is_over(run.trainer.number), run.timings.seconds["data"]
    batches = run.timings.each("data", run.task.batches(run.trainer.consumed))
    steps = run.trainer.run(batches) if not over else iter(())
    if run.trainer.number and ranks.count() == 1 and (over or _check_due(run.trainer.number)):
        with run.timings("validation"), non_fatal("validation"):
            _complete_validation(run)
    for step in map(with_violation, steps):
        ranks.expect(0)
        before = run.elapsed
        # Ranks that followed their own clocks and signals would soon wait for each other in different places.
        run.elapsed, closing = ranks.largest(monotonic() - run.start_time, run.closing_seconds)
        if run.warm:
            run.pace.append(run.elapsed - before)
            durations.append(step.seconds)
        data = run.timings.seconds["data"]
        # The first step of a process, which loads kernels or compiles, is a phase of its own.
        run.timings.add("steps" if run.warm else "first step", step.seconds - (data - waited))
        run.warm, waited = True, data
        if clock is not None:
            clock.seconds = config.seconds - min(closing, (config.seconds - run.begin) / 2)
            clock.update(step.number, run.elapsed)
        over, score = run.schedule.is_over(step.number), None
        with run.timings("validation"), non_fatal("validation"):
            score = run.check(check_tokens(run.config)) if over or _check_due(step.number) else None
        if score and warned != run.best_step and (warning := rising_loss_warning(run)):
            warned = run.best_step
            display.line(warning)
        with non_fatal("writing metrics.jsonl"):
            _log_step(run.folder, step, score)
        board.step(step, score.record if score else {})
        with run.timings("samples"), non_fatal("sampling"):
            if step.number in SAMPLES and not over:
                board.sample(step.number, _sample(run, display, step.number))
        report(step)
        if warning := pace.warning(step):
            display.line(warning)
        if over:
            return
        if score and (reason := early_end(run, step.loss)):
            display.line(reason)
            run.schedule.records.append(Record(step.number, step.number))  # over for a resumed run, too
            return
        run.save_seconds = saver.seconds
        stop, save, busy, interval = ranks.largest(request.signal, request.save, saver.busy, saver.interval)
        if stop:
            display.line(f"stopping after step {step.number} and saving")
            return
        with run.timings("saves"):
            if saver.ready() and not busy and (save or run.elapsed - saved > interval):
                saved, request.save = run.elapsed, False
                saver.start(run)
        ranks.expect(max(durations, default=0))


@dataclass
class NonFatal:
    """Lets training continue when the work in `with non_fatal("sampling"):` fails.

    An OSError or lack of memory is reported, once for each kind of work. Other errors are raised.
    """

    display: Display
    failed: set[str] = field(default_factory=set)

    @contextmanager
    def __call__(self, work: str) -> Iterator[None]:
        try:
            yield
        except Interrupted:  # the loop sees the request after this step's work
            return
        except (OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OSError) and not measure.out_of_memory(error):
                raise
            if ranks.count() > 1 and work in ("validation", "sampling"):  # the others wait for this rank
                raise
            if work not in self.failed:
                reason = " ".join(str(error).split())[:200]
                self.display.line(f"warning: {work} failed: {reason}; training continues")
            self.failed.add(work)


class PaceCheck:
    """Detects a slow run. Call `check.warning(step)` after each step: it returns one warning in total, else ""."""

    def __init__(self, run: Run) -> None:
        self.run, self.warned = run, False
        self.tokens = deque[int](maxlen=run.pace.maxlen)
        self._start: tuple[float, float] | None = None

    def warning(self, step: Step) -> str:
        run, config = self.run, self.run.config
        self._start = self._start or (perf_counter(), process_time())  # after a step that may have compiled
        self.tokens.append(step.count)
        if self.warned or len(run.pace) < WATCHED or run.trainer.device.type != "cpu":
            return ""
        tokens = fmean([*self.tokens][-len(run.pace) :])
        rate = tokens / fmean(run.pace)
        estimated = config.rate if config.rate and tokens >= SMALL_STEP else 0.0
        wall, processor = perf_counter() - self._start[0], process_time() - self._start[1]
        usable = min(config.threads or 1, _cores())
        share = processor / (wall * usable)
        if rate >= SLOW * estimated if estimated else share >= SLOW or _load() <= _cores():
            return ""
        self.warned = True
        estimate = (
            f", where the measured rates of this machine allow {format_count(estimated)}" if estimated else ""
        )
        left = f"{share * usable:.1f} processors to its {plural(config.threads or 1, 'thread')}"
        reason = HOT if share > (1 + SLOW) / 2 else f"other programs leave {left} (load {_load():.1f})"
        ends = "takes longer" if config.steps else f"makes fewer steps in its {plural(config.minutes, 'minute')}"
        return f"warning: {format_count(rate)} {config.counted}/s{estimate}: {reason}; the run {ends}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float:
    """Average number of running processes in the last minute; infinite if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.inf


def _check_due(step: int) -> bool:
    return step % 50 == 0 or step in (10, 25)


def _complete_validation(run: Run) -> None:
    """Validate after the last step of a resumed run, unless its state has that score: a signal interrupted it."""
    number = run.trainer.number
    losses = [
        r["validation_loss"]
        for r in read_metrics(run.folder / METRICS, lambda line: None)
        if r["step"] == number and "validation_loss" in r
    ]
    if run.last is None or run.last.loss not in losses:
        score = run.check(check_tokens(run.config))
        if not losses:
            append_metrics(run.folder, {"step": number} | score.record)


def _log_step(folder: Path, step: Step, score: Score | None) -> None:
    """Append the record of a step to metrics.jsonl; `loss_hex` is its exact loss as a hexadecimal float."""
    record: dict[str, Any] = asdict(step)
    metrics = {"metrics": values} if (values := record.pop("metrics")) else {}
    record = {"step": record.pop("number")} | record | metrics | {"loss_hex": step.loss.hex()}
    if score:
        record |= score.record
    append_metrics(folder, record)


def _step_reporter(run: Run, display: Display) -> Callable[[Step], None]:
    """A function that reports each step to the display."""
    losses: list[float] = []
    work, unit = flops(run.model, run.config.context_length), run.config.counted.replace("tokens", "tok")
    dtype, mfu = autocast_dtype(run.config), measure.model_flops_utilization

    def report(step: Step) -> None:
        if step.skipped:
            values = f"loss {step.loss}, gradient norm {step.grad_norm}"
            display.line(f"step {step.number}: {values}; this step was skipped")
        else:
            losses[:] = [*losses[-100:], step.loss]
        parts = [
            f"step {step.number}",
            f"loss {smooth(losses)[-1]:.3f}" if losses else "",
            *(f"{name} {value:.3g}" for name, value in step.metrics.items() if isinstance(value, float)),
            f"val {run.last.criterion:.3f}{run.last.unit}" if run.last else "",
            f"lr {run.trainer.learning_rates()[0] * step.lr_scale:.2g}",
            f"{format_count(step.count / step.seconds)} {unit}/s",
            f"{mfu(work * step.count / ranks.count(), step.seconds, dtype, run.trainer.device):.0%} MFU"
            if run.config.matmul
            else "",
            f"{measure.peak_memory(run.trainer.device) / 1e9:.1f} GB",
            f"{format_seconds(round(run.seconds_left))} left",
        ]
        display.state("  ".join(filter(None, parts)), run.done(step.number))

    return report


def _sample(run: Run, display: Display, weights_step: int) -> str:
    """Generate a sample with the current weights, which are from step `weights_step`; show and store the sample.

    It is appended to samples.md.
    """
    steps = plural(run.trainer.number, "step")
    if weights_step != run.trainer.number:
        steps += f", with the best weights (step {weights_step})"
    start = perf_counter()
    text = run.task.sample()
    run.sample_seconds = perf_counter() - start
    display.detail(f"\n--- sample after {steps} ---\n{text}\n---")
    if ranks.is_first():
        append_text(run.folder / "samples.md", f"## After {steps}\n\n```\n{text}\n```\n\n")
    return text


def _finish(run: Run, request: StopRequest, saver: Saver, display: Display, board: TensorBoard) -> int:
    """Save the state and the results, plot the loss, and print the final report; returns the exit status."""
    step, non_fatal = run.trainer.number, board.non_fatal
    number, request.closing = int(ranks.largest(request.signal)[0]), True
    try:
        with run.timings("saves"):
            saved = saver.last(run)
        with display.own_bar("closing"):
            try:
                with interruptible(lambda: not number and request.asked()):
                    score, saved_step, report = _close(run, bool(number), display, board)
            except Interrupted:
                number = request.signal
                score, saved_step, report = _close(run, True, display, board)
    except OSError as error:
        display.line(f"not saved: {error}")
        return NOT_SAVED
    drawn = False
    with run.timings("plot"), non_fatal("plotting"):
        records = read_metrics(run.folder / METRICS, display.line)
        if ranks.is_first():
            loss_picture(records, score, saved_step, run.folder / "loss.png")
            drawn = load_picture(records, run.folder / LOAD_PICTURE)
    late = " before the signal" if request.signal else ""
    outcome = "stopped" if number else f"done{late}"
    took = format_seconds(monotonic() - run.start_time)
    display.line(f"\n{outcome} after {plural(step, 'step')}, {took}: validation loss {score.text}")
    if note := overfitting_note(run):
        display.line(note)
    folder = shlex.quote(str(run.folder))
    *lines, next_steps = report
    for line in lines:
        display.line(line)
    loads = f"   load of experts: {folder}/{LOAD_PICTURE}" if drawn else ""
    display.line(f"loss curve: {folder}/loss.png   samples: {folder}/samples.md{loads}")
    trust = run.task.loaded.architecture.trust_option
    resume = f"resume with: dunes {run.config.VERB} --out {folder} --resume{trust}"
    display.line(resume if number else next_steps)
    return (128 + number if number else 0) if saved else NOT_SAVED


def _close(run: Run, interrupted: bool, display: Display, board: TensorBoard) -> tuple[Score, int, list[str]]:
    """Validate and save the weights to keep; returns their score and step, and the lines of the task's report."""
    step, validated = run.trainer.number, run.final_seconds / run.closing_seconds
    with run.timings("final validation"), phase("final validation", end=validated):
        if run.best_weights:
            load_trainable_state(run.model, run.best_weights)
        known = run.best if interrupted or run.has_final_score else None
        score = known or run.task.score(1 if interrupted else run.final_tokens)
        saved_step = run.best_step if run.best_weights else step
    with run.timings("samples"), board.non_fatal("sampling"):
        if run.warm and not interrupted:
            board.sample(step, _sample(run, display, saved_step))
    run.elapsed = monotonic() - run.start_time
    with run.timings("saves"), shown_by(scale=lambda done: validated + (1 - validated) * done):
        return score, saved_step, run.task.close(run, score, interrupted)


def rising_loss_warning(run: Run) -> str:
    """A warning if the validation loss has been above its best for several validations; else ""."""
    if not run.best or not run.last or run.checks_since_best < PATIENCE:
        return ""
    if run.last.criterion < run.best.criterion * WORSE:
        return ""
    return (
        f"warning: validation loss is {run.last.criterion:.3f}{run.last.unit} and has been above its best "
        f"({run.best.criterion:.3f} after step {run.best_step}) for {run.checks_since_best} "
        "validations; the best weights are kept. If it jumped, lower the learning rate (now "
        f"{run.trainer.learning_rates()[0]:.2g}); if it rose slowly, train for fewer steps or on more data"
    )


def early_end(run: Run, loss: float) -> str:
    """The reason to end a time-limited run after a step with this training loss; "" if the run continues."""
    # If the learning rate makes validation loss rise, training loss rises, too, and the run continues.
    if run.config.steps or not run.best or not run.last or run.checks_since_best < PATIENCE:
        return ""
    rises = run.last.criterion > RISEN * run.best.criterion
    memorises = rises and loss < MEMORISED * run.last.loss
    if not memorises or run.trainer.number < LONG_AGO * run.best_step:
        return ""
    return (
        f"ending early, with {format_seconds(round(run.seconds_left))} left: validation loss was best after "
        f"{plural(run.best_step, 'step')} ({run.best.criterion:.3f}{run.best.unit}) and is "
        f"{run.last.criterion:.3f} now; more steps would memorise so small a text. --steps has no early end"
    )


def overfitting_note(run: Run) -> str:
    """A note on the saved weights if the validation loss has risen since its best; else ""."""
    if not run.best or not run.last or run.last.criterion < run.best.criterion * 1.005:
        return ""
    return (
        f"validation loss was best after {plural(run.best_step, 'step')} "
        f"({run.best.criterion:.3f}{run.best.unit}) and {run.last.criterion:.3f} at the end: the weights of step "
        f"{run.best_step} were saved; a lower learning rate, fewer steps or more data would help"
    )


def _write(folder: Path, step: int, snapshot: checkpoint.Snapshot) -> Path:
    with_metrics = ranks.is_first() and (folder / METRICS).exists()  # resuming needs them up to the state
    ranks.together(lambda: fsync_path(folder / METRICS) if with_metrics else None)
    return checkpoint.save_state(folder, step, snapshot)
