"""Finetuning: from a base model and examples to a model that does what they show, and what that changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint, measure
from dunes.augment import base_model
from dunes.checkpoint.adapter import architecture, joined_factors
from dunes.data import TokenIds
from dunes.data.examples import trained_spans
from dunes.parts import Decoder
from dunes.plural import plural
from dunes.runs.config import RunOptions
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_data import FinetuneData, altered, answered, kept, optimizer
from dunes.runs.finetune_method import METHODS, idle_options
from dunes.runs.finetune_task import Baseline, FinetuneTask
from dunes.runs.loop import Make, go
from dunes.runs.progress import Display
from dunes.runs.run import Run, scheduled
from dunes.runs.score import held_out
from dunes.runs.timings import Timings
from dunes.train import Trainer

BEFORE = Path("state") / "before.json"


def finetune(plan: FinetuneConfig, folder: Path, show: Display, *, examples: int = 0, **options: Any) -> int:
    """Finetune into the folder, or go on with the run there; `options` are fields of `RunOptions`.

    So many `examples` are shown first, in colours that tell what is trained on. Returns and raises what
    `loop.go` does.
    """
    going = RunOptions(**options)
    if idle := idle_options(plan, going.asked or ()):
        raise ValueError(f"--{idle[0]} is of adapters, and --method {plan.method} has none; leave it out")

    def prepared(plan: FinetuneConfig, spent: Timings) -> Make | None:
        with spent("reading the examples"):
            lesson = FinetuneData.read(plan, show)
        for example in lesson.train[:examples]:
            show.coloured(f"--- {example.place}", trained_spans(example, lesson.tokenizer))
        with spent("choosing"):
            ready, known = lesson.chosen(show), domain(lesson, show)
        return None if going.dry_run else lambda: prepare(ready, known, folder, show)

    return go(plan, folder, show, going, prepared)


def prepare(lesson: FinetuneData, known: TokenIds | None, folder: Path, show: Display) -> Run:
    """A run at its first step; `known` is text of the base's own domain."""
    plan, device = lesson.plan, measure.device()
    assert plan.dtype, "chosen before"
    dtype = getattr(torch, plan.dtype)
    model = lesson.base.model.to(device)
    stored = next(model.parameters()).dtype
    task = FinetuneTask(lesson, known, stored)
    before = _asked(task, model, folder / BEFORE, show)
    model, notes, base = _changed(model, plan)
    task = replace(task, before=before, notes=notes, base=base, settings=architecture(base_model(model)))
    kept(model, plan)
    schedule = scheduled(plan)
    how: dict[str, Any] = {"lr_scale": schedule.lr_scale, "dtype": dtype, "seed": plan.seed}
    trainer = Trainer(model, optimizer(plan, model), answered, accumulate=plan.batch // plan.micro_batch, **how)
    return Run(folder, plan, task, model, trainer, schedule)


def _changed(model: Decoder, plan: FinetuneConfig) -> tuple[Decoder, list[dict[str, Any]], dict[str, Any]]:
    """The model as it trains, the notes of what was changed, and the identity of its base."""
    if METHODS[plan.method].adapter is None:
        model, notes = altered(model, plan)
        return model, notes, checkpoint.identity(model)
    base = checkpoint.identity(model)
    model, notes = altered(model, plan)
    joined_factors(model)
    if any(note["name"] == "quantize" for note in notes):
        base |= checkpoint.identity(model)
    return model, notes, base


def _asked(task: FinetuneTask, model: Decoder, path: Path, show: Display) -> Baseline:
    """What the base can do, or what it could when the states beside this file were saved."""
    dtype = getattr(torch, task.plan.dtype or "float32")
    before = _earlier(path, show)
    if before is None:
        show.detail("asking the base first")
        before = task.able(model, dtype)
    elif before.text != task.text:
        show.detail("the text of the base's own domain is another one now: asking the base again")
        before = replace(before, domain=task.known(model, dtype), text=task.text)
    else:
        return before
    before.write(path)
    return before


def _earlier(path: Path, show: Display) -> Baseline | None:
    """What the file says, if there are states beside it and it is whole."""
    if not (path.is_file() and any(path.parent.glob("step-*"))):
        return None
    try:
        return Baseline.read(path)
    except ValueError as error:
        show.line(f"warning: {error}")
        return None


def domain(lesson: FinetuneData, show: Display) -> TokenIds | None:
    """Text of the kind that the base learned; None, which is told, if nobody knows where that is."""
    tokenizer = lesson.base.tokenizer
    assert tokenizer is not None, "it was loaded with one"
    try:
        how = {"follow_links": lesson.plan.follow_links} if lesson.plan.forgetting_data else {}
        ids, files = held_out(tokenizer, lesson.base.card, lesson.plan.forgetting_data, **how)
    except (ValueError, OSError):
        if lesson.plan.forgetting_data:
            raise
        show.line("what is forgotten is not measured: name text of the base's own domain with --forgetting-data")
        return None
    show.detail(f"what is forgotten is measured on {plural(files, 'file')} of the base's own domain")
    return ids
