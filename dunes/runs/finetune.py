"""Finetuning a base model on examples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dunes import checkpoint, measure
from dunes.augment import Change
from dunes.data import TokenIds
from dunes.data.examples import trained_spans
from dunes.evaluate.score import evaluation_tokens
from dunes.flags import option
from dunes.parts import Decoder
from dunes.progress import Display
from dunes.runs.config import RunOptions
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_data import FinetuneData, cast_frozen_weights, optimizer, prepare_model
from dunes.runs.finetune_method import METHODS, resolve_targets, unused_options
from dunes.runs.finetune_task import Baseline, FinetuneTask
from dunes.runs.loop import begin_run, execute_run
from dunes.runs.run import Run, build_schedule, run_lock
from dunes.runs.timings import Timings
from dunes.train import Trainer
from dunes.train.loss import next_token_loss
from dunes.units import plural

BASELINE = Path("state") / "baseline.json"


def finetune(config: FinetuneConfig, folder: Path, display: Display, *, examples: int = 0, **options: Any) -> int:
    """Finetune into the folder, or resume its run; `options` are fields of `RunOptions`.

    The first `examples` are printed, with trained tokens highlighted. Returns and raises as `train`.
    """
    run_options, timings = RunOptions(**options), Timings()
    if unused := unused_options(config, run_options.asked or ()):
        raise ValueError(f"--{option(unused[0])} has no effect with --method {config.method}; omit it")
    ready = begin_run(config, folder, display, run_options)
    if ready is None:
        return 0
    with display:
        with timings("reading data"):
            data = FinetuneData.read(ready, display)
        for example in data.train[:examples]:
            display.print_highlighted(f"--- {example.place}", trained_spans(example, data.tokenizer))
        with timings("preparing"):
            data, text = data.complete(display), forgetting_text(data, display)
        if run_options.dry_run:
            return 0
        with run_lock(folder):
            with timings("building the model"):
                run = prepare(data, text, folder, display)
            return execute_run(run, display, run_options, timings)


def prepare(data: FinetuneData, text: TokenIds | None, folder: Path, display: Display) -> Run:
    """A run at step 0; `text` has the token ids for measuring forgetting."""
    config = data.config
    assert config.dtype, "set by `complete`"
    dtype, model = getattr(torch, config.dtype), data.base.model.to(measure.device())
    stored = next(model.parameters()).dtype
    task = FinetuneTask(data, text, stored)
    before = _baseline(task, folder / BASELINE, display)
    changes, base = _apply_method(model, resolve_targets(config, data.base))
    task = replace(task, before=before, base=base, changes=changes)
    cast_frozen_weights(model, config)
    schedule = build_schedule(config)
    options: dict[str, Any] = {"lr_scale": schedule.lr_scale, "dtype": dtype, "seed": config.seed}
    options["accumulate"] = config.batch // config.micro_batch
    trainer = Trainer(model, optimizer(config, model), next_token_loss, **options)
    return Run(folder, config, task, trainer, schedule)


def _apply_method(model: Decoder, config: FinetuneConfig) -> tuple[list[Change], dict[str, Any]]:
    """Change the base model for training; returns the changes, and the base's `base_identity`."""
    if METHODS[config.method].adapter is None:
        return prepare_model(model, config), checkpoint.base_identity(model)
    base = checkpoint.base_identity(model)
    changes = prepare_model(model, config)
    if len(changes) > 1:  # the base was changed before the adapter was added
        base |= checkpoint.base_identity(model)
    return changes, base


def _baseline(task: FinetuneTask, path: Path, display: Display) -> Baseline:
    """The base model's scores and answers, measured, or read from the file of a resumed run."""
    dtype = getattr(torch, task.config.dtype or "float32")
    before = _read_baseline(path, display)
    if before is None:
        display.detail("evaluating the base model")
        before = task.measure_baseline(dtype)
    elif before.text != task.text:
        display.detail("the text to measure forgetting on changed: evaluating the base model again")
        before = replace(before, forgetting=task.score_forgetting(dtype, before.limits[1]), text=task.text)
    else:
        return before
    before.write(path)
    return before


def _read_baseline(path: Path, display: Display) -> Baseline | None:
    """The baseline in a file, or None if it is damaged or the run has no saved states."""
    if not (path.is_file() and any(path.parent.glob("step-*"))):
        return None
    try:
        return Baseline.read(path)
    except ValueError as error:
        display.line(f"warning: {error}")
        return None


def forgetting_text(data: FinetuneData, display: Display) -> TokenIds | None:
    """Token ids of text like the base model's training data; None, with a message, if there is no such text."""
    try:
        options = {"follow_links": data.config.follow_links} if data.config.forgetting_data else {}
        ids, files = evaluation_tokens(data.base, data.config.forgetting_data, **options)
    except (ValueError, OSError):
        if data.config.forgetting_data:
            raise
        remedy = "pass text like the base model's training data with --forgetting-data"
        display.line(f"forgetting is not measured: {remedy}")
        return None
    display.detail(f"forgetting is measured on {plural(files, 'file')} of the base model's own text")
    return ids
