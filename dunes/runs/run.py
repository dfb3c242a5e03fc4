"""A run in progress: made from a plan, kept on disk, found again."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dunes import checkpoint, measure
from dunes.checkpoint.atomic import write_file
from dunes.models import FAMILIES
from dunes.models.start import initialise
from dunes.parts import Decoder
from dunes.runs.corpus import Tokens
from dunes.runs.evaluate import Score, evaluate, widths
from dunes.runs.memory import nats
from dunes.runs.plan import OVERRIDABLE, Plan, config_for
from dunes.runs.spent import Spent
from dunes.text import Tokenizer
from dunes.train import Record, Schedule, Trainer, muon

METRICS = "metrics.jsonl"
FALL = 0.5
WARMUP = 20


@dataclass
class Run:
    """What a run computes with, and what it remembers beside the trainer's own state.

    `began` is when it would have begun, by the clock, had it never been interrupted. `spent` is over all
    its processes, `data` what of it batches took up to the last step, and `warm` whether this process has
    taken a step.
    """

    folder: Path
    plan: Plan
    tokens: Tokens
    model: Decoder
    trainer: Trainer
    schedule: Schedule
    elapsed: float = 0.0
    began: float = 0.0
    second_a_token: float = 0.0
    best: Score | None = None
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    last: Score | None = None
    spent: Spent = field(default_factory=Spent)
    data: float = 0.0
    warm: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products are computed in."""
        return self.trainer.dtype

    def done(self, step: int) -> float:
        """The share of the run that is over."""
        return step / self.plan.steps if self.plan.steps else self.elapsed / self.plan.seconds

    def score(self, limit: int | None = None) -> Score:
        """The model's score on the held-out text, or on about `limit` tokens spread over it."""
        width = widths(self.tokens.tokenizer.pieces())
        return evaluate(self.model, self.tokens.valid, width, self.plan.context, self.dtype, limit)

    def scoring(self, limit: int) -> float:
        """Seconds that a score on so many tokens takes, by the last check."""
        return self.second_a_token * min(limit, len(self.tokens.valid))

    def check(self, limit: int) -> Score:
        """Score the model; the best weights so far are remembered."""
        start = perf_counter()
        self.last = score = self.score(limit)
        self.second_a_token = (perf_counter() - start) / score.tokens
        if self.best is None or score.bits_per_byte < self.best.bits_per_byte:
            self.best, self.best_step = score, self.trainer.number
            self.best_weights = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        return score


def prepare(plan: Plan, folder: Path, tokens: Tokens) -> Run:
    """A run at its first step, for a plan that leaves nothing open."""
    assert plan.dtype, "chosen before"
    assert plan.threads, "chosen before"
    torch.set_num_threads(plan.threads)
    device, dtype = measure.device(), getattr(torch, plan.dtype)
    config = config_for(plan, tokens.tokenizer.vocab)
    model = initialise(FAMILIES[plan.family].build(config), plan.seed).to(device)
    schedule = Schedule.steps(plan.steps, min(WARMUP, plan.steps // 5), FALL) if plan.steps else Schedule(WARMUP)
    trainer = Trainer(model, muon(model), nats, rate=schedule.rate, dtype=dtype, seed=plan.seed)
    return Run(folder, plan, tokens, model, trainer, schedule)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the run's lock, which a dead process lets go by itself. Raises ValueError if another has it."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "state" / "lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"{folder}: another process is training here; wait for it or choose another --out"
        ) from None


def begin(plan: Plan, folder: Path, tokenizer: Tokenizer) -> None:
    """Write down what the run is to do. The plan comes last: with it there is a run."""
    write_file(folder / "state" / "tokenizer.json", tokenizer.json().encode())
    write_file(folder / "state" / "plan.json", json.dumps(asdict(plan), indent=1).encode())


def begun(folder: Path) -> Plan | None:
    """The plan of the run in this folder, if there is a run."""
    path = folder / "state" / "plan.json"
    return Plan(**_tupled(json.loads(path.read_text()))) if path.is_file() else None


def _tupled(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def state_of(run: Run) -> dict[str, Any]:
    """All that a resumed run needs."""
    return {
        "plan": asdict(run.plan),
        "corpus": run.tokens.prints,
        "weights": run.model.state_dict(),
        "trainer": run.trainer.state_dict(),
        "records": [[r.begin, r.end] for r in run.schedule.records],
        "elapsed": run.elapsed,
        "spent": dict(run.spent.seconds),
        "best": [*asdict(run.best).values()] if run.best else None,
        "last": [*asdict(run.last).values()] if run.last else None,
        "best_step": run.best_step,
        "best_weights": run.best_weights,
    }


def resume(run: Run, told: Callable[[str], None], override: Collection[str] = (), strict: bool = False) -> None:
    """Go back to the newest whole state, if there is one.

    Raises ValueError, and changes nothing, if the plan or the corpus is not the one of the state, but
    for what is in `override`; and with `strict`, if the newest state is damaged.
    """

    def damaged(line: str) -> None:
        if strict:
            raise ValueError(line)
        told(line)

    if (folder := checkpoint.latest(run.folder, damaged)) is None:
        told("nothing was saved yet; beginning anew")
        cut(run.folder / METRICS, 0)
        return
    state = checkpoint.restore(folder)
    differences = run.plan.differences(Plan(**_tupled(state["plan"])))
    if others := [name for name, found in run.tokens.prints.items() if state["corpus"][name] != found]:
        differences["corpus"] = f"{' and '.join(others)} changed"
    if refused := [words for name, words in differences.items() if name not in override]:
        raise ValueError(
            f"{run.folder}: cannot go on: {'; '.join(refused)}; begin anew with another --out, or say --override "
            f"{' '.join(d for d in differences if d in OVERRIDABLE) or 'of what may change'}"
        )
    run.model.load_state_dict(state["weights"])
    run.trainer.load_state_dict(state["trainer"])
    if not {"steps", "minutes"} & differences.keys():  # else the rate goes up again, and falls towards the new end
        run.schedule.records[:] = [Record(*r) for r in state["records"]]
    run.elapsed, run.best_step, run.best_weights = state["elapsed"], state["best_step"], state["best_weights"]
    run.best, run.last = (Score(*state[k]) if state[k] else None for k in ("best", "last"))
    run.spent.seconds.update(state.get("spent", {}))
    run.data = run.spent.seconds["data"]
    cut(run.folder / METRICS, run.trainer.number)
    told(f"going on after step {run.trainer.number}")
    if differences:
        note(run.folder, {"step": run.trainer.number, "changed": differences})
        write_file(run.folder / "state" / "plan.json", json.dumps(asdict(run.plan), indent=1).encode())


def note(folder: Path, record: dict[str, Any]) -> None:
    """Append a line to the run's metrics."""
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(record) + "\n")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash cut short, and what follows, is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def cut(path: Path, step: int) -> None:
    """Keep the metrics up to this step: those after it will be made again."""
    kept = [r for r in records(path) if r["step"] <= step]
    write_file(path, "".join(json.dumps(r) + "\n" for r in kept).encode())
