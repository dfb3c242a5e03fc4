"""Training from scratch: from a plan to a model folder, with what a person wants to see on the way."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from dunes import checkpoint, measure, tree
from dunes.data import Windows
from dunes.runs.corpus import Tokens, gather, tokenize
from dunes.runs.picture import loss_picture, smoothed
from dunes.runs.plan import Plan
from dunes.runs.progress import Display, duration, quantity
from dunes.runs.run import FALL, Run, alone, begin, begun, prepare, records, resume, save, settled
from dunes.runs.write import sample_text
from dunes.train import Clock, Diverged, Step

CHECK_TOKENS = 16_384
SAVE_SECONDS = 60.0
SAMPLES = (5, 50, 200, 500, 2_500, 8_500)


@dataclass
class Wish:
    """The signal that asked the run to stop; 0 while none did."""

    signal: int = 0


def train(plan: Plan, folder: Path, show: Display, again: bool = False) -> int:
    """Run the plan into the folder, or go on with the run there (`again`).

    Returns an exit status: 0, 128 + the signal that ended the run early, or 4 if training did not recover
    from numbers that are not finite. Raises ValueError, before anything is written, for what cannot be done.
    """
    start = monotonic()
    plan = settled(admitted(plan, folder, again))
    measure.keep_memory()
    corpus = gather(plan)
    show.line(corpus.report())
    with show:
        tokens = tokenize(plan, corpus, folder / "state" if again else None, show)
        return _run(plan, folder, tokens, show, again, start)


def _run(plan: Plan, folder: Path, tokens: Tokens, show: Display, again: bool, start: float) -> int:
    with alone(folder):
        run = prepare(plan, folder, tokens)
        if again:
            resume(run, show.line)
        else:
            begin(plan, folder, tokens.tokenizer)
        # Time spent on preparing counts: a person waits for that, too.
        run.elapsed += monotonic() - start
        show.line(_opening(run))
        try:
            with _signals() as wish:
                loop(run, wish, show)
        except Diverged as error:
            save(run)
            show.line(f"{error} (the state is in {folder}/state)")
            return 4
        _finish(run, wish, show)
    return 128 + wish.signal if wish.signal else 0


def admitted(plan: Plan, folder: Path, again: bool) -> Plan:
    """The plan to follow: this one in a new folder, the run's own when going on.

    Raises ValueError if there is a run and it is not to go on, if there is none, or if something
    was asked for that is not as in the run.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder; choose another --out")
    earlier = begun(folder)
    if earlier is None:
        if again:
            raise ValueError(f"{folder}: there is no run to go on with; leave out --resume to begin one")
        if not plan.sources:
            raise ValueError("no sources; name files or folders to learn from, or stdlib")
        return plan
    if not again:
        raise ValueError(f"{folder}: holds a run already; go on with --resume, or choose another --out")
    if differences := plan.differences(earlier, asked_only=True):
        raise ValueError(f"{folder}: the run cannot be changed: {differences}; begin anew with another --out")
    return earlier


@contextmanager
def _signals() -> Iterator[Wish]:
    """The first Ctrl-C or SIGTERM asks the run to stop at the next step; the second ends the process at once."""
    wish = Wish()

    def asked(number: int, frame: FrameType | None) -> None:
        if wish.signal:
            os._exit(128 + number)
        wish.signal = number

    before = {s: signal.signal(s, asked) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def loop(run: Run, wish: Wish, show: Display) -> None:
    """Step, and between steps measure, check, sample and save, until the schedule or the wish says stop.

    Raises Diverged if training does not recover.
    """
    windows = Windows(run.tokens.train, run.plan.context, run.plan.batch, run.plan.seed)
    clock = None if run.plan.steps else Clock(run.schedule, run.plan.minutes * 60, FALL)
    began, saved = monotonic() - run.elapsed, monotonic()
    told = _teller(run, show)
    over = run.schedule.over(run.trainer.number)
    steps = run.trainer.run(windows.batches(run.trainer.consumed)) if not over else iter(())
    for step in steps:
        run.elapsed = monotonic() - began
        if clock is not None:
            clock.tell(step.number, run.elapsed)
        over = run.schedule.over(step.number)
        checked = run.check(CHECK_TOKENS) if over or _check_due(step.number) else None
        _note(run.folder / "metrics.jsonl", step, checked.bits_per_byte if checked else None)
        if over or step.number in SAMPLES:
            _sample(run, show)
        told(step)
        if over or wish.signal:
            return
        if monotonic() - saved > SAVE_SECONDS:
            save(run)
            saved = monotonic()


def _check_due(step: int) -> bool:
    return step % 50 == 0 or step in (10, 25)


def _note(path: Path, step: Step, bits_per_byte: float | None) -> None:
    """Append one line to metrics.jsonl. The loss stands there twice: to read, and exactly."""
    record: dict[str, Any] = asdict(step)
    record = {"step": record.pop("number")} | record | {"exact": step.loss.hex()}
    if bits_per_byte is not None:
        record["bits_per_byte"] = bits_per_byte
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _teller(run: Run, show: Display) -> Callable[[Step], None]:
    """What the display is told after each step."""
    losses: list[float] = []

    def told(step: Step) -> None:
        if step.skipped:
            show.line(f"step {step.number}: loss {step.loss}, gradient norm {step.norm}; this step was skipped")
        else:
            losses[:] = [*losses[-100:], step.loss]
        left = run.elapsed * (1 / max(run.done(step.number), 1e-9) - 1)
        parts = [
            f"step {step.number}",
            f"loss {smoothed(losses)[-1]:.3f}" if losses else "",
            f"valid {run.last.bits_per_byte:.3f} bits/byte" if run.last else "",
            f"lr {run.trainer.base[0] * step.rate:.4f}",
            f"{quantity(step.count / step.seconds)} tok/s",
            f"{measure.peak_memory(run.trainer.device) / 1e9:.1f} GB",
            f"{duration(left)} left",
        ]
        show.state("  ".join(filter(None, parts)), run.done(step.number))

    return told


def _sample(run: Run, show: Display) -> None:
    """What the model writes by now, on the screen and into samples.md."""
    step = run.trainer.number
    text = sample_text(run.model, run.tokens.tokenizer, run.plan.context, seed=run.plan.seed)
    with (run.folder / "samples.md").open("a") as file:
        file.write(f"## After {step} steps\n\n```\n{text}\n```\n\n")
    show.line(f"\n--- after {step} steps, it writes ---\n{text}\n---")


def _opening(run: Run) -> str:
    ends = f"{run.plan.steps} steps" if run.plan.steps else f"{run.plan.minutes:g} minutes"
    tokens = len(run.tokens.train)
    return (
        f"{run.plan.family}, {quantity(tree.count(run.model))} parameters; {quantity(tokens)} tokens of "
        f"{run.tokens.tokenizer.vocab} kinds; {run.plan.batch} x {run.plan.context} a step; "
        f"{run.plan.dtype} on {run.trainer.device.type}, {run.plan.threads} threads; for {ends}"
    )


def _finish(run: Run, wish: Wish, show: Display) -> None:
    """Save the state and the best model, draw the picture, and say what there is and what to do next."""
    step = run.trainer.number
    save(run)
    if run.best_weights:
        run.model.load_state_dict(run.best_weights)
    score = run.score()
    facts = {
        "trained": {
            **asdict(run.plan),
            "steps": step,
            "best_step": run.best_step,
            "seconds": round(run.elapsed, 1),
        },
        "measured": {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
        },
    }
    checkpoint.save(run.model, run.folder, run.tokens.tokenizer, run.plan.context, facts)
    loss_picture(records(run.folder / "metrics.jsonl"), run.folder / "loss.png")
    show.line(
        f"\n{'stopped' if wish.signal else 'done'} after {step} steps, {duration(run.elapsed)}: on held-out text "
        f"{score.loss:.3f} nats a token, perplexity {score.perplexity:.1f}, {score.bits_per_byte:.3f} bits a byte"
    )
    if words := overfitting(run):
        show.line(words)
    folder = shlex.quote(str(run.folder))
    show.line(f"model {folder}   picture {folder}/loss.png   samples {folder}/samples.md")
    if wish.signal:
        show.line(f"go on with: dunes train --out {folder} --resume")
    else:
        show.line(f"try: dunes generate {folder}   or: dunes complete {folder} FILE:LINE:COLUMN")


def overfitting(run: Run) -> str:
    """In words, if the held-out loss has risen since its best; else empty."""
    if not run.best or not run.last or run.last.bits_per_byte < run.best.bits_per_byte * 1.005:
        return ""
    return (
        f"the model began to learn its text by heart: held-out text was best after {run.best_step} steps "
        f"({run.best.bits_per_byte:.3f} bits a byte) and is at {run.last.bits_per_byte:.3f} now. "
        "The best was kept; more text, a smaller model or fewer steps would help"
    )
