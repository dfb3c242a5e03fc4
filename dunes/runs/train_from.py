"""Continuing the training of a model from its folder."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from dunes import checkpoint
from dunes.checkpoint.loading import is_adapter
from dunes.parts import Decoder
from dunes.progress import Display
from dunes.runs.augment import resolve_new
from dunes.runs.autosize import (
    CONTEXT,
    describe_machine,
    estimate_memory,
    seconds_per_token,
    with_hardware,
    with_machine,
)
from dunes.runs.finetune_method import selects, set_trainable
from dunes.runs.memory import Build, describe_memory
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


def choose_options(
    config: TrainConfig, base: checkpoint.LoadedModel, resumed: bool = False
) -> tuple[TrainConfig, list[str]]:
    """The config with every open option chosen, and a few lines about them; that of a resumed run is complete."""
    if config.dtype and config.threads and config.batch and config.context_length and config.lr:
        return config if resumed else with_hardware(config), []
    config, machine = with_machine(replace(config, lr=config.lr or LR), min(base.context_length, CONTEXT))
    config = replace(config, rate=1 / seconds_per_token(base.model, config, machine))
    return config, [describe_machine(machine), memory_advice(config, base)]


def memory_advice(config: TrainConfig, base: checkpoint.LoadedModel) -> str:
    """A sentence with the estimated memory of a run, and how to reduce it."""
    build: Build = partial(_trainable_outline, config, base)
    return f"{describe_memory(estimate_memory(config, build))}; reduce --batch or --context-length to need less"


def _trainable_outline(config: TrainConfig, base: checkpoint.LoadedModel) -> Decoder:
    model = base.architecture.build()
    select_trainable(model, config.trainable, base)
    return model


def select_trainable(model: nn.Module, trainable: Sequence[str], base: checkpoint.LoadedModel) -> None:
    """Train the parameters that match the globs; `new` is those of the base's last change, `all` is every one.

    Raises ValueError if nothing matches, or `new` is asked for and the last change added no parameters.
    """
    set_trainable(model, _resolve_globs(trainable or ("all",), base))


def rate_factors(
    model: nn.Module, factors: Sequence[str], base: checkpoint.LoadedModel | None
) -> dict[Tensor, float]:
    """The factor of each trainable parameter in the last GLOB=FACTOR that matches it.

    Raises ValueError for a glob that matches none, and for `new` as `select_trainable` does.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen: dict[Tensor, float] = {}
    for each in factors:
        glob, _, factor = each.rpartition("=")
        globs = _resolve_globs([glob], base)
        matched: dict[Tensor, float] = {p: float(factor) for name, p in trained.items() if selects(globs, name)}
        if not matched:
            raise ValueError(f"--lr-factors {each}: matches no trainable parameter of {', '.join(trained)[:300]}")
        chosen |= matched
    return chosen


def _resolve_globs(globs: Sequence[str], base: checkpoint.LoadedModel | None) -> Sequence[str]:
    plain = ["**" if each == "all" else each for each in globs]
    return plain if base is None else resolve_new(plain, base)


def score_base(run: Run, display: Display) -> None:
    """Validate the model before its first step; if training makes it worse, these weights are saved."""
    score = run.check(BASE_TOKENS)
    append_metrics(run.folder, {"step": 0, "validation_loss": score.loss, "bits_per_byte": score.bits_per_byte})
    display.detail(
        f"validation loss before training: {score.loss:.4f} nats/token, {score.bits_per_byte:.3f} bits/byte"
    )
