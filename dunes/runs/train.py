"""Train a model on text, from scratch or from an existing model."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dunes import checkpoint, measure, tree
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.base_digests import base_identity, weights_digest
from dunes.checkpoint.card import read_card
from dunes.checkpoint.formats.adapter import adapter_base_of, is_reference
from dunes.checkpoint.open import base_folder, is_adapter, round_for_speed
from dunes.checkpoint.trained_text import trained_packages, trained_text
from dunes.completion.copy_gate import read_gate
from dunes.completion.fit import (
    ALONE,
    BYTE_SECONDS,
    CompletionFiles,
    FitSize,
    begin_completion,
    closing_seconds,
    finish_completion,
    prepare_completion,
)
from dunes.completion.text import FileTokenizer
from dunes.data import Corpus, FillInMiddle, Windows
from dunes.data.sources import SPLIT_VERSION
from dunes.evaluate.text_loss import Score, evaluate
from dunes.files.model_file import cards_trusted
from dunes.inference.text_generator import sample_text
from dunes.measure import ranks
from dunes.models.initialise import initialise
from dunes.ops.float32_products import repeat_choice
from dunes.parts import Block, Decoder
from dunes.progress import Display, phase, shown_by
from dunes.runs import autosize
from dunes.runs.augment import described_family, records, resolve_new, save_changed, size_of
from dunes.runs.config import RunOptions
from dunes.runs.corpus import NO_LINES, Tokens, choose_completion, gather, tokenize, with_test_files
from dunes.runs.forecast import describe_forecast, dry_batch, dry_trainer, report_plan
from dunes.runs.memory import PROCESS, describe_memory
from dunes.runs.report import report_step
from dunes.runs.run import Start, card_facts, execute_run, new_run, out_of_memory
from dunes.runs.saving import append_metrics, read_config, run_lock, start_run, write_config
from dunes.runs.task import SAMPLE_SHARE, Run, TaskFacts, selects, set_trainable, trainable_state
from dunes.runs.train_config import MIXTURES, NONE, TrainConfig
from dunes.text import Tokenizer
from dunes.text.chat_template import template_from_files
from dunes.train import Trainer, scale_rates
from dunes.train.optim import named_optimizer
from dunes.tree.summary import module_rows
from dunes.units import format_count, format_seconds

TYPICAL_RATE = 10_000
"""Assumed tokens/s of a run with fixed steps, so that its estimated duration does not depend on the machine."""

SCORED = 4_000
"""Number of characters on which a base is scored before a run."""
SCORED_BLOCKS = 64
"""Maximum number of blocks of text from which the SCORED characters are taken."""
CHANCE = 8.5
"""If a base that dunes trained has at least this loss (bits/byte) on the text, a new model is trained instead.
Random bytes have 8 bits/byte, and a random model has a little more (docs/log/completion.md)."""
ADAMW_FROM = 30_000_000
"""With --from, AdamW is the default optimizer if at least this many parameters are trained. AdamW is better for a
published model with 135M parameters, but worse for our own with 3M (docs/log/real-models.md, "Training on from
published weights")."""


def train(config: TrainConfig, folder: Path, display: Display, **options: Any) -> int:
    """Train a model and save it in the folder, or resume the run in the folder.

    `options` are fields of `RunOptions`. Returns the exit status of `execute_run`. Raises ValueError, before
    writing, for invalid options or data.
    """
    start = Start(folder, display, RunOptions(**options))
    named_optimizer(config.optimizer)  # raises if the name is unknown
    if start.options.plan:
        _check_plan(config, start.options.resume, start.options.plan)
    return execute_run(config, start, partial(plan_training, parts=config.parts))


def plan_training(config: TrainConfig, start: Start, parts: Sequence[str]) -> Callable[[], Run] | None:
    """Read the text, choose all unset options, and return a function that builds the run.

    `parts` is --parts as given on this command line; the config may be that of a resumed run. In a dry run,
    returns None. In a run that trains nothing, fits the completion gate of the base and returns None.
    """
    folder, display, resumed, timings = start.folder, start.display, start.options.resume, start.timings
    if resumed and isinstance(config.chosen_parts, str) and not (config.parts == parts or cards_trusted()):
        raise ValueError(f"{folder}: built by {config.chosen_parts}; if you trust it, pass --trust-code")
    with timings("reading data"):
        text = _read_text(config, start)
    if text is None:
        return None
    config, corpus, reasons, base, place = text
    for line in (corpus.report(), *corpus.notes, *reasons):
        display.detail(line)
    if start.options.plan:
        report_plan(config, corpus, display, start.options.plan)
        return None
    if base and not config.trains:
        Reference(config, start, base, place, corpus.packages).run(corpus)
        return None
    with timings("choosing the size"):
        config = ranks.broadcast(_choose_options(config, corpus, base, start))
    if start.options.dry_run:
        if base is not None:
            model = base.model.float().to(measure.device())
            select_trainable(model, config.trainable, base)
            _report(config, dry_trainer(config, model), base, display)
        else:
            display.detail(describe_forecast(config, corpus))
        return None
    with timings("tokenizing"):
        earlier = Tokenizer.load(folder / "state") if resumed and base is None else None
        known = base.tokenizer if base else earlier
        tokens = ranks.in_turn(partial(tokenize, config, corpus, known, display))

    def build() -> Run:
        with timings("indexing the text"):
            indexes = config.complete and ranks.is_first()
            completion = _index(config, corpus, tokens.tokenizer, display) if indexes else None
        with timings("building the model"):
            run = prepare(config, folder, tokens, base, completion)
        if base and not resumed:
            _report(config, run.trainer, base, display)
            score = run.validate()  # so that the base's weights are kept unless training improves them
            append_metrics(folder, {"step": 0} | score.record)
            values = f"{score.loss:.4f} nats/token, {score.bits_per_byte:.3f} bits/byte"
            display.detail(f"validation loss before training: {values}")
        return run

    return build


def _read_text(
    config: TrainConfig, start: Start
) -> tuple[TrainConfig, Corpus, list[str], LoadedModel | None, Path] | None:
    """Read the text, and choose `complete` and `trainable`; returns (config, text, reasons, base, the base's
    path).

    Returns None if nothing is trained and the base's gate is already fitted.
    """
    (base, place), reasons = find_base(config, start), list[str]()
    if base and not config.trains:
        packages = trained_packages(read_card(start.folder))
        if Reference(config, start, base, place, packages).is_finished():
            return None
    corpus = gather(config)
    if not start.options.resume:  # a resumed run has already chosen them
        config, reasons, base = _choose_base(config, corpus, base, start.display)
    corpus = with_test_files(config, corpus)
    config = autosize.with_vocabulary(config, sum(d.size for d in corpus.train))
    return replace(config, split=corpus.split), corpus, reasons, base, place


def _index(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer, display: Display) -> CompletionFiles:
    files = FileTokenizer(tokenizer, config.with_headers)
    with shown_by(display.state), phase("indexing the text"):
        return prepare_completion(corpus, files, display, config.sources, config.follow_links)


def _report(config: TrainConfig, trainer: Trainer, base: LoadedModel, display: Display) -> None:
    fit = lambda per_token: sum(fit_size(config, per_token).seconds) if config.complete else 0.0
    report_step(config, trainer, dry_batch(config, base.require_tokenizer().vocab), display, fit)


def _check_plan(config: TrainConfig, resume: bool, picture: Path) -> None:
    """Raise ValueError if the estimates of --plan do not apply to the run, or no picture can have this path."""
    if picture.suffix != ".png" or not picture.parent.is_dir() or picture.is_dir():
        raise ValueError(f"--plan {picture}: expected a name like plan.png, in an existing folder")
    if config.base or config.steps or resume or not config.sources:
        raise ValueError("--plan estimates new models: it expects SOURCE, and no --from, --steps or --resume")


def _choose_options(config: TrainConfig, corpus: Corpus, base: LoadedModel | None, start: Start) -> TrainConfig:
    """The config with all unset options chosen, unless the run is resumed; also displays the reasons."""
    if start.options.resume:
        return config
    display, size = start.display, sum(d.size for d in corpus.train)
    if base is not None:
        chosen, reasons = _choose_with_base(config, base, size)
    else:
        chosen, reasons = autosize.autosize_run(config, size)
    for line in reasons:
        display.detail(line)
    if base is None and config.size and (warning := autosize.size_warning(chosen)):
        display.line(warning)
    described = chosen.parts and checkpoint.hf_config_of(autosize.meta_model(chosen), chosen.context_length)
    if chosen.has_own_form and not isinstance(described, checkpoint.Architecture):
        unnamed = "parts" if chosen.parts else "shared experts or a selection bias"
        display.line(
            f"note: no Hugging Face config describes {unnamed}; dunes will be able to read the "
            "model's folder, but transformers will not"
        )
    if chosen.family in MIXTURES and chosen.top_k == 1 < chosen.expert_count:
        display.line(
            "note: the weight of a token's only expert is always 1, so the router learns nothing from the text; "
            "use --experts-per-token 2"
        )
    return chosen


def find_base(config: TrainConfig, start: Start) -> tuple[LoadedModel | None, Path]:
    """The model of --from, if any, and its path. If a resumed run only refers to its base, the base's path is read
    from the run's folder, since both may have been moved.

    Raises ValueError for an adapter, and for a folder that cannot be loaded.
    """
    if not config.base:
        return None, start.folder
    refers = start.options.resume and not config.trains and "base" not in start.options.override
    place = base_folder(start.folder) if refers and is_reference(read_card(start.folder)) else None
    place = place or checkpoint.locate_model(config.base).folder
    if is_adapter(place):
        raise ValueError(f"{place}: an adapter, not a model; merge it first: dunes augment merge {place} OUT")
    return checkpoint.load_with_tokenizer(place), place


def _choose_with_base(config: TrainConfig, base: LoadedModel, size: int) -> tuple[TrainConfig, list[str]]:
    """The config for --from with all unset options chosen, and lines with the reasons.

    Raises ValueError if the context is longer than the model's learned positions allow.
    """
    if base.model.embed.place is not None and config.context_length > base.context_length:
        length = config.context_length
        raise ValueError(f"--context-length is {length}; this model supports at most {base.context_length}")
    with torch.device("meta"):
        model = outline_with_base(config, base)
    large = tree.count(model, trainable=True) >= ADAMW_FROM
    config = replace(config, optimizer=config.optimizer or ("adamw" if large else "muon"))
    lr = autosize.learning_rate(config, model)
    if config.dtype and config.threads and config.batch and config.context_length and config.lr:
        config, reasons = autosize.with_hardware(config), []
    else:
        context_length = min(base.context_length, autosize.CONTEXT)
        config, machine = autosize.with_machine(replace(config, lr=lr), context_length)
        config = replace(config, rate=1 / autosize.seconds_per_token(model, config, machine))
        reasons = [autosize.describe_machine(machine)]
    return config, [*reasons, memory_sentence(config, base, size)]


def outline_with_base(config: TrainConfig, base: LoadedModel) -> Decoder:
    """The model of --from without its weights; the parameters selected by --trainable are trainable."""
    model = base.architecture.build()
    select_trainable(model, config.trainable, base)
    return model


def memory_sentence(config: TrainConfig, base: LoadedModel, text: int = 0) -> str:
    """A sentence for `TaskFacts.memory_advice`. `base` is the model of --from (ignored without --from); `text` is
    the size in bytes of the text to index."""
    if not config.base:
        return autosize.memory_advice(config, text=text)
    build = partial(outline_with_base, config, base)
    with torch.device("meta"):
        trained = sum(t.nbytes for t in trainable_state(build()).values())
    return autosize.memory_advice(config, build, trainable=trained, text=text)


def only_completes(config: TrainConfig, base: LoadedModel) -> bool:
    """True if a run for line completion trains nothing, so that its folder only refers to the base.

    There are two conditions: dunes has neither changed the base nor trained it to complete lines, and a folder can
    refer to the base. Without --trainable, the result is True if both are met. With --trainable none, raises
    ValueError unless both are met.
    """
    if config.trainable and config.trains:
        return False
    try:
        if trained_text(base.card).get("complete") or records(base):
            raise ValueError(
                f"{config.base}: trained or changed by dunes; omit --trainable none to continue its training"
            )
        adapter_base_of(base.architecture.outline(), described_family(base))
    except ValueError:
        if not config.trains:
            raise
        return False
    return True


def tells_nothing(base: LoadedModel, corpus: Corpus) -> str:
    """A sentence for the user if a base that dunes trained predicts the text no better than chance; else "".

    For a base that was changed or is built by a function, returns "", since the user may want to train a model
    with its structure.
    """
    if not trained_text(base.card) or records(base) or base.architecture.function:
        return ""
    text = "".join(islice(chain.from_iterable(d.text() for d in corpus.valid or corpus.train), SCORED_BLOCKS))
    ids = np.array(base.require_tokenizer().encode(text[:SCORED]), np.int64)
    if len(ids) < 2 or (bits := evaluate(base, ids).bits_per_byte) < CHANCE:
        return ""
    return (
        f"{bits:.1f} bits/byte on this text, and random bytes have 8, so a new model is trained instead "
        "(--trainable all trains this one)"
    )


def choose_trainable(
    config: TrainConfig, corpus: Corpus, base: LoadedModel | None
) -> tuple[TrainConfig, list[str]]:
    """The config with `complete` and `trainable` chosen, and lines with the reasons. `base` is --from's model.

    Raises the errors of `choose_completion` and `only_completes`, and ValueError for a base without a tokenizer.
    """
    tokenizer = base.require_tokenizer() if base else None
    alone = base is not None and only_completes(config, base)
    plain = replace(config, trainable=()) if alone else config
    chosen, reason = choose_completion(plain, corpus, tokenizer, not alone)
    lines = [reason]
    if not chosen.complete and not config.trains:
        raise ValueError(f"--trainable none: {reason}; omit it")
    if tokenizer and chosen.complete and template_from_files(tokenizer.extra_files, tokenizer.config_path.parent):
        lines.append("the base is a chat model, but its template is not used for lines")
    if not alone or not chosen.complete:
        return chosen, lines
    effect = "nothing is trained: lines are completed with the base, copies and a gate (--trainable all trains it)"
    return replace(config, complete=True, trainable=NONE), [*lines, effect]


def _choose_base(
    config: TrainConfig, corpus: Corpus, base: LoadedModel | None, display: Display
) -> tuple[TrainConfig, list[str], LoadedModel | None]:
    """The result of `choose_trainable`, and the base (None if the base predicts no better than chance)."""
    chosen, reasons = choose_trainable(config, corpus, base)
    if base is None or config.trainable or not (chosen.complete and chosen.trains):
        return chosen, reasons, base
    if not (remark := tells_nothing(base, corpus)):
        return chosen, reasons, base
    display.line(f"{config.base}: {remark}")
    return *choose_trainable(replace(config, base=""), corpus, None), None


def select_trainable(model: nn.Module, trainable: Sequence[str], base: LoadedModel) -> None:
    """Make the parameters that match the globs trainable, and freeze all other parameters.

    The glob `new` stands for the parameters added by the base's last change. Raises ValueError if no parameter
    matches, or for `new` if the last change added no parameters.
    """
    set_trainable(model, _resolve_globs(trainable or ("all",), base))


def rate_factors(model: nn.Module, config: TrainConfig, base: LoadedModel | None) -> dict[Tensor, float]:
    """Learning-rate factors of trainable parameters; for each parameter, the last matching GLOB=FACTOR applies.

    Raises ValueError for a glob that matches no trainable parameter, and in the same cases as `resolve_new`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen: dict[Tensor, float] = {}
    for glob, factor in config.rate_factors:
        globs = _resolve_globs([glob], base)
        matched: dict[Tensor, float] = {p: factor for name, p in trained.items() if selects(globs, name)}
        if not matched:
            names = ", ".join(trained)[:300]
            raise ValueError(f"--lr-factors {glob}={factor:g}: matches no trainable parameter of {names}")
        chosen |= matched
    return chosen


def _resolve_globs(globs: Sequence[str], base: LoadedModel | None) -> Sequence[str]:
    plain = ["**" if each == "all" else each for each in globs]
    return plain if base is None else resolve_new(plain, base)


def with_context(base: LoadedModel, length: int) -> LoadedModel:
    """The model with context length `length`; sets the length in the architecture's config too."""
    architecture = base.architecture
    if hasattr(architecture.config, "context_length"):
        architecture = replace(architecture, config=replace(architecture.config, context_length=length))
    return replace(base, context_length=length, architecture=architecture)


def prepare(
    config: TrainConfig,
    folder: Path,
    tokens: Tokens,
    base: LoadedModel | None = None,
    completion: CompletionFiles | None = None,
) -> Run:
    """A run at step 0 for a complete config, with a new model or with the model of `base`."""
    assert config.threads, "chosen before"
    torch.set_num_threads(config.threads)
    repeat_choice(config.float32_products)
    if base is None:
        architecture = autosize.architecture_for(config, tokens.tokenizer.vocab)
        with torch.device("meta") if ranks.count() > 1 else nullcontext():
            model = architecture.build()
        loaded = LoadedModel(model, tokens.tokenizer, config.context_length, {}, architecture)
        if isinstance(config.chosen_parts, str):  # the function's file may be edited before the run is resumed
            structure = sha256(repr([*module_rows(model)]).encode()).hexdigest()
            tokens = replace(tokens, fingerprints=tokens.fingerprints | {"the model": structure})
    else:
        fingerprints = tokens.fingerprints | {"the model": weights_digest(base.model)}
        tokens = replace(tokens, fingerprints=fingerprints)
        model = base.model if ranks.count() > 1 else base.model.float()
        select_trainable(model, config.trainable, base)
        loaded = with_context(base, max(config.context_length, base.context_length))
    outline = ranks.shard(model, model.blocks, torch.float32)  # updates are smaller than bfloat16's precision
    if base is None:
        initialise(model, config.seed, empty=outline is not None)
    model.to(measure.device())
    optimizer = autosize.build_optimizer(model, config)
    scale_rates(optimizer, rate_factors(model, config, base))
    probabilities = [p.p for p in dropouts(model)]
    if config.dropout is not None:
        set_dropout(model, [config.dropout] * len(probabilities))
    task = TrainTask(config, tokens, loaded, probabilities, completion, outline)
    return new_run(folder, config, task, optimizer)


def fit_size(config: TrainConfig, seconds_per_token: float) -> FitSize:
    """The amount of text on which the gate is fitted; with fixed steps, the amount depends only on the config."""
    if config.steps:
        return FitSize.of(config.steps * config.batch * config.context_length / TYPICAL_RATE)
    return FitSize.of(config.seconds, seconds_per_token * (config.threads or 1))  # the fit uses one thread


@dataclass(frozen=True)
class Reference:
    """A run that trains nothing. The run's folder refers to `base`, whose path is `place`, and contains a
    completion gate and an index of the text for copying.

    `packages` are the installed packages whose code is in the text. Raises ValueError if no folder can refer to
    the base, if its tokenizer cannot write lines, or if there are several ranks.
    """

    config: TrainConfig
    start: Start
    base: LoadedModel
    place: Path
    packages: Sequence[str] = ()

    def __post_init__(self) -> None:
        if ranks.count() > 1:
            raise ValueError("--trainable none: trains nothing; start it without torchrun, or name what to train")
        if only_completes(self.config, self.base) and not self.base.require_tokenizer().writes_lines:
            raise ValueError(f"{self.place}: {NO_LINES}")

    @property
    def folder(self) -> Path:
        return self.start.folder

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        return base_identity(self.base.model, self.place)

    @property
    def card(self) -> dict[str, Any]:
        """Card entries about the text. Prompts have no file headers, since the base was trained without them."""
        text = {"split_version": SPLIT_VERSION, "file_headers": False, "packages": sorted(self.packages)}
        return {"trained": asdict(self.config) | text}

    @property
    def fitted(self) -> Mapping[str, Any]:
        """The entry "base" of the folder's card if the gate is fitted; else empty."""
        card = read_card(self.folder)
        return dict(card["base"]) if is_reference(card) and read_gate(self.folder) else {}

    def is_finished(self) -> bool:
        """True if the gate is fitted and --override changes no option except `base`. Records the new path of a
        moved base."""
        fitted, changed = self.fitted, {*self.start.options.override}
        if changed - {"base"} or not fitted or not self._has_fitted(fitted):
            return False
        if (changed or fitted.get("files") != self.identity["files"]) and not self.start.options.dry_run:
            self.save()
        self.start.display.line(f"{self.folder}: finished; it completes lines with the model in {self.place}")
        return True

    def _has_fitted(self, fitted: Mapping[str, Any]) -> bool:
        """True if the base's weights and settings match `fitted`, and the index was made with the base's
        tokenizer."""
        settings = adapter_base_of(self.base.architecture.outline(), described_family(self.base)).settings
        same = fitted.get("sha256") == self.identity["sha256"] and fitted.get("config") == settings
        return same and Tokenizer.load(self.folder).json() == self.base.require_tokenizer().json()

    def save(self) -> None:
        """Write the reference and the run's config."""
        words: dict[str, Any] = {"tokenizer": self.base.tokenizer, "context_length": self.base.context_length}
        words |= {"identity": self.identity, "facts": self.card, "family": described_family(self.base)}
        checkpoint.save_adapter(self.base.architecture.outline(), self.folder, None, self.place, **words)
        write_config(self.config, self.folder)

    def fit(self, corpus: Corpus) -> str:
        """Index the text, fit the gate, and save; returns a line for the user. A dry run only reports the cost."""
        config, folder, size = self.config, self.folder, corpus.size
        display, options = self.start.display, self.start.options
        assert self.identity, "taken before the weights are rounded"
        stored = size_of(self.base)
        loaded = round_for_speed(replace(self.base, card={"adapter": None, **self.card}))
        loaded.model.to(measure.device())
        amount = FitSize.of(config.seconds, 1.0, ALONE)  # the maximum amount, since the model's speed is unknown
        parts = {"parameters": float(sum({stored, size_of(loaded)})), "Python and torch": PROCESS}
        memory = describe_memory(parts | autosize.fit_memory(amount.places, size))
        seconds = format_seconds(round(sum(amount.seconds) + 2 * BYTE_SECONDS * size))
        display.detail(f"takes at most about {seconds}, of {config.length}; {memory}")
        if options.dry_run:
            return ""
        with run_lock(folder), out_of_memory(folder, lambda: f"out of memory; {memory}"):
            if not options.resume:
                start_run(config, folder, loaded.require_tokenizer())
            files = _index(replace(config, file_headers=False), corpus, loaded.require_tokenizer(), display)
            if not self.fitted:
                display.detail(begin_completion(folder, files, loaded.architecture))
            with display.own_bar("fitting"):
                return finish_completion(folder, files, amount, loaded, config.copies, self.save)

    def run(self, corpus: Corpus) -> None:
        """Call `fit` and print the outcome, also if a signal ends the process."""
        folder, display = shlex.quote(str(self.folder)), self.start.display
        try:
            outcome = self.fit(corpus)
        except (KeyboardInterrupt, SystemExit):
            is_run = read_config(self.folder, TrainConfig) is not None
            left = f"resume with: dunes train --out {folder} --resume" if is_run else "nothing was written"
            display.line(f"stopped: {f'{folder} is unchanged' if self.fitted else left}")
            raise
        if outcome:
            took = format_seconds(round(self.start.timings.elapsed))
            display.line(f"{outcome}\ndone after {took}: {folder} refers to {self.place}; do not move it")
            display.line(f"try: dunes complete {folder} FILE:LINE:COLUMN   in your editor: dunes serve {folder}")


@dataclass(frozen=True)
class TrainTask:
    """The task of a training run: next-token prediction on text.

    `dropout` lists the dropout probabilities that the blocks had before training. With several ranks, `outline` is
    the unsharded model without weight values.
    """

    config: TrainConfig
    text: Tokens
    loaded: LoadedModel
    dropout: Sequence[float]
    completion: CompletionFiles | None = None
    outline: Decoder | None = None

    @cached_property
    def facts(self) -> TaskFacts:
        config, completion = self.config, self.completion
        closing = lambda seconds: closing_seconds(completion, fit_size(config, seconds)) if completion else 0.0
        advice = partial(memory_sentence, config, self.loaded)
        return TaskFacts(self.text.fingerprints, len(self.text.valid), closing, advice)

    def batches(self, start: int) -> Iterator[Tensor | tuple[Tensor, ...]]:
        config = self.config
        cuts = config.complete and config.fim_rate
        arrange = FillInMiddle(self.text.tokenizer, config.fim_rate) if cuts else None
        windows = Windows(self.text.train, config.context_length, config.batch, config.seed, arrange)
        return windows.batches(start)

    @property
    def _windowed(self) -> LoadedModel:
        """The model with the context length of the run."""
        return replace(self.loaded, context_length=self.config.context_length)

    def score(self, limit: int | None = None) -> Score:
        return evaluate(self._windowed, self.text.valid, autosize.autocast_dtype(self.config), limit)

    def sample(self) -> str:
        seconds = math.inf if self.config.steps or ranks.count() > 1 else SAMPLE_SHARE * self.config.seconds
        return sample_text(self._windowed, self.config.seed, seconds=seconds)

    def begin(self, run: Run) -> Iterator[str]:
        config = self.config
        yield (
            f"{config.origin}, {self._parameters(run.model)}; "
            f"{format_count(len(self.text.train))} training tokens, vocabulary size {self.text.tokenizer.vocab}; "
            f"batch size {config.batch}, context length {config.context_length}; "
            f"{run.hardware}; {config.length}"
        )
        if self.completion is not None:
            yield begin_completion(run.folder, self.completion, self.loaded.architecture)

    def _parameters(self, model: Decoder) -> str:
        total, trained = tree.count(model), tree.count(model, trainable=True)
        share = "" if total == trained else f"{format_count(trained)} of "
        return f"{share}{autosize.format_parameters(total, autosize.active_parameters(model))}"

    def close(self, run: Run, score: Score, interrupted: bool) -> list[str]:
        loaded = replace(self.loaded, model=checkpoint.gathered(run.model, self.outline, run.folder / "weights"))
        if not ranks.is_first():
            return [""]
        set_dropout(loaded.model, self.dropout)  # the saved model has the dropout from before training
        facts = card_facts(run, score, "trained")
        if packages := {*trained_packages(self.loaded.card), *self.text.packages}:
            facts["trained"]["packages"] = sorted(packages)
        folder = shlex.quote(str(run.folder)) + loaded.architecture.trust_option
        lines = [f"model: {run.folder}"]
        save_changed(loaded, (), run.folder, lambda staged: facts)
        if self.completion is not None and not interrupted:
            size = fit_size(self.config, run.seconds_per_token)
            saved = checkpoint.load(run.folder, measure.device(), build=loaded.architecture.function)
            lines.append(finish_completion(run.folder, self.completion, size, saved, self.config.copies))
        then = "in your editor: dunes serve {0}" if self.completion else "or: dunes complete {0} FILE:LINE:COLUMN"
        if self.completion and not self.config.base:
            command = f"dunes train {shlex.join(self.config.sources)} --from smollm2 --out {folder}-open"
            lines.append(f"a published model may complete better: {command}")
        return [*lines, f"try: dunes generate {folder}   {then.format(folder)}"]


def dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropout modules of all blocks, one per block."""
    return [block.dropout for block in model.modules() if isinstance(block, Block)]


def set_dropout(model: nn.Module, probabilities: Sequence[float]) -> None:
    """Set the dropout probability of the outputs of each block; `probabilities` has one per block."""
    for dropout, p in zip(dropouts(model), probabilities, strict=True):
        dropout.p = p
