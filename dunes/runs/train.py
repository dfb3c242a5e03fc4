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
from dunes.models.initialise import initialise
from dunes.parts import Decoder
from dunes.plural import plural
from dunes.runs.autosize import chosen, config_for, larger_than_asked, needs
from dunes.runs.config import RunOptions
from dunes.runs.corpus import Tokens, gather, tokenize
from dunes.runs.evaluate import Score, evaluate, widths
from dunes.runs.loop import Make, go
from dunes.runs.memory import nats
from dunes.runs.progress import Display
from dunes.runs.run import Run, facts, scheduled
from dunes.runs.timings import Timings
from dunes.runs.train_config import TrainConfig
from dunes.runs.write import sample_text
from dunes.text import Tokenizer
from dunes.train import Trainer, muon
from dunes.units import format_count


def train(plan: TrainConfig, folder: Path, show: Display, **options: Any) -> int:
    """Run the plan into the folder, or resume the run there; `options` are fields of `RunOptions`.

    Returns and raises what `loop.go` does.
    """
    going = RunOptions(**options)

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
        if words := larger_than_asked(plan):
            show.line(words)
        if going.dry_run:
            return None
        with spent("tokenizing"):
            tokens = tokenize(plan, corpus, folder / "state" if going.resume else None, show)
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
    trainer = Trainer(model, optimizer, nats, lr_scale=schedule.lr_scale, dtype=dtype, seed=plan.seed)
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
        return Windows(self.text.train, self.plan.context_length, self.plan.batch, self.plan.seed).batches(start)

    def score(self, model: Decoder, dtype: torch.dtype, limit: int | None = None) -> Score:
        return evaluate(
            model, self.text.valid, widths(self.tokenizer.token_bytes()), self.plan.context_length, dtype, limit
        )

    def sample(self, model: Decoder) -> str:
        return sample_text(model, self.tokenizer, self.plan.context_length, seed=self.plan.seed)

    def needs(self) -> str:
        return needs(self.plan)

    def opening(self, run: Run) -> str:
        assert self.plan.threads, "chosen before"
        ends = plural(self.plan.steps, "step") if self.plan.steps else plural(self.plan.minutes, "minute")
        return (
            f"{self.plan.family}, {format_count(tree.count(run.model))} parameters; "
            f"{format_count(len(self.text.train))} training tokens, vocabulary size {self.tokenizer.vocab}; "
            f"batch size {self.plan.batch}, context length {self.plan.context_length}; "
            f"{self.plan.dtype} on {run.trainer.device.type}, {plural(self.plan.threads, 'thread')}; for {ends}"
        )

    def close(self, run: Run, score: Score, hurried: bool) -> list[str]:
        checkpoint.save(
            run.model, run.folder, self.tokenizer, self.plan.context_length, facts(run, score, "trained")
        )
        folder = shlex.quote(str(run.folder))
        return [f"model {folder}", f"try: dunes generate {folder}   or: dunes complete {folder} FILE:LINE:COLUMN"]
