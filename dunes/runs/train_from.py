"""Continuing the training of a model from its folder."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from dunes import checkpoint
from dunes.augment import Change
from dunes.checkpoint.loading import is_adapter
from dunes.parts import Decoder
from dunes.runs.autosize import CONTEXT, describe_machine, estimate_memory, with_machine
from dunes.runs.finetune_method import set_trainable
from dunes.runs.memory import Build, describe_memory
from dunes.runs.progress import Display
from dunes.runs.run import Run, append_metrics
from dunes.runs.train_config import TrainConfig

LR = 0.006
"""The default peak learning rate of matrices: a third of that from scratch (LOG.md, "Training on")."""
BASE_TOKENS = 16_384
"""Validation tokens that the model is scored on before the first step."""


def load_base(config: TrainConfig) -> checkpoint.LoadedModel:
    """The model of --from. Raises ValueError for an adapter, and for a folder that cannot be loaded."""
    if is_adapter(folder := checkpoint.locate_model(config.base).folder):
        raise ValueError(f"{folder}: an adapter, not a model; merge it first: dunes augment merge {folder} OUT")
    base = checkpoint.load_with_tokenizer(folder)
    if base.model.embed.place is not None and config.context_length > base.context_length:
        raise ValueError(
            f"--context-length is {config.context_length}; this model supports at most {base.context_length}"
        )
    return base


def choose_options(config: TrainConfig, base: checkpoint.LoadedModel) -> tuple[TrainConfig, list[str]]:
    """The config with every open option chosen, and a few lines about them; a complete one is not changed."""
    if config.dtype and config.threads and config.batch and config.context_length and config.lr:
        return config, []
    config, machine = with_machine(replace(config, lr=config.lr or LR), min(base.context_length, CONTEXT))
    return config, [describe_machine(machine), memory_advice(config, base)]


def memory_advice(config: TrainConfig, base: checkpoint.LoadedModel) -> str:
    """A sentence with the estimated memory of a run, and how to reduce it."""
    build: Build = partial(_trainable_outline, config, base)
    return f"{describe_memory(estimate_memory(config, build))}; reduce --batch or --context-length to need less"


def _trainable_outline(config: TrainConfig, base: checkpoint.LoadedModel) -> Decoder:
    model = base.architecture.build()
    select_trainable(model, config.trainable, base.architecture.changes)
    return model


def select_trainable(model: nn.Module, trainable: Sequence[str], changes: Sequence[Change]) -> None:
    """Train the parameters that match the globs; `new` is those of the last change, `all` is every one.

    Raises ValueError if nothing matches, or `new` is asked for and no change added parameters.
    """
    new = changes[-1].new if changes else ()
    if "new" in trainable and not new:
        raise ValueError("--trainable new: the model's last change added no parameters; use all, or names")
    expanded = {"new": new, "all": ("**",)}
    set_trainable(model, [glob for each in trainable or ("all",) for glob in expanded.get(each, (each,))])


def score_base(run: Run, display: Display) -> None:
    """Validate the model before its first step; if training makes it worse, these weights are saved."""
    score = run.check(BASE_TOKENS)
    append_metrics(run.folder, {"step": 0, "validation_loss": score.loss, "bits_per_byte": score.bits_per_byte})
    display.detail(
        f"validation loss before training: {score.loss:.4f} nats/token, {score.bits_per_byte:.3f} bits/byte"
    )
