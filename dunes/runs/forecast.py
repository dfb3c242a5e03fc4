"""What a run will reach, for a dry run and --plan: measured speed, and estimated validation loss of the text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dunes import measure
from dunes.completion.fit import BYTE_SECONDS, FitSize
from dunes.data import Corpus
from dunes.measure import ranks
from dunes.models.initialise import initialise
from dunes.parts import Decoder
from dunes.progress import Display, print_table
from dunes.runs import autosize
from dunes.runs.autosize import Estimate, Machine, choose_size
from dunes.runs.memory import measure_step
from dunes.runs.picture import plan_picture
from dunes.runs.text_entropy import SPREAD, text_factor
from dunes.runs.train_config import TrainConfig
from dunes.train import Trainer
from dunes.train.loss import next_token_loss
from dunes.units import format_count, plural

MINUTES = (1, 3, 5, 15, 30, 60, 120, 240, 480)
"""Lengths of the runs that --plan estimates, in addition to --minutes."""

PATIENCE = 10.0
"""Maximum estimated seconds for measuring a step; a dry run of a larger model states the estimated speed."""


def dry_trainer(config: TrainConfig, model: Decoder) -> Trainer:
    """A trainer of a model, to measure its steps."""
    optimizer, dtype = autosize.build_optimizer(model, config), autosize.autocast_dtype(config)
    return Trainer(model, optimizer, next_token_loss, dtype=dtype)


def dry_batch(config: TrainConfig, vocab: int) -> tuple[Tensor, Tensor]:
    """Random ids and targets (B, T) of one rank."""
    rows = config.batch // ranks.count(), config.context_length + 1
    ids = torch.randint(vocab, rows, generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def measured_machine(config: TrainConfig, machine: Machine) -> Machine:
    """The machine with its rates scaled so that a step of the config's new model takes as long as measured.

    Returns `machine` itself under torchrun, and if measuring would take over PATIENCE seconds or too much memory.
    """
    pace = autosize.seconds_per_token(autosize.meta_model(config), config, machine)
    if ranks.count() > 1 or 6 * config.context_length * pace > PATIENCE:  # six rows, or a few more short ones
        return machine
    vocab = autosize.vocabulary(config)
    model = initialise(autosize.architecture_for(config, vocab).build()).to(measure.device())
    if (cost := measure_step(dry_trainer(config, model), dry_batch(config, vocab))) is None:
        return machine
    pace *= cost.tokens / cost.seconds
    return replace(machine, matmul=pace * machine.matmul, read=pace * machine.read)


def forecast(config: TrainConfig, size: int, machine: Machine, factor: float) -> Estimate:
    """The estimate for a sized config, `size` bytes of text and their factor; without the time to index the text
    and to fit the gate, if the run completes lines."""
    closing = 0.0
    if config.complete and not config.steps:
        per_token = autosize.seconds_per_token(autosize.meta_model(config), config, machine) / 3
        closing = sum(FitSize.of(config.seconds, per_token * machine.threads).seconds) + 2 * BYTE_SECONDS * size
    left = replace(config, minutes=max(0.1 * config.minutes, config.minutes - closing / 60))
    expected = autosize.estimate(left, size, machine)
    return replace(expected, bits=min(8.0, factor * expected.bits))  # 8: random bytes


def describe_forecast(config: TrainConfig, corpus: Corpus) -> str:
    """A line with the measured speed and the estimated loss of a complete config; takes some seconds."""
    config, machine = autosize.with_machine(config)
    size, measured = sum(d.size for d in corpus.train), measured_machine(config, machine)
    expected = forecast(config, size, measured, text_factor(corpus, config))
    low, high = ((1 + side * SPREAD) * expected.bits for side in (-1, 1))
    steps = plural(round(expected.tokens / (config.batch * config.context_length)), "step")
    return (
        f"{'estimated' if measured is machine else 'measured'}: {format_count(expected.rate)} tokens/s, {steps}; "
        f"estimated: {expected.bits:.2f} bits/byte ({low:.2f} to {high:.2f})"
    )


def report_plan(config: TrainConfig, corpus: Corpus, display: Display, picture: Path) -> None:
    """Print and draw estimates for runs of MINUTES and of the config's minutes, each with its best model size."""
    config, machine = autosize.with_machine(config)
    display.line(autosize.describe_machine(machine))
    size, plan = sum(d.size for d in corpus.train), machine.plan
    sized = {m: choose_size(replace(config, minutes=m), size, plan)[0] for m in {*MINUTES, config.minutes}}
    measured, factor = measured_machine(sized[config.minutes], plan), text_factor(corpus, config)
    expected = {minutes: forecast(sized[minutes], size, measured, factor) for minutes in sorted(sized)}
    bounds = {m: ((1 - SPREAD) * e.bits, e.bits, (1 + SPREAD) * e.bits) for m, e in expected.items()}
    if ranks.is_first():
        columns = ["minutes", "parameters", "tokens", "epochs", "bits/byte", "95 % of texts"]
        print_table("", columns, [_row(m, e, bounds[m], config.minutes) for m, e in expected.items()])
        plan_picture(bounds, config.minutes, picture)


def _row(minutes: float, expected: Estimate, bounds: Sequence[float], chosen: float) -> list[str]:
    label = f"{minutes:g}" + " (--minutes)" * (minutes == chosen)
    counts = format_count(expected.parameters), format_count(expected.tokens), f"{expected.epochs:.1f}"
    return [label, *counts, f"{expected.bits:.2f}", "{0:.2f} to {2:.2f}".format(*bounds)]
