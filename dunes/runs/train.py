"""Training from scratch: from a plan to a model folder, with what a person wants to see on the way."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dunes import checkpoint, measure, tree
from dunes.data import Windows
from dunes.models import FAMILIES
from dunes.models.start import initialise
from dunes.parts import Decoder
from dunes.plural import plural
from dunes.runs.autosize import chosen, needs
from dunes.runs.corpus import Tokens, gather, tokenize
from dunes.runs.evaluate import Score, evaluate, widths
from dunes.runs.loop import Make, RunOptions, go
from dunes.runs.memory import nats
from dunes.runs.progress import Display
from dunes.runs.run import Run, facts, scheduled
from dunes.runs.timings import Timings
from dunes.runs.train_config import TrainConfig, config_for
from dunes.runs.write import sample_text
from dunes.text import Tokenizer
from dunes.train import Trainer, muon
from dunes.units import format_count


def train(plan: TrainConfig, folder: Path, show: Display, again: bool = False, **how: Any) -> int:
    """Run the plan into the folder, or go on with the run there (`again`); `how` are fields of `loop.How`.

    Returns and raises what `loop.go` does.
    """
    going = RunOptions(again=again, **how)

    def prepared(plan: TrainConfig, spent: Timings) -> Make | None:
        with spent("reading the text"):
            corpus = gather(plan)
        for line in (corpus.report(), *corpus.notes):
            show.detail(line)
        plan = replace(plan, split=corpus.split)
        with spent("choosing"):
            plan, reasons = chosen(plan, sum(d.size for d in corpus.train))
        for line in reasons:
            show.detail(line)
        if going.dry:
            return None
        with spent("tokenizing"):
            tokens = tokenize(plan, corpus, folder / "state" if again else None, show)
        return lambda: prepare(plan, folder, tokens)

    return go(plan, folder, show, going, prepared)


def prepare(plan: TrainConfig, folder: Path, tokens: Tokens) -> Run:
    """A run at its first step, for a plan that leaves nothing open."""
    assert plan.dtype, "chosen before"
    assert plan.threads, "chosen before"
    torch.set_num_threads(plan.threads)
    device, dtype = measure.device(), getattr(torch, plan.dtype)
    config = config_for(plan, tokens.tokenizer.vocab)
    model = initialise(FAMILIES[plan.family].build(config), plan.seed).to(device)
    schedule = scheduled(plan)
    optimizer = muon(model) if plan.lr is None else muon(model, plan.lr, plan.lr / 2)
    trainer = Trainer(model, optimizer, nats, rate=schedule.rate, dtype=dtype, seed=plan.seed)
    return Run(folder, plan, TrainTask(plan, tokens), model, trainer, schedule)


@dataclass(frozen=True)
class TrainTask:
    """To learn to go on with a text."""

    plan: TrainConfig
    text: Tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def subject(self) -> str:
        return "text"

    @property
    def prints(self) -> Mapping[str, str]:
        return self.text.prints

    @property
    def tokens(self) -> int:
        return len(self.text.valid)

    def batches(self, start: int) -> Iterator[Tensor]:
        return Windows(self.text.train, self.plan.context, self.plan.batch, self.plan.seed).batches(start)

    def score(self, model: Decoder, dtype: torch.dtype, limit: int | None = None) -> Score:
        return evaluate(
            model, self.text.valid, widths(self.tokenizer.token_bytes()), self.plan.context, dtype, limit
        )

    def sample(self, model: Decoder) -> str:
        return sample_text(model, self.tokenizer, self.plan.context, seed=self.plan.seed)

    def needs(self) -> str:
        return needs(self.plan)

    def opening(self, run: Run) -> str:
        assert self.plan.threads, "chosen before"
        ends = plural(self.plan.steps, "step") if self.plan.steps else plural(self.plan.minutes, "minute")
        return (
            f"{self.plan.family}, {format_count(tree.count(run.model))} parameters; "
            f"{format_count(len(self.text.train))} tokens of {self.tokenizer.vocab} kinds; "
            f"{self.plan.batch} x {self.plan.context} a step; "
            f"{self.plan.dtype} on {run.trainer.device.type}, {plural(self.plan.threads, 'thread')}; for {ends}"
        )

    def close(self, run: Run, score: Score, hurried: bool) -> list[str]:
        checkpoint.save(run.model, run.folder, self.tokenizer, self.plan.context, facts(run, score, "trained"))
        folder = shlex.quote(str(run.folder))
        return [f"model {folder}", f"try: dunes generate {folder}   or: dunes complete {folder} FILE:LINE:COLUMN"]
