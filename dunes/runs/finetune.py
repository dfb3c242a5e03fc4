"""Finetune a base model on examples."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from math import gcd, inf, nan
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from dunes import checkpoint, measure, tree
from dunes.augment import Change, make_change, repeat_structure
from dunes.augment.adapted import sides
from dunes.augment.changes import decide_change
from dunes.augment.lora import active_adapter
from dunes.augment.options import NAME
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.formats.adapter import peft_factors
from dunes.checkpoint.open import is_adapter
from dunes.context import prefix_errors
from dunes.data import TokenIds
from dunes.data.batches import Batch, Batches
from dunes.data.examples import Record, check_names, trained_spans
from dunes.data.preflight import check_report, data_report
from dunes.evaluate.preferences import reference_logprobs
from dunes.evaluate.text_loss import Score, evaluate, evaluation_tokens
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.files.json_file import append_text
from dunes.flags import option
from dunes.inference.text_generator import TextGenerator
from dunes.measure import ranks
from dunes.parts import Decoder
from dunes.progress import Display, each, phase, shown_by
from dunes.runs.augment import described_family, history, resolve_new
from dunes.runs.autosize import autocast_dtype, with_hardware
from dunes.runs.config import RunOptions
from dunes.runs.finetune_config import (
    EXPERTS,
    FinetuneConfig,
    choose_batch,
    choose_steps,
    learning_rate,
    unused_options,
)
from dunes.runs.finetune_data import Baseline, FinetuneData, question, score_within
from dunes.runs.memory import Shape, TrainSetup, build_with_dtype, describe_memory, process_memory
from dunes.runs.report import report_step
from dunes.runs.run import Start, card_facts, execute_run, new_run
from dunes.runs.task import Run, TaskFacts, set_trainable, trainable_state
from dunes.text import templates
from dunes.train import Trainer, adamw, cast_frozen
from dunes.units import format_count, plural

BASELINE = Path("state") / "baseline.json"
REFERENCE = Path("state") / "reference.json"
T = TypeVar("T")
Reference = tuple[NDArray[np.float32], NDArray[np.float32]]

ANSWERED = 3
"""Number of validation examples that the model answers before and after finetuning."""

ANSWER_TOKENS = 160
"""Maximum number of tokens of an answer."""

BUDGET = 0.05
"""In a time-limited run, maximum fraction of the time for each measurement of the base model (validation,
forgetting, answers). The finetuned model is measured on the same tokens."""

UNMEASURED = Baseline(Score(nan, 1, 0), None, [], "")
"""Placeholder for the base model's scores until they are measured."""


def finetune(config: FinetuneConfig, folder: Path, display: Display, *, examples: int = 0, **options: Any) -> int:
    """Finetune a model and save it in the folder, or resume the run in the folder.

    `options` are fields of `RunOptions`. The first `examples` training examples are printed, with the trained
    tokens highlighted. Returns the exit status of `execute_run`. Raises ValueError, before writing, for invalid
    options or data.
    """
    start = Start(folder, display, RunOptions(**options))
    # For a resumed run, `execute_run` compares the user's options with the stored options.
    if unused := unused_options(config, () if start.options.resume else start.options.asked or ()):
        name = next(iter(unused))
        raise ValueError(f"--{option(name)} has no effect with {unused[name]}; omit it")
    return execute_run(config, start, partial(plan_finetuning, examples=examples))


def plan_finetuning(config: FinetuneConfig, start: Start, examples: int) -> Callable[[], Run] | None:
    """Read the examples, choose all unset options, and return a function that builds the run.

    Prints the first `examples` training examples. Returns None in a dry run.
    """
    display = start.display
    check_names(config.field_names)
    with start.timings("reading data"):
        data = FinetuneData.read(config, load_base(config), display)
    for example in data.train[:examples]:
        for side in example.sides:
            display.print_highlighted(f"--- {side.place}", trained_spans(side, data.tokenizer))
    with start.timings("preparing"):
        data, text = choose_options(data, display), forgetting_text(data, display)
        data = replace(data, config=ranks.broadcast(data.config))
        same = len({*ranks.all_gather(lambda: _digest(text))}) == 1  # some ranks may lack the text
        batch = data.config.goal.full_batch(data.config, micro_batch(data.config))
    report = partial(report_step, data.config, batch=batch, display=display)
    if start.options.dry_run:
        report(_dry_trainer(data))
        return None

    def build() -> Run:
        with start.timings("building the model"):
            run = prepare(data, text if same else None, start.folder, display)
        if not start.options.resume:
            report(run.trainer)
        return run

    return build


def load_base(config: FinetuneConfig) -> LoadedModel:
    """Load the base model. Raises ValueError for an adapter, and for a model that the method cannot change."""
    if is_adapter(folder := checkpoint.locate_model(config.model).folder):
        remedy = f"merge it first: dunes augment merge {folder} OUT"
        raise ValueError(f"{folder}: an adapter, not a base model; {remedy}")
    base = checkpoint.load_with_tokenizer(folder)
    if config.spec.adapter is not None and (active := active_adapter(base.model)) is not None:
        raise ValueError(
            f"{folder}: has the adapter {active!r}, which a new one would replace; merge it first: "
            f"dunes augment merge {folder} OUT, or train a mixture further with --method full --target-modules new"
        )
    if not config.spec.saves_model:
        with torch.device("meta"):
            model = base.architecture.build()
            apply_method(model, resolve_targets(config, base), fill=False)
            peft_factors(model, family=described_family(base))  # raises if PEFT cannot express the adapter
    return base


def choose_options(data: FinetuneData, display: Display) -> FinetuneData:
    """Print a report on the examples, and choose all unset options of the config.

    Raises ValueError if the examples are not usable for training.
    """
    config, base = data.config, data.base
    context = config.context_length
    if context > base.context_length:
        display.line(
            f"warning: the base model was trained on {base.context_length} tokens; longer "
            "contexts are learned from this data alone"
        )
    vocab, width = sides(base.model.embed.token)
    report = data_report(data.train, data.valid, context, vocab, data.template, data.tokenizer)
    report = replace(report, leaked=max(report.leaked, data.leaked))
    for line in report.lines():
        display.detail(line)
    check_report(report, config.max_truncated)
    for line in report.warnings():
        display.line(f"warning: {line}")
    rows = Batches(data.train, context, 1, packed=config.packing).rows_per_epoch
    batch = choose_batch(config, context, rows)
    batch += 0 if config.batch else -batch % ranks.count()
    steps, lr = choose_steps(config, rows, batch), learning_rate(config, width)
    config = with_hardware(replace(config, batch=batch, steps=steps, lr=lr))
    return _fit_memory(replace(data, config=config), display)


def _fit_memory(data: FinetuneData, display: Display) -> FinetuneData:
    """Unless configured, choose the largest micro-batch that fits into free memory; print the estimate.

    Raises ValueError if a configured micro-batch does not divide the batch size.
    """
    config, free = data.config, measure.free_memory(measure.device())
    rows = len(range(config.batch)[ranks.rows(config.batch)])
    if config.batch % (config.micro_batch or 1):
        raise ValueError(f"--micro-batch is {config.micro_batch}, which does not divide --batch {config.batch}")
    divisors = [n for n in range(rows, 0, -1) if rows % n == 0]
    for size in [config.micro_batch] if config.micro_batch else divisors:
        data = replace(data, config=replace(config, micro_batch=size))
        parts = memory(data)
        if sum(parts.values()) <= free:
            break
    display.detail(f"{describe_memory(parts)}; {free / 1e9:.1f} GB are free")
    if sum(parts.values()) > free:
        display.line("warning: that may not fit; use --method qlora, or reduce --context-length or --micro-batch")
    return data


def _dry_trainer(data: FinetuneData) -> Trainer:
    """A trainer of the base model with the method's changes, for the estimates of a dry run."""
    model, config = data.base.model.to(measure.device()), data.config
    apply_method(model, resolve_targets(config, data.base))
    cast_frozen_weights(model, config)
    dtype, accumulate = autocast_dtype(config), config.batch // (micro_batch(config) * ranks.count())
    return Trainer(model, optimizer(config, model), config.goal.loss(config), dtype=dtype, accumulate=accumulate)


def micro_batch(config: FinetuneConfig) -> int:
    """Rows per micro-batch of a rank: the greatest common divisor of `config.micro_batch` and the rank's rows."""
    return gcd(config.batch // ranks.count(), config.micro_batch)


def memory(data: FinetuneData) -> dict[str, float]:
    """Bytes that a run needs, by purpose, estimated on fake tensors."""
    config = data.config
    build, rows = partial(_meta_model, data), config.goal.full_batch(config, micro_batch(config))
    batch = lambda shape: tuple(torch.zeros(part.shape, dtype=part.dtype) for part in rows)
    with torch.device("meta"):
        size = sum(t.nbytes for t in trainable_state(build()).values())
    shape = Shape(micro_batch(config), config.context_length, autocast_dtype(config))
    setup = TrainSetup(partial(optimizer, config), config.goal.loss(config), batch)
    parts = process_memory(build, shape, setup, size)
    stored, kept = sum(p.nbytes for p in data.base.model.parameters()), parts["parameters"]
    # Until the base is cast or quantized, the stored weights are also in memory.
    before = parts.get("Python and torch", 0.0) + stored + kept + parts.get("temporaries", 0.0)
    if kept < stored and before > sum(parts.values()):
        parts["base as stored"] = before - sum(parts.values())
    return parts


def _meta_model(data: FinetuneData) -> Decoder:
    """The model to train, without weight values, for estimates on fake tensors."""
    stored = next(data.base.model.parameters()).dtype
    dtype = torch.float32 if data.config.spec.adapter is None else stored
    model = build_with_dtype(dtype, data.base.architecture.build)
    apply_method(model, resolve_targets(data.config, data.base), fill=False)
    cast_frozen_weights(model, data.config)
    return model


def prepare(data: FinetuneData, text: TokenIds | None, folder: Path, display: Display) -> Run:
    """Build a run at step 0; `text` contains the token ids on which forgetting is measured."""
    config = data.config
    model = data.base.model.to(measure.device())
    task = FinetuneTask(data, text, next(model.parameters()).dtype)
    before = _baseline(task, folder / BASELINE, display)
    place = checkpoint.locate_model(config.model).folder
    base = {} if config.spec.adapter is None else checkpoint.base_identity(model, place)
    with measure.replaced_paged_out(model):
        changes = apply_method(model, resolve_targets(config, data.base))
        # Without a change, all weights train in float32. Two changes quantize the base, then add an adapter.
        if len(changes) != 1:
            base |= checkpoint.base_identity(model)
        if not changes:
            base["sha256"] = base["digests"]["float32"]  # with several ranks, sharding casts the weights later
        task = replace(task, before=before, base=base, changes=changes)
        cast_frozen_weights(model, config)
    dtype = torch.float32 if config.spec.adapter is None else None
    task = replace(task, outline=ranks.shard(model, model.blocks, dtype))
    update = optimizer(config, model)  # before any forward pass, which leaves sharded weights gathered
    if config.goal.has_reference:
        task = replace(task, reference=_reference(task, folder / REFERENCE, display))
    accumulate = config.batch // (micro_batch(config) * ranks.count())
    return new_run(folder, config, task, update, accumulate, config.goal.loss(config))


def _reference(task: "FinetuneTask", path: Path, display: Display) -> Reference:
    """Log-probabilities of the training and validation answers under the model at step 0, whose outputs equal the
    base's.

    The log-probabilities are stored in `path`; a resumed run reads the stored values.
    """
    fingerprints, sides = dict(task.facts.fingerprints), {"train": task.data.train, "valid": task.data.valid}

    def read(path: Path) -> Reference | None:
        stored = json_file.read(path)
        if stored.get("fingerprints") != fingerprints:
            return None
        with prefix_errors(path, (TypeError, ValueError)):
            train, valid = (np.array(stored.get(n), np.float32).reshape(len(e), 2) for n, e in sides.items())
        return train, valid

    if (known := _stored(path, read, display)) is not None:
        return known
    display.detail("computing the log-probabilities of the reference")
    dtype, context = autocast_dtype(task.config), task.config.context_length
    with shown_by(display.state), phase("log-probabilities of the reference"):
        train, valid = (reference_logprobs(task.loaded.model, e, context, dtype) for e in sides.values())
    if ranks.is_first():
        stored = {"fingerprints": fingerprints, "train": train.tolist(), "valid": valid.tolist()}
        write_file(path, json.dumps(stored).encode())
    return train, valid


def _stored(path: Path, read: Callable[[Path], T], display: Display) -> T | None:
    """The content of a file; None if the run has no saved state, or if the file is missing or damaged."""
    if path.is_file() and any(path.parent.glob("step-*")):
        try:
            return read(path)
        except ValueError as error:
            display.line(f"warning: {error}")
    return None


def apply_method(model: Decoder, config: FinetuneConfig, fill: bool = True) -> list[Change]:
    """Make the method's changes to the model, freeze all other weights, and return the changes.

    Full finetuning trains in float32, because updates are smaller than bfloat16's precision. `fill=False` is for
    models on fake tensors: values are not read, cast or initialised. Raises ValueError if the method does not
    apply to the model.
    """
    spec, changes = config.spec, list[Change]()
    if spec.adapter is None:
        if fill and ranks.count() == 1:  # with several ranks, sharding casts the weights
            model.float()
        set_trainable(model, config.target_modules or ("**",))
        return changes
    requests = {"quantize": spec.quantize, spec.change: _adapter_request(config) | {**spec.adapter}}
    for name, request in requests.items():
        if request is not None:
            changes.append(decide_change(model, name, **request))
            (make_change if fill else repeat_structure)(model, changes[-1])
    set_trainable(model, changes[-1].new)
    return changes


def _adapter_request(config: FinetuneConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"where": config.target_modules} if config.target_modules else {}
    options |= {"rank": config.rank, "alpha": config.alpha, "ranks": config.pairs, "dropout": config.dropout}
    if config.spec.change == "lora-experts":
        options |= {key: getattr(config, name) for name, key in EXPERTS.items()}
    return options | {"adapter": NAME, "seed": config.seed}


def resolve_targets(config: FinetuneConfig, base: LoadedModel) -> FinetuneConfig:
    """Replace `new` in the config's target modules by the names of the parameters that the base's last change
    added."""
    return replace(config, target_modules=resolve_new(config.target_modules, base))


def cast_frozen_weights(model: Decoder, config: FinetuneConfig) -> None:
    """Cast frozen weights to the dtype of matrix products, unless the run saves the complete model."""
    if not config.spec.saves_model:
        cast_frozen(model, autocast_dtype(config))


def optimizer(config: FinetuneConfig, model: nn.Module) -> Optimizer:
    assert config.lr is not None, "chosen before"
    return adamw(model, config.lr, (0.9, 0.999), decay=0.0)


def _baseline(task: "FinetuneTask", path: Path, display: Display) -> Baseline:
    """The base model's scores and answers: read from `path` if the run has a saved state, otherwise measured."""
    before = ranks.broadcast(_stored(path, Baseline.read, display))
    if before is None:
        display.detail("evaluating the base model")
        with shown_by(display.state):
            before = task.measure_baseline()
    elif before.text != task.text:
        display.detail("the text to measure forgetting on changed: evaluating the base model again")
        before = replace(before, forgetting=task.score_forgetting(before.limits[1]), text=task.text)
    else:
        return before
    if ranks.is_first():
        before.write(path)
    return before


def forgetting_text(data: FinetuneData, display: Display) -> TokenIds | None:
    """Token ids of text like the base model's training data.

    Displays a message and returns None if no such text is available.
    """
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


@dataclass(frozen=True)
class FinetuneTask:
    """The task of a finetuning run. Forgetting is measured on `forgetting_ids`.

    `stored` is the dtype of the base model. `base` is the result of `checkpoint.base_identity` for the base model.
    `changes` are the method's changes to the base model. With several ranks, `outline` is the unsharded model
    without weight values. `reference` contains the base's log-probabilities of training and validation answers, if
    the objective needs them.
    """

    data: FinetuneData
    forgetting_ids: TokenIds | None
    stored: torch.dtype
    before: Baseline = UNMEASURED
    base: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    outline: Decoder | None = None
    reference: Reference | None = None

    @property
    def config(self) -> FinetuneConfig:
        return self.data.config

    @property
    def loaded(self) -> LoadedModel:
        architecture = self.data.base.architecture
        architecture = replace(architecture, changes=(*architecture.changes, *self.changes))
        return replace(self.data.loaded, architecture=architecture)

    @cached_property
    def facts(self) -> TaskFacts:
        digest = sha256()
        for side in (self.data.train, self.data.valid):
            digest.update(str(len(side)).encode())
            for e in (part for example in side for part in example.sides):
                digest.update(e.ids.tobytes() + e.loss_mask.tobytes())
        fingerprints = {"examples": digest.hexdigest(), "base": str(self.base["sha256"])}
        return TaskFacts(fingerprints, self._tokens, lambda seconds: self.before.seconds, self._memory_advice)

    @property
    def _tokens(self) -> int:
        """Number of validation targets to score."""
        targets = sum(e.targets(self.config.context_length) for e in self.data.valid)
        return min(targets, self.before.limits[0])

    def _memory_advice(self) -> str:
        remedy = "reduce --context-length or --micro-batch, or use --method qlora"
        return f"{describe_memory(memory(self.data))}; {remedy}"

    def batches(self, start: int) -> Iterator[Batch]:
        config, reference = self.config, self.reference and self.reference[0]
        settings = config.context_length, self._rows, config.seed, config.packing, reference
        return Batches(self.data.train, *settings).batches(start)

    def score(self, limit: int | None = None) -> Score:
        examples, context = self.data.valid, self.config.context_length
        if limit is not None:
            targets = np.cumsum([e.targets(context) for e in examples])
            examples = examples[: int(np.searchsorted(targets, min(limit, self.before.limits[0]))) + 1]
        batches = Batches(examples, context, self._rows, reference=self.reference and self.reference[1])
        return self.config.goal.score(self.config, self.loaded, batches)

    @property
    def _rows(self) -> int:
        """Number of examples or pairs in a batch, which consists of one micro-batch per rank."""
        return micro_batch(self.config) * ranks.count()

    def sample(self) -> str:
        return "\n".join(f"{question(r.turns)}\n>>> {self._answer(r)}" for r in self.data.val_records[:1])

    def measure_baseline(self, score: Score | None = None) -> Baseline:
        """Score the model and generate its answers. If `score` is given, it is used as the validation score."""
        limit, text_limit = self.before.limits
        start, available = monotonic(), 0 if self.forgetting_ids is None else len(self.forgetting_ids)
        with phase("measuring forgetting", end=0.5):
            forgetting, text_limit = score_within(self._budget, self.score_forgetting, text_limit, available)
        with phase("generating answers", 0.5):
            answers = self._answers()
        seconds = monotonic() - start
        if score is None:
            score, limit = score_within(self._budget, self.score, limit, self._tokens)
        assert score is not None, "the validation examples are never empty"
        return Baseline(score, forgetting, answers, self.text, (limit, text_limit), seconds)

    @property
    def _budget(self) -> float:
        """Maximum seconds for each measurement of the base model.

        The result is infinite in a run without a time limit, and for the finetuned model.
        """
        return BUDGET * self.config.seconds if self.config.stops_by_time and self.before is UNMEASURED else inf

    def _answers(self) -> list[str]:
        """Answers to the first validation examples. Before training, up to ANSWERED answers are generated within
        `_budget`; after training, the same examples are answered."""
        answers, end = list[str](), monotonic() + self._budget
        answered = ANSWERED if self.before is UNMEASURED else len(self.before.answers)
        for record in each(self.data.val_records[:answered]):
            answers.append(self._answer(record))
            if ranks.broadcast(monotonic() > end):
                break
        return answers

    @property
    def text(self) -> str:
        """Fingerprint of the forgetting data; empty if forgetting is not measured."""
        return _digest(self.forgetting_ids)

    def score_forgetting(self, limit: int) -> Score | None:
        """The score on about `limit` tokens of the forgetting data; None if forgetting is not measured."""
        if self.forgetting_ids is None:
            return None
        return evaluate(self.data.base, self.forgetting_ids, autocast_dtype(self.config), limit)

    def _answer(self, record: Record) -> str:
        """The model's answer by greedy decoding."""
        turns, generator = record.turns, TextGenerator(self.loaded)
        if turns[-1].role == "text":
            ids = generator.tokenizer.prompt("")
        else:
            prompt = turns[:-1] if turns[-1].role == "assistant" else turns
            ids = templates.encode_prompt(self.data.template, prompt, generator.tokenizer, record.variables)
        ids = ids[-max(1, generator.context_length - ANSWER_TOKENS) :]
        device, dtype = next(generator.model.parameters()).device, autocast_dtype(self.config)
        with torch.autocast(device.type, dtype, dtype != torch.float32):
            return generator.text(ids, ANSWER_TOKENS)

    def begin(self, run: Run) -> list[str]:
        config, base = self.config, self.data.base
        trained, total = tree.count(run.model, trainable=True), tree.count(base.model)
        rows = plural(config.batch, config.goal.noun)
        return [
            f"{config.method} at {config.lr:.2g}: {format_count(trained)} of {format_count(total)} parameters; "
            f"{rows} x {config.context_length} tokens per step, micro-batches of "
            f"{micro_batch(config)}; {run.hardware}; {config.length}"
        ]

    def close(self, run: Run, score: Score, interrupted: bool) -> list[str]:
        rounds = self.config.spec.adapter is None and self.stored != torch.float32
        if rounds:  # so that the score describes the saved weights
            round_weights(run.model, self.stored)
            score = self.score(1 if interrupted else run.final_tokens)
        after = None if interrupted else self.measure_baseline(score)
        model = checkpoint.gathered(run.model, self.outline, run.folder / "weights")
        if rounds:
            model.to(self.stored)
        if not ranks.is_first():
            return [""]
        self._save(model, run.folder, card_facts(run, score, "finetuned"), after)
        lines = [] if after is None else self.before.compare(after, self.data.val_records)
        try:
            if after is not None:
                samples, table = run.folder / "samples.md", self.before.table(after, self.data.val_records)
                if not (samples.is_file() and table in samples.read_text(errors="replace")):  # as before resuming
                    append_text(samples, table)
        except OSError as error:  # not fatal: the weights are already saved
            lines.insert(0, f"warning: writing samples.md failed: {error}")
        folder = shlex.quote(str(run.folder))
        if self.config.spec.saves_model:
            return [*lines, f"model: {folder}", f"try: dunes chat {folder}"]
        merge = f"dunes augment merge {folder} {folder}-merged"
        return [*lines, f"adapter: {folder}", f"try: dunes chat {folder}   or: {merge}"]

    def _save(self, model: Decoder, folder: Path, facts: dict[str, Any], after: Baseline | None) -> None:
        """Save the model or the adapter; the card also records the losses before training."""
        if after is not None:
            key = "chosen_loss_before" if self.config.goal.has_reference else "before"
            facts["measured"][key] = self.before.score.loss
        if after is not None and self.before.forgetting and after.forgetting:
            losses = {"before": self.before.forgetting.loss, "after": after.forgetting.loss}
            facts["measured"]["forgetting"] = losses
        if (template_name := self.data.template_name) is not None:
            facts["template"] = template_name
        loaded, name = self.loaded, self.config.model
        if self.config.spec.saves_model:
            facts["changes"] = history(self.data.base)
            arguments = model, folder, loaded.tokenizer, loaded.context_length, facts
            checkpoint.save(*arguments, architecture=loaded.architecture)
            return
        facts["changes"] = [change.record() for change in self.changes]
        options: dict[str, Any] = {"tokenizer": loaded.tokenizer, "context_length": loaded.context_length}
        base = Path(name) if Path(name).exists() else name  # a string is a name on the Hub
        options["family"] = described_family(loaded)
        checkpoint.save_adapter(model, folder, NAME, base, identity=self.base, facts=facts, **options)


def _digest(ids: TokenIds | None) -> str:
    return "" if ids is None else sha256(np.asarray(ids).tobytes()).hexdigest()


def round_weights(model: Decoder, dtype: torch.dtype) -> None:
    """Round the weights to a dtype. Sharded weights are rounded but stay float32, as fully_shard requires."""
    if ranks.count() == 1:
        model.to(dtype)
        return
    with torch.no_grad():
        for p in filter(torch.is_floating_point, trainable_state(model).values()):
            p.copy_(p.to(dtype))
