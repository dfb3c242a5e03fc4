"""Execute a run: resolve the config, build the run, restore its state, train, and save the results."""

import os
import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch.optim import Optimizer

from dunes import __version__, checkpoint, measure
from dunes.data.hub_tables import pin
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import Score
from dunes.files.json_file import append_text
from dunes.measure import ranks
from dunes.progress import Display, Interrupted, Line, interruptible, phase, shown_by
from dunes.runs import saving
from dunes.runs.autosize import autocast_dtype
from dunes.runs.compiled_loss import compile_loss
from dunes.runs.config import RunConfig, RunOptions, T
from dunes.runs.picture import load_picture, loss_picture, with_violation
from dunes.runs.report import PATIENCE, PaceCheck, overfitting_notes, rising_loss_warning, step_reporter
from dunes.runs.task import Run, Task, Timings, load_trainable_state
from dunes.runs.trackers import Trackers, find_trackers
from dunes.train import Clock, Diverged, Record, Schedule, Step, Trainer
from dunes.train.loss import Loss, next_token_loss
from dunes.units import format_seconds, plural

WARMUP = 20
"""Steps of warmup."""
FALL = 0.5
"""Fraction of the run, at its end, over which the learning rate decays."""
LOAD_PICTURE = "expert_load.png"
SAMPLES = (5, 50, 200, 500, 2_500, 8_500)
# A time-limited run ends early if it memorises a small text (docs/log/training.md, "A small text is learned by
# heart"): if its steps are LONG_AGO times those of its best weights, the validation loss is above RISEN times the
# best loss, and the training loss is below MEMORISED times the validation loss.
LONG_AGO, RISEN, MEMORISED = 3, 1.03, 0.6
NOT_SAVED = 3
DIVERGED = 4


@dataclass(frozen=True)
class Start:
    """The start of a run: its folder, display and options, and the seconds of each phase of its preparation."""

    folder: Path
    display: Display
    options: RunOptions
    timings: Timings = field(default_factory=Timings)


Plan = Callable[[T, Start], Callable[[], Run] | None]
"""Reads the data and resolves the config; returns a function that builds the run at step 0, or None."""


def execute_run(config: T, start: Start, plan: Plan[T]) -> int:
    """Train a model and save it in the folder, or resume the run in the folder.

    Returns an exit status: 0, 128 + the number of the signal that ended the run, 3 if the last state could not be
    saved, or 4 if training did not recover from NaN or infinity. Raises ValueError, before writing, for invalid
    options or data.
    """
    resolved = begin_run(config, start)
    if resolved is None:
        return 0
    with start.display:
        build = plan(resolved, start)
        if build is None:
            return 0
        with saving.run_lock(start.folder):
            return _execute(build(), start)


def begin_run(config: T, start: Start) -> T | None:
    """The config of a new run, or of the run to resume in the folder; no files are written.

    Returns None if a dry run only reports on the existing run. Raises ValueError for invalid options, and for a
    folder that cannot be used. Also sets the device.
    """
    folder, display, options = start.folder, start.display, start.options
    find_trackers(options.track, folder)  # raises if one is unknown or missing
    ranks.agree({"--out": str(folder.absolute()), "a run in it": (folder / "state" / "plan.json").exists()})
    config = config.normalized(options.asked)
    if options.resume:  # the run's data sets have commits instead of branches
        config = config.mapped(config.DATA, lambda source: pin(source) if "@" in source else source)
    try:
        config = stored_config(config, folder, options)
        if ranks.is_first() and (folder / "state" / "lock").exists():
            with saving.run_lock(folder):  # so that a locked folder raises before the data is read
                pass
    except saving.FolderInUse as error:
        if not options.dry_run:
            raise
        display.line(f"warning: {error}")
    if options.dry_run and (earlier := saving.read_config(folder, type(config))) is not None:
        state = checkpoint.latest_state(folder, display.line)
        progress = f"last saved state: step {int(state.name[5:])}" if state else "no training state"
        continuation = f"; --resume continues from there up to {config.length}" if options.resume and state else ""
        display.line(f"the run in {folder}: {earlier.about}; {progress}{continuation}")
        if config.missing:
            return None
    if config.batch:
        ranks.rows(config.batch)
    ranks.agree({"dunes": __version__, "torch": torch.__version__, **asdict(config)})
    config = ranks.broadcast(config.mapped(config.DATA, pin))
    measure.set_device(config.device)
    measure.keep_freed_memory()
    measure.flush_denormals()
    return config


def stored_config(config: T, folder: Path, options: RunOptions) -> T:
    """The config of a new run (`config` itself), or of a resumed run (the stored config with the user's changes).

    Raises FolderInUse if the folder contains a run that is not resumed. Raises ValueError if there is no run to
    resume, or if the user changed a field that must stay the same.
    """
    asked = options.asked
    if asked and {"steps", "minutes"} <= {*asked}:
        raise ValueError("--steps and --minutes exclude each other; set one of them")
    earlier = saving.read_config(folder, type(config))
    if earlier is None:
        if config.missing and not options.resume:
            raise ValueError(config.missing)
        _check_new_folder(folder)
        if options.resume:
            raise ValueError(f"{folder}: there is no run to resume; start one without --resume")
        return config
    if not options.resume:
        raise saving.FolderInUse(f"{folder}: {saving.ANOTHER_RUN}")
    differences = config.differences(earlier, config.changed() if asked is None else asked)
    if earlier.steps and "minutes" in differences and not (asked and "steps" in asked):
        ends = plural(earlier.steps, "step")
        raise ValueError(f"{folder}: the run stops after {ends}, not after a time; use --steps N")
    _refuse(differences, config, folder, options.override)
    return replace(earlier, **{name: getattr(config, name) for name in differences})


def _refuse(differences: Mapping[str, str], config: RunConfig, folder: Path, override: Collection[str]) -> None:
    """Raise ValueError if a field in `differences` is neither in FREE nor in both OVERRIDABLE and `override`."""
    refused = {name: text for name, text in differences.items() if name not in config.FREE}
    if fixed := refused.keys() - ({*override} & {*config.OVERRIDABLE}):
        override = f", or pass --override {' '.join(refused)}"
        remedy = "; --steps may change" if fixed - {*config.OVERRIDABLE} else override
        texts = "; ".join(text for name, text in refused.items() if name in fixed)
        raise ValueError(f"{folder}: cannot resume: {texts}; choose another --out{remedy}")


def _check_new_folder(folder: Path) -> None:
    """Raise ValueError if the folder is not writable, or contains a model that would be overwritten."""
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).exists():
            model = f"a model that was not made by a run ({name})"
            raise ValueError(f"{folder}: contains {model}; choose another --out")
    parent = next(p for p in (folder / "state", folder, *folder.absolute().parents) if os.path.lexists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{parent}: is not a writable folder; choose another --out")


def build_schedule(config: RunConfig) -> Schedule:
    """The learning-rate schedule over `config.steps`. In a time-limited run, a `Clock` later sets the schedule's
    end."""
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
    ranks.agree(task.facts.fingerprints)
    schedule = build_schedule(config)
    options: dict[str, Any] = {"lr_scale": schedule.lr_scale, "dtype": autocast_dtype(config), "seed": config.seed}
    trainer = Trainer(task.loaded.model, optimizer, loss or next_token_loss, accumulate=accumulate, **options)
    return Run(folder, config, task, trainer, schedule)


@dataclass
class Session:
    """A process that executes a run.

    `saved` is the run's `elapsed` at the last save. `warned` is the run's `best_step` at the last warning of a
    rising loss. `durations` are the seconds of recent steps.
    """

    run: Run
    display: Display
    saver: saving.Saver
    trackers: Trackers
    non_fatal: "NonFatal"
    request: saving.StopRequest = field(default_factory=saving.StopRequest)
    saved: float = 0.0
    warned: int = 0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=100))


def _execute(run: Run, start: Start) -> int:
    """Restore a resumed run, train its model and finish; returns the exit status.

    The elapsed time includes the preparation.
    """
    display, options, timings = start.display, start.options, start.timings
    if ranks.count() > 1:
        saving.check_shared(run.folder)
    with ThreadPoolExecutor(1, "saver") as pool:
        saver = saving.Saver(pool, display.line, options.strict)
        with timings("building the model"):
            if options.resume:
                restore_run(run, display.line, options.override, options.strict)
            elif ranks.is_first():
                saving.start_run(run.config, run.folder, run.task.loaded.require_tokenizer())
        run.timings.seconds.update(timings.seconds)
        track = options.track if ranks.is_first() else ()
        place = lambda: f"out of memory after step {run.trainer.number}; {run.task.facts.memory_advice()}"
        with out_of_memory(run.folder, place), closing(Trackers(run, track, display.line)) as trackers:
            with shown_by(display.state):
                for line in run.task.begin(run):
                    display.detail(line)
            measure.return_freed_memory()
            run.elapsed += timings.elapsed
            status = _train(Session(run, display, saver, trackers, NonFatal(display)))
        if options.profile:
            display.line("\n".join(["wall-clock time:", *run.timings.lines()]))
        return status


def restore_run(run: Run, line: Line, override: Collection[str] = (), strict: bool = False) -> None:
    """Restore the newest undamaged state of the run; without a saved state, start from step 0.

    Raises ValueError, before any change, if the saved config, data or model differs in a field that is neither in
    FREE nor in `override`. With `strict`, raises ValueError if the newest state is damaged.
    """

    def damaged(text: str) -> None:
        if strict:
            raise ValueError(text)
        line(text)

    folder = checkpoint.latest_state(run.folder, damaged)
    ranks.agree({"the newest state": folder and folder.name})
    if folder is None:
        line("nothing saved yet; starting from step 0")
        saving.truncate_metrics(run.folder / saving.METRICS, 0)
        return
    state = saving.read_state(folder, type(run.config))
    differences = run.config.differences(state["config"])
    stored = state["fingerprints"]
    if changed := [name for name, value in run.task.facts.fingerprints.items() if stored.get(name) != value]:
        differences["model" if "the model" in changed else "corpus"] = f"{' and '.join(changed)} changed"
    if state["model"] != run.task.loaded.architecture.record():
        differences["model"] = "the model's config or changes differ"
    _refuse(differences, run.config, run.folder, override)
    saving.load_run_state(run, state, folder)
    if not {"steps", "minutes"} & differences.keys():  # a run whose length was changed has a new schedule
        run.schedule.records[:], run.schedule.warmup = state["schedule"], state["warmup"]
    saving.truncate_metrics(run.folder / saving.METRICS, run.trainer.number)
    line(f"resuming after step {run.trainer.number}")
    if differences:
        saving.append_metrics(run.folder, {"step": run.trainer.number, "changed": differences})
        if ranks.is_first():
            saving.write_config(run.config, run.folder)


@contextmanager
def out_of_memory(folder: Path, describe: Callable[[], str]) -> Iterator[None]:
    """Inside the `with` block, turn an out-of-memory error into a ValueError that says how much memory the run
    needs."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not measure.out_of_memory(error):
            raise
        raise ValueError(f"{describe()}; {folder} has the files written so far") from None


@dataclass
class NonFatal:
    """Lets training continue if the block `with non_fatal("sampling"):` fails.

    An OSError or lack of memory is reported, once for each kind of work. Other errors are raised.
    """

    display: Display
    failed: set[str] = field(default_factory=set)

    @contextmanager
    def __call__(self, work: str) -> Iterator[None]:
        try:
            yield
        except Interrupted:  # `train_loop` handles the signal after this step
            return
        except (OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OSError) and not measure.out_of_memory(error):
                raise
            if ranks.count() > 1 and work in ("validation", "sampling"):  # the other ranks wait for this rank
                raise
            if work not in self.failed:
                reason = " ".join(str(error).split())[:200]
                self.display.line(f"warning: {work} failed: {reason}; training continues")
            self.failed.add(work)


def _train(session: Session) -> int:
    """Train and finish; returns the exit status. Saves the last state if training diverges or the data is
    invalid."""
    run, saver, display = session.run, session.saver, session.display
    compile_loss(run, display.line)
    with saving.stop_signals() as session.request:
        try:
            with interruptible(session.request.asked):
                train_loop(session)
        except Diverged as error:
            saver.last(run)
            display.line(f"{error} (the last state is in {run.folder}/state)")
            return DIVERGED
        except OSError as error:
            if not ranks.is_shared(error):
                raise
            display.line(f"stopped: {error}; the last good state is in {run.folder}/state")
            return NOT_SAVED
        except ValueError:  # the data is invalid, but the weights are worth saving
            if ranks.count() == 1:  # other ranks would not know of the error, so they could not save
                saver.last(run)
            raise
        return _finish(session)


def train_loop(session: Session) -> None:
    """Train, with validation, samples and saves between steps, until the schedule ends or a stop is requested.

    Raises Diverged if training does not recover from NaN or infinity, ValueError if the tokens changed on disk,
    and OSError if a strict save fails.
    """
    run, display = session.run, session.display
    (run.elapsed,) = ranks.all_reduce_max(run.elapsed)
    run.start_time, session.saved = monotonic() - run.elapsed, run.elapsed
    run.begin, run.waited = run.begin or run.elapsed, run.timings.seconds["data"]
    clock = None if run.config.steps else Clock(run.schedule, run.config.seconds, FALL, run.begin)
    report, pace, over = step_reporter(run, display), PaceCheck(run), run.schedule.is_over(run.trainer.number)
    batches = run.timings.each("data", run.task.batches(run.trainer.consumed))
    if run.trainer.number and ranks.count() == 1 and (over or _check_due(run.trainer.number)):
        with run.timings("validation"), session.non_fatal("validation"):
            _complete_validation(run)
    for step in map(with_violation, iter(()) if over else run.trainer.run(batches)):
        ranks.expect(0)
        _measure_time(session, step, clock)
        over = run.schedule.is_over(step.number)
        score = _record(session, step, over)
        report(step)
        if warning := pace.warning(step):
            display.line(warning)
        if over:
            return
        if score and (reason := early_end(run, step.loss)):
            display.line(reason)
            run.schedule.records.append(Record(step.number, step.number))  # so that a resumed run ends here too
            return
        if _stops_or_saves(session):
            return
        ranks.expect(max(session.durations, default=0))


def _measure_time(session: Session, step: Step, clock: Clock | None) -> None:
    """Add a step's duration to the run's elapsed time, and update the clock, which decides when the run ends."""
    run, before = session.run, session.run.elapsed
    # All ranks use the same time: with different times, ranks would wait for each other in different places.
    run.elapsed, closing = ranks.all_reduce_max(monotonic() - run.start_time, run.closing_seconds)
    if run.warm:
        run.pace.append(run.elapsed - before)
        session.durations.append(step.seconds)
    data = run.timings.seconds["data"]
    # The first step of a process loads kernels or compiles, so it is timed as a separate phase.
    run.timings.add("steps" if run.warm else "first step", step.seconds - (data - run.waited))
    run.warm, run.waited = True, data
    if clock is not None:
        seconds = run.config.seconds
        clock.seconds = seconds - min(closing, (seconds - run.begin) / 2)
        clock.update(step.number, run.elapsed)


def _record(session: Session, step: Step, over: bool) -> Score | None:
    """Write the metrics of a step; at certain steps, also validate and sample. Returns the score, if any."""
    run, score = session.run, None
    with run.timings("validation"), session.non_fatal("validation"):
        score = run.validate() if over or _check_due(step.number) else None
    if score and session.warned != run.best_step and (warning := rising_loss_warning(run)):
        session.warned = run.best_step
        session.display.line(warning)
    with session.non_fatal("writing metrics.jsonl"):
        _log_step(run.folder, step, score)
    session.trackers.update()
    with run.timings("samples"), session.non_fatal("sampling"):
        if step.number in SAMPLES and not over:
            _sample(session, step.number)
    return score


def _stops_or_saves(session: Session) -> bool:
    """Save if a save is due or requested; returns True if a stop is requested."""
    run, saver, request = session.run, session.saver, session.request
    run.save_seconds = saver.seconds
    stop, save, busy, interval = ranks.all_reduce_max(request.signal, request.save, saver.busy, saver.interval)
    if stop:
        session.display.line(f"stopping after step {run.trainer.number} and saving")
        return True
    with run.timings("saves"):
        if saver.ready() and not busy and (save or run.elapsed - session.saved > interval):
            session.saved, request.save = run.elapsed, False
            saver.start(run)
    return False


def _check_due(step: int) -> bool:
    return step % 50 == 0 or step in (10, 25)


def _complete_validation(run: Run) -> None:
    """Repeat the validation after the last step of a resumed run, if a signal interrupted it."""
    number = run.trainer.number
    losses = [
        r["validation_loss"]
        for r in saving.read_metrics(run.folder / saving.METRICS, lambda line: None)
        if r["step"] == number and "validation_loss" in r
    ]
    if run.last is None or run.last.loss not in losses:
        score = run.validate()
        if not losses:
            saving.append_metrics(run.folder, {"step": number} | score.record)


def _log_step(folder: Path, step: Step, score: Score | None) -> None:
    """Append the record of a step to metrics.jsonl; `loss_hex` is its exact loss as a hexadecimal float.

    `memory` is the peak memory of this process so far, in bytes.
    """
    record: dict[str, Any] = asdict(step) | {"memory": measure.peak_memory(measure.device())}
    metrics = {"metrics": values} if (values := record.pop("metrics")) else {}
    record = {"step": record.pop("number")} | record | metrics | {"loss_hex": step.loss.hex()}
    saving.append_metrics(folder, record | (score.record if score else {}))


def _sample(session: Session, weights_step: int) -> None:
    """Generate a sample with the model, which has the weights of step `weights_step`; show the sample, and append
    it to samples.md."""
    run, steps = session.run, plural(session.run.trainer.number, "step")
    if weights_step != run.trainer.number:
        steps += f", with the best weights (step {weights_step})"
    start = perf_counter()
    text = run.task.sample()
    run.sample_seconds = perf_counter() - start
    session.display.detail(f"\n--- sample after {steps} ---\n{text}\n---")
    if ranks.is_first():
        append_text(run.folder / "samples.md", f"## After {steps}\n\n```\n{text}\n```\n\n")
    session.trackers.sample(run.trainer.number, text)


def early_end(run: Run, loss: float) -> str:
    """The reason to end a time-limited run after a step with this training loss; "" if the run continues."""
    # If validation loss rises because of the learning rate, training loss also rises, and the run continues.
    if run.config.steps or not run.best or not run.last or run.checks_since_best < PATIENCE:
        return ""
    rises = run.last.criterion > RISEN * run.best.criterion
    memorises = rises and loss < MEMORISED * run.last.loss
    if not memorises or run.trainer.number < LONG_AGO * run.best_step:
        return ""
    return (
        f"ending early, with {format_seconds(round(run.seconds_left))} left: validation loss was best after "
        f"{plural(run.best_step, 'step')} ({run.best.criterion:.3f}{run.best.unit}) and is "
        f"{run.last.criterion:.3f} now; more steps would memorise the text. A run with --steps does not end early"
    )


def _finish(session: Session) -> int:
    """Save the state and the results, plot the loss, and print the final report; returns the exit status."""
    run, request, display = session.run, session.request, session.display
    number, request.closing = int(ranks.all_reduce_max(request.signal)[0]), True
    try:
        with run.timings("saves"):
            saved = session.saver.last(run)
        with display.own_bar("closing"):
            try:
                with interruptible(lambda: not number and request.asked()):
                    score, saved_step, report = _close(session, bool(number))
            except Interrupted:
                number = request.signal
                score, saved_step, report = _close(session, True)
    except OSError as error:
        display.line(f"not saved: {error}")
        return NOT_SAVED
    pictures = _plot(session, score, saved_step)
    outcome = "stopped" if number else "done before the signal" if request.signal else "done"
    steps, took = plural(run.trainer.number, "step"), format_seconds(monotonic() - run.start_time)
    *lines, next_steps = report
    if number:
        resume = f"resume with: dunes {run.config.VERB} --out {shlex.quote(str(run.folder))} --resume"
        next_steps = resume + run.task.loaded.architecture.trust_option
    lines = [*overfitting_notes(run), *lines, pictures, next_steps]
    for line in (f"\n{outcome} after {steps}, {took}: validation loss {score.text}", *lines):
        display.line(line)
    return (128 + number if number else 0) if saved else NOT_SAVED


def _close(session: Session, interrupted: bool) -> tuple[Score, int, list[str]]:
    """Validate and save the best weights; returns their score and step, and the lines of the task's report."""
    run, validated = session.run, session.run.final_seconds / session.run.closing_seconds
    with run.timings("final validation"), phase("final validation", end=validated):
        if run.best_weights:
            load_trainable_state(run.model, run.best_weights)
        known = run.best if interrupted or run.has_final_score else None
        score = known or run.task.score(1 if interrupted else run.final_tokens)
        saved_step = run.best_step if run.best_weights else run.trainer.number
    with run.timings("samples"), session.non_fatal("sampling"):
        if run.warm and not interrupted:
            _sample(session, saved_step)
    run.elapsed = monotonic() - run.start_time
    with run.timings("saves"), shown_by(scale=lambda done: validated + (1 - validated) * done):
        return score, saved_step, run.task.close(run, score, interrupted)


def _plot(session: Session, score: Score, saved_step: int) -> str:
    """Plot the losses, and the loads of experts if there are any; returns a line with the paths."""
    run, loads, folder = session.run, "", shlex.quote(str(session.run.folder))
    with run.timings("plot"), session.non_fatal("plotting"):
        records = saving.read_metrics(run.folder / saving.METRICS, session.display.line)
        if ranks.is_first():
            loss_picture(records, score, saved_step, run.folder / "loss.png")
            if load_picture(records, run.folder / LOAD_PICTURE):
                loads = f"   load of experts: {folder}/{LOAD_PICTURE}"
    return f"loss curve: {folder}/loss.png   samples: {folder}/samples.md{loads}"


def card_facts(run: Run, score: Score, verb: str) -> dict[str, Any]:
    """Entries for the card: the run's config and progress (under the key `verb`), the measured scores, and the
    timings."""
    progress = {"steps": run.trainer.number, "best_step": run.best_step, "seconds": round(run.elapsed, 1)}
    measured = {**score.facts, "peak_bytes": measure.peak_memory(run.trainer.device)}
    timings = {phase: round(seconds, 3) for phase, seconds in run.timings.seconds.items()}
    return {
        verb: {**asdict(run.config), "split_version": SPLIT_VERSION, **progress},
        "measured": measured,
        "timings": timings,
    }
