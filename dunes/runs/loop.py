"""A run from its plan to its end: steps, and between them checks, samples and saves; what a person sees of it."""

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from dunes import checkpoint, measure
from dunes.plural import plural
from dunes.runs.autosize import flops
from dunes.runs.config import RunOptions, T
from dunes.runs.evaluate import Score
from dunes.runs.json_lines import append_text
from dunes.runs.picture import loss_picture, smooth
from dunes.runs.progress import Display
from dunes.runs.run import (
    FALL,
    METRICS,
    FolderInUse,
    Run,
    alone,
    begin,
    begun,
    load_trainable_state,
    note,
    records,
    resolve_config,
    resume,
)
from dunes.runs.saver import Saver
from dunes.runs.tensorboard import TensorBoard
from dunes.runs.timings import Timings, lines
from dunes.train import Clock, Diverged, Step
from dunes.units import format_count, format_seconds

CHECK_TOKENS = 16_384
FINAL_TOKENS = 262_144
SAVE_SECONDS = 60.0
SAMPLES = (5, 50, 200, 500, 2_500, 8_500)
CLOSING = 3.0
"""Seconds that the end of a run takes beside the last score: the model, the picture."""

PATIENCE, WORSE = 3, 1.01
"""There is a warning when so many checks brought no better validation loss and it is that many times the best."""

NOT_SAVED = 3
DIVERGED = 4

Make = Callable[[], Run]


def go(
    config: T, folder: Path, show: Display, how: RunOptions, prepare: Callable[[T, Timings], Make | None]
) -> int:
    """Run the plan into the folder, or go on with the run there.

    `prepare` reads what is to be learned, says what it finds and gives back what makes the run, or None if that
    is all. Returns an exit status: 0, 128 + the signal that ended the run early, 3 if the last state could not
    be saved, or 4 if training did not recover from numbers that are not finite. Raises ValueError, before
    anything is written, for what cannot be done.
    """
    start = monotonic()
    board = TensorBoard(folder if how.tensorboard else None, NonFatal(show))
    config = config.with_absolute_paths()
    with _occupied(show, how.dry_run):
        config = resolve_config(config, folder, how.resume, how.asked, how.override)
    if (folder / "state" / "lock").exists():
        with _occupied(show, how.dry_run), alone(folder):  # refused now, not after the text was read
            pass
    if how.dry_run and (earlier := begun(folder, type(config))) is not None:
        state = checkpoint.latest_state(folder, show.line)
        newest = f"last saved state: step {int(state.name[5:])}" if state else "nothing saved yet"
        goes_on = f"; --resume continues from there up to {config.length}" if how.resume else ""
        show.line(f"the run in {folder}: {earlier.about}; {newest}{goes_on}")
        if config.missing:
            return 0
    measure.set_device(config.device)
    measure.keep_freed_memory()
    measure.flush_denormals()
    timings = Timings()
    with show:
        make = prepare(config, timings)
        if make is None:
            return 0
        with alone(folder), Saver(show.line, how.strict) as saver:
            with timings("building the model"):
                run = make()
                if how.resume:
                    resume(run, show.line, how.override, how.strict)
                else:
                    begin(run.config, folder, run.task.tokenizer)
            run.timings.seconds.update(timings.seconds)
            # Time spent on preparing counts: a person waits for that, too.
            run.elapsed += monotonic() - start
            show.detail(run.task.opening(run))
            with board:
                status = _run(run, saver, show, board)
            for line in ("wall-clock time:", *lines(run.timings.seconds)) if how.profile else ():
                show.line(line)
            return status


@contextmanager
def _occupied(show: Display, dry: bool) -> Iterator[None]:
    """A dry run only says that there is a run already."""
    try:
        yield
    except FolderInUse as error:
        if not dry:
            raise
        show.line(f"warning: {error}")


@dataclass
class StopRequest:
    """The signal that asked the run to stop, 0 while none did; and whether one asked for a save."""

    signal: int = 0
    save: bool = False


def _run(run: Run, saver: Saver, show: Display, board: TensorBoard) -> int:
    with _signals() as request:
        try:
            loop(run, request, saver, show, board)
        except Diverged as error:
            saver.last(run)
            show.line(f"{error} (the last state is in {run.folder}/state)")
            return DIVERGED
        except OSError as error:
            show.line(f"stopped: {error}; the last good state is in {run.folder}/state")
            return NOT_SAVED
        except ValueError:  # the data went wrong, the weights did not
            saver.last(run)
            raise
        except (RuntimeError, MemoryError) as error:
            if not measure.out_of_memory(error):
                raise
            raise ValueError(f"out of memory in step {run.trainer.number + 1}; {run.task.needs()}") from None
        return _finish(run, request, saver, show, board)


@contextmanager
def _signals() -> Iterator[StopRequest]:
    """The first Ctrl-C or SIGTERM asks the run to stop at the next step; the second ends the process at once.

    SIGUSR1 asks for a save.
    """
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if request.signal:
            os._exit(128 + number)
        request.signal = number

    def save(number: int, frame: FrameType | None) -> None:
        request.save = True

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGUSR1: save}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def loop(run: Run, request: StopRequest, saver: Saver, show: Display, board: TensorBoard) -> None:
    """Step, and between steps measure, check, sample and save, until the schedule or the wish says stop.

    Raises Diverged if training does not recover, ValueError if the tokens were changed meanwhile, and
    OSError if a strict saver cannot save.
    """
    config = run.config
    clock = None if config.steps else Clock(run.schedule, config.seconds, FALL)
    run.start_time, saved, warned = monotonic() - run.elapsed, monotonic(), 0
    told, non_fatal = _teller(run, show), board.non_fatal
    over = run.schedule.is_over(run.trainer.number)
    batches = run.timings.each("data", run.task.batches(run.trainer.consumed))
    steps = run.trainer.run(batches) if not over else iter(())
    for step in steps:
        run.elapsed = monotonic() - run.start_time
        _split(run, step)
        if clock is not None:
            # What the end takes is known better after each check, and never more than a tenth.
            clock.seconds = config.seconds - min(config.seconds / 10, CLOSING + run.scoring(FINAL_TOKENS))
            clock.update(step.number, run.elapsed)
        over, checked = run.schedule.is_over(step.number), None
        with run.timings("checks"), non_fatal("validation"):
            checked = run.check(CHECK_TOKENS) if over or _check_due(step.number) else None
        if checked and warned != run.best_step and (words := rising_loss_warning(run)):
            warned = run.best_step
            show.line(words)
        with non_fatal("writing metrics.jsonl"):
            _note(run.folder, step, checked)
        board.step(step, checked.bits_per_byte if checked else None)
        with run.timings("samples"), non_fatal("sampling"):
            if step.number in SAMPLES and not over:
                board.sample(step.number, _sample(run, show, step.number))
        told(step)
        if over:
            return
        if request.signal:
            show.line("stopping after this step and saving; interrupt again to exit at once")
            return
        with run.timings("saves"):
            saver.look()
            if (request.save or monotonic() - saved > SAVE_SECONDS) and saver.start(run):
                saved, request.save = monotonic(), False


def _split(run: Run, step: Step) -> None:
    """Count the step's time: the first one of a process also loads kernels, or compiles."""
    data, run.data = run.timings.seconds["data"] - run.data, run.timings.seconds["data"]
    run.timings.add("steps" if run.warm else "first step", step.seconds - data)
    run.warm = True


@dataclass
class NonFatal:
    """`with non_fatal("sampling"):` what is done beside training and must not end it.

    A full disk or too little memory is told once for each kind of work.
    """

    show: Display
    failed: set[str] = field(default_factory=set)

    @contextmanager
    def __call__(self, work: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OSError) and not measure.out_of_memory(error):
                raise
            if work not in self.failed:
                self.show.line(f"warning: {work} failed: {' '.join(str(error).split())[:200]}; training continues")
            self.failed.add(work)


def _check_due(step: int) -> bool:
    return step % 50 == 0 or step in (10, 25)


def _note(folder: Path, step: Step, checked: Score | None) -> None:
    """Note a step. The loss stands there twice: to read, and exactly."""
    record: dict[str, Any] = asdict(step)
    record = {"step": record.pop("number")} | record | {"loss_hex": step.loss.hex()}
    if checked:
        record |= {"validation_loss": checked.loss, "bits_per_byte": checked.bits_per_byte}
    note(folder, record)


def _teller(run: Run, show: Display) -> Callable[[Step], None]:
    """What the display is told after each step."""
    losses: list[float] = []
    work = flops(run.model, run.config.context_length)

    def told(step: Step) -> None:
        if step.skipped:
            show.line(
                f"step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}; this step was skipped"
            )
        else:
            losses[:] = [*losses[-100:], step.loss]
        left = run.elapsed * (1 / max(run.done(step.number), 1e-9) - 1)
        parts = [
            f"step {step.number}",
            f"loss {smooth(losses)[-1]:.3f}" if losses else "",
            f"val {run.last.bits_per_byte:.3f} bits/byte" if run.last else "",
            f"lr {run.trainer.base_lrs[0] * step.lr_scale:.2g}",
            f"{format_count(step.count / step.seconds)} tok/s",
            f"{work * step.count / step.seconds / run.config.matmul:.0%} MFU" if run.config.matmul else "",
            f"{measure.peak_memory(run.trainer.device) / 1e9:.1f} GB",
            f"{format_seconds(round(left))} left",
        ]
        show.state("  ".join(filter(None, parts)), run.done(step.number))

    return told


def _sample(run: Run, show: Display, weights_step: int) -> str:
    """What the model writes with its weights, those of `weights_step`, on the screen and into samples.md."""
    steps = plural(run.trainer.number, "step")
    if weights_step != run.trainer.number:
        steps += f", with the best weights (step {weights_step})"
    text = run.task.sample(run.model)
    show.detail(f"\n--- sample after {steps} ---\n{text}\n---")
    append_text(run.folder / "samples.md", f"## After {steps}\n\n```\n{text}\n```\n\n")
    return text


def _finish(run: Run, request: StopRequest, saver: Saver, show: Display, board: TensorBoard) -> int:
    """Save the state and what was learned, draw the picture, and say what there is and what to do next."""
    step, non_fatal = run.trainer.number, board.non_fatal
    status = 128 + request.signal if request.signal else 0
    try:
        with run.timings("saves"):
            saved = saver.last(run)
        if not saved:
            status = NOT_SAVED
        with run.timings("last score"):
            score = _last_score(run, interrupted=bool(request.signal))
            kept_step = run.best_step if run.best_weights else step
        with run.timings("samples"), non_fatal("sampling"):
            if run.warm and not request.signal:
                board.sample(step, _sample(run, show, kept_step))
        run.elapsed = monotonic() - run.start_time
        with run.timings("saves"):
            there = run.task.close(run, score, bool(request.signal))
    except OSError as error:
        show.line(f"not saved: {error}")
        return NOT_SAVED
    with run.timings("picture"), non_fatal("plotting"):
        loss_picture(records(run.folder / METRICS, show.line), score, kept_step, run.folder / "loss.png")
    over = "stopped" if request.signal else "done"
    show.line(
        f"\n{over} after {plural(step, 'step')}, {format_seconds(run.elapsed)}: validation loss "
        f"{score.loss:.3f} nats/token, perplexity {score.perplexity:.1f}, {score.bits_per_byte:.3f} bits/byte"
    )
    if words := overfitting_note(run):
        show.line(words)
    folder = shlex.quote(str(run.folder))
    *lines, following = there
    for line in lines:
        show.line(line)
    show.line(f"loss curve: {folder}/loss.png   samples: {folder}/samples.md")
    going_on = f"resume with: dunes {run.config.VERB} --out {folder} --resume"
    show.line(going_on if request.signal else following)
    return status


def _last_score(run: Run, interrupted: bool) -> Score:
    """The score of the best weights, which the model has from here on; somebody who stops a run waits less."""
    if run.best_weights:
        load_trainable_state(run.model, run.best_weights)
    if interrupted and run.best:
        return run.best
    return run.score(FINAL_TOKENS)


def rising_loss_warning(run: Run) -> str:
    """The warning that validation loss has been above its best for several checks; else empty."""
    if not run.best or not run.last or run.checks_since_best < PATIENCE:
        return ""
    if run.last.bits_per_byte < run.best.bits_per_byte * WORSE:
        return ""
    return (
        f"warning: validation loss is {run.last.bits_per_byte:.3f} bits/byte and has been above its best "
        f"({run.best.bits_per_byte:.3f} after step {run.best_step}) for {run.checks_since_best} checks; the best "
        f"weights are kept. If it jumped, lower the learning rate (now {run.trainer.base_lrs[0]:.2g}); if it rose "
        "slowly, train for fewer steps or on more data"
    )


def overfitting_note(run: Run) -> str:
    """Which weights were saved, if validation loss has risen since they were the best; else empty."""
    if not run.best or not run.last or run.last.bits_per_byte < run.best.bits_per_byte * 1.005:
        return ""
    return (
        f"validation loss was best after {plural(run.best_step, 'step')} ({run.best.bits_per_byte:.3f} bits/byte) "
        f"and {run.last.bits_per_byte:.3f} at the end: the weights of step {run.best_step} were saved; a lower "
        "learning rate, fewer steps or more data would help"
    )
