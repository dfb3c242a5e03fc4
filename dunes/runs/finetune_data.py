"""The data of a finetuning run: the base model, tokenized examples, and the memory that training needs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dunes import checkpoint, measure
from dunes.augment import Change
from dunes.augment.adapted import sides
from dunes.augment.lora import active_adapter
from dunes.checkpoint.formats.adapter import peft_factors
from dunes.checkpoint.loading import is_adapter
from dunes.data.document import Document, plain_document
from dunes.data.examples import (
    Example,
    Record,
    Records,
    count_leaked,
    ignored_line,
    read_records,
    record_hashes,
    split_records,
    tokenize_records,
)
from dunes.data.files import SourceFile, Walk, skipped_line
from dunes.data.packing import Batch, Batches, collate
from dunes.data.preflight import check_report, data_report
from dunes.data.record_document import holds_records
from dunes.data.records import JSON
from dunes.data.sources import validation_share
from dunes.parts import Decoder
from dunes.progress import Display
from dunes.runs.autosize import with_hardware
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_method import (
    METHODS,
    PLAIN_KINDS,
    apply_method,
    choose_batch,
    choose_context_length,
    choose_steps,
    choose_template,
    learning_rate,
    main_records,
    resolve_targets,
)
from dunes.runs.memory import Shape, TrainSetup, build_with_dtype, describe_memory, process_memory
from dunes.runs.run import trainable_state
from dunes.text import Tokenizer, chat_template, templates
from dunes.text.templates import Template, Turn
from dunes.train import adamw, cast_frozen
from dunes.train.loss import next_token_loss
from dunes.units import plural


@dataclass(frozen=True)
class FinetuneData:
    """The base model and the tokenized training and validation examples.

    `leaked` is the number of validation records from --val-data that are near-duplicates of training records.
    `tokenizer` and `template` are the finetuned model's.
    """

    config: FinetuneConfig
    base: checkpoint.LoadedModel
    folder: Path
    tokenizer: Tokenizer
    template: Template
    train: Sequence[Example]
    valid: Sequence[Example]
    val_records: Sequence[Record]
    leaked: int = 0

    @classmethod
    def read(cls, config: FinetuneConfig, display: Display) -> "FinetuneData":
        """Load the base and tokenize the examples. Raises ValueError if they cannot be read or do not fit."""
        if is_adapter(folder := checkpoint.locate_model(config.model).folder):
            remedy = f"merge it first: dunes augment merge {folder} OUT"
            raise ValueError(f"{folder}: an adapter, not a base model; {remedy}")
        read = partial(read_dataset, text_field=config.text_field, follow_links=config.follow_links)
        files, lines = read(config.data)
        val_files, val_lines = read(config.val_data) if config.val_data else ([], [])
        for line in (*lines, *val_lines, *ignored_line([*files, *val_files])):
            display.detail(line)
        base = checkpoint.load_with_tokenizer(folder)
        tokenizer = base.require_tokenizer()
        if METHODS[config.method].adapter is not None and (active := active_adapter(base.model)) is not None:
            raise ValueError(
                f"{folder}: has the adapter {active!r}, which a new one would replace; merge it first: "
                f"dunes augment merge {folder} OUT, or train a mixture on with --method full --target-modules new"
            )
        _check_saved_form(config, base)
        records = main_records([*files, *val_files])
        template = choose_template(config, records, tokenizer, base.card)
        display.detail(f"template: {template.name}")
        own_template = own_template_name(base)
        if own_template is None or config.template or records.format not in PLAIN_KINDS:
            tokenizer = templates.attach_template(template, tokenizer)
            if own_template not in (None, template.name):
                display.line(f"warning: it replaces the base model's own template: {own_template}")
        write = partial(_tokenize, config, template, records.format not in PLAIN_KINDS, tokenizer)
        rows, val_records = ([row for r in side for row in r.rows] for side in (files, val_files))
        leaked = count_leaked(rows, val_records, config.split_version)
        if val_records:
            train, valid = write(rows), write(val_records)
            config = replace(config, context_length=_context(config, [*train, *valid], base))
        else:
            config, train, valid, val_records = _split_examples(rows, config, base, write)
            if copies := len(rows) - len({*record_hashes(rows, config.split_version)}):
                display.detail(
                    f"near-duplicates: {plural(copies, 'record is a copy', 'records are copies')} of others but "
                    "for white space or a few lines, each on one side with its like"
                )
        if not val_records:
            raise ValueError(f"{config.data}: no examples left for validation; add examples, or pass --val-data")
        train, valid = ([w for e in side for w in _windows(e, config.context_length)] for side in (train, valid))
        return cls(config, base, folder, tokenizer, template, train, valid, val_records, leaked)

    def complete(self, display: Display) -> "FinetuneData":
        """Report on the examples, and choose all unset options of the config.

        Raises ValueError for examples that cannot be trained on.
        """
        context = self.config.context_length
        if context > self.base.context_length:
            display.line(
                f"warning: the base model was trained on {self.base.context_length} tokens; longer "
                "contexts are learned from this data alone"
            )
        vocab, width = sides(self.base.model.embed.token)
        report = data_report(self.train, self.valid, context, vocab, self.template, self.tokenizer)
        report = replace(report, leaked=max(report.leaked, self.leaked))
        for line in report.lines():
            display.detail(line)
        check_report(report, self.config.max_truncated)
        for line in report.warnings():
            display.line(f"warning: {line}")
        rows = Batches(self.train, context, 1, packed=self.config.packing).rows_per_epoch
        batch = choose_batch(self.config, context, rows)
        steps, lr = choose_steps(self.config, rows, batch), learning_rate(self.config, width)
        config = with_hardware(replace(self.config, batch=batch, steps=steps, lr=lr))
        return replace(self, config=_fit_memory(replace(self, config=config), display))

    @property
    def template_name(self) -> str | None:
        """Name of the finetuned model's chat template, or None; after plain text, the base model's."""
        if self.tokenizer is self.base.tokenizer:
            return self.base.card.get("template")
        return self.template.name if isinstance(self.template, templates.NamedTemplate) else None

    @property
    def loaded(self) -> checkpoint.LoadedModel:
        """The finetuned model; its module is the base's, which finetuning changes in place."""
        context_length = max(self.config.context_length, self.base.context_length)
        return replace(self.base, tokenizer=self.tokenizer, context_length=context_length)


def _check_saved_form(config: FinetuneConfig, base: checkpoint.LoadedModel) -> None:
    """Raise ValueError if the method makes an adapter that PEFT's format cannot express."""
    if not METHODS[config.method].saves_model:
        with torch.device("meta"):
            model = base.architecture.build()
            apply_method(model, resolve_targets(config, base), fill=False)
            peft_factors(model)


def _tokenize(
    config: FinetuneConfig, template: Template, conversations: bool, tokenizer: Tokenizer, rows: Sequence[Record]
) -> list[Example]:
    """The tokenized rows; with `conversations`, rows of plain text among them get no template."""
    examples: list[Example] = []
    for plain, group in groupby(rows, key=lambda row: conversations and row.format in PLAIN_KINDS):
        row_template = templates.get_template("plain") if plain else template
        examples += tokenize_records([*group], row_template, tokenizer, config.train_on)
    return examples


def _split_examples(
    rows: Sequence[Record],
    config: FinetuneConfig,
    base: checkpoint.LoadedModel,
    write: Callable[[Sequence[Record]], list[Example]],
) -> tuple[FinetuneConfig, list[Example], list[Example], list[Record]]:
    """The config with its context length, training and validation examples, and the validation records.

    Records are split by hash; of large texts, the ends are for validation. Examples without a target in the
    context are not for validation.
    """
    share = config.val_fraction
    if share is None:
        share = validation_share(sum(len(turn.full_text) for row in rows for turn in row.turns))
    large = large_texts(rows, share)
    if large and config.split_version:
        rows = _without_copies(rows, large)
        large = large_texts(rows, share)
    heads, tails = split_tails(write(large), share)
    excluded = {id(row) for row in large} if tails else set()
    heads, large = (heads, large) if tails else ([], [])
    rest = [row for row in rows if id(row) not in excluded]
    examples = write(rest)
    config = replace(config, context_length=_context(config, [*examples, *heads, *tails], base))
    usable = [r for r, e in zip(rest, examples, strict=True) if e.targets(config.context_length)]
    val_records: list[Record] = []
    for candidates in (usable, rest) if config.split_version else (rest,):  # too few targets are reported later
        val_records = val_records or split_records(candidates, share, config.split_version)[1]
    valid_rows = {id(row) for row in val_records}
    pairs = [(id(row) in valid_rows, e) for row, e in zip(rest, examples, strict=True)]
    train, valid = ([e for is_valid, e in pairs if is_valid == side] for side in (False, True))
    return config, [*train, *heads], [*valid, *tails], [*val_records, *large]


def _without_copies(rows: Sequence[Record], large: Sequence[Record]) -> list[Record]:
    """The rows without near-duplicates of large texts, which would have the validation tail in training."""
    hashes = dict(zip(map(id, rows), record_hashes(rows), strict=True))
    firsts = {hashes[id(row)]: row for row in reversed(large)}
    return [row for row in rows if firsts.get(hashes[id(row)], row) is row]


def _context(config: FinetuneConfig, examples: Sequence[Example], base: checkpoint.LoadedModel) -> int:
    """The context length, which fits the longest conversation; for plain text it is at most the base model's."""
    lengths = (len(e) if e.window_index is None else min(len(e), base.context_length + 1) for e in examples)
    longest = max(lengths, default=0)
    context = choose_context_length(config, longest, base.model, base.context_length)
    has_conversations = any(e.window_index is None for e in examples)
    return context if config.context_length or has_conversations else min(context, base.context_length)


def _windows(example: Example, context: int) -> Iterable[Example]:
    return [example] if example.window_index is None else split_windows(example, context)


def own_template_name(base: checkpoint.LoadedModel) -> str | None:
    """Name of the base model's own chat template, or None."""
    tokenizer = base.require_tokenizer()
    own = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    name: str | None = base.card.get("template")
    return name or (None if own is None else templates.ModelTemplate.name)


def _fit_memory(data: FinetuneData, display: Display) -> FinetuneConfig:
    """The config with the largest micro-batch that fits into free memory; prints the estimate."""
    config, free = data.config, measure.free_memory(measure.device())
    micro_batch = config.micro_batch or config.batch
    if config.batch % micro_batch:
        raise ValueError(f"--micro-batch is {micro_batch}, which does not divide --batch {config.batch}")
    parts = memory(replace(data, config=replace(config, micro_batch=micro_batch)))
    while not config.micro_batch and sum(parts.values()) > free and micro_batch > 1:
        micro_batch = max(n for n in range(1, micro_batch) if config.batch % n == 0)
        parts = memory(replace(data, config=replace(config, micro_batch=micro_batch)))
    display.detail(f"{describe_memory(parts)}; {free / 1e9:.1f} GB are free")
    if sum(parts.values()) > free:
        display.line("warning: that may not fit; use --method qlora, or reduce --context-length or --micro-batch")
    return replace(config, micro_batch=micro_batch)


def memory(data: FinetuneData) -> dict[str, float]:
    """Bytes that a run needs, by purpose, estimated on fake tensors."""
    config = data.config
    assert config.dtype, "chosen before"
    build, rows = partial(_meta_model, data), _full_batch(config)
    batch = lambda shape: tuple(torch.zeros(part.shape, dtype=part.dtype) for part in rows)
    with torch.device("meta"):
        size = sum(t.nbytes for t in trainable_state(build()).values())
    shape = Shape(config.micro_batch, config.context_length, getattr(torch, config.dtype))
    setup = TrainSetup(partial(optimizer, config), next_token_loss, batch)
    return process_memory(build, shape, setup, size)


def _full_batch(config: FinetuneConfig) -> Batch:
    """A full batch with two examples in each row and a loss on every token."""
    half = np.zeros(config.context_length // 2 + 1, np.int32)
    example = Example(half, np.ones(len(half), bool))
    row = [example] * (2 if config.packing else 1)
    return collate([row] * config.micro_batch, config.context_length, full=True)


def _meta_model(data: FinetuneData) -> Decoder:
    """The model to train, without values, for estimates on fake tensors."""
    stored = next(data.base.model.parameters()).dtype
    dtype = torch.float32 if METHODS[data.config.method].adapter is None else stored
    model = build_with_dtype(dtype, data.base.architecture.build)
    apply_method(model, resolve_targets(data.config, data.base), fill=False)
    cast_frozen_weights(model, data.config)
    return model


def prepare_model(model: Decoder, config: FinetuneConfig) -> list[Change]:
    """Change the base model for training, and return the changes.

    Full finetuning trains in float32, as updates are smaller than bfloat16's precision.
    """
    if METHODS[config.method].adapter is None:
        model.float()
    return apply_method(model, config)


def cast_frozen_weights(model: Decoder, config: FinetuneConfig) -> None:
    """Cast frozen weights to the dtype of matrix products, unless the run saves them."""
    assert config.dtype, "chosen before"
    if not METHODS[config.method].saves_model:
        cast_frozen(model, getattr(torch, config.dtype))


def optimizer(config: FinetuneConfig, model: nn.Module) -> Optimizer:
    assert config.lr is not None, "chosen before"
    return adamw(model, config.lr, (0.9, 0.999), decay=0.0)


def read_dataset(
    source: Path | str, text_field: Sequence[str] = (), follow_links: bool = False
) -> tuple[list[Records], list[str]]:
    """Records in a file, or in all files below a folder, and lines that report read and skipped files.

    A file of plain text is one record; .gitignore, binaries, links and duplicates are handled as in
    `collect_corpus`. Raises ValueError, naming the file and the line or row, for invalid records, and if there are
    none.
    """
    walk = Walk([source], follow_links)
    files: list[Records] = []
    documents: dict[str, Document] = {}
    for file in walk.files():
        if _has_records(file):
            files.append(read_records(file.path, text_field))
        elif isinstance(document := plain_document(file), str):
            walk.skip(document, file.name)
        elif document.digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents[document.digest] = document
    lines = [records.description for records in files]
    if documents:
        rows = [Record((Turn("text", "".join(d.text())),), str(d.path), "text") for d in documents.values()]
        files.append(Records(Path(source), "text", "plain files", rows))
        lines.append(f"{source}: {plural(len(rows), 'file')} of plain text")
    if walk.skipped:
        lines.append(skipped_line(walk.skipped))
    if not files:
        raise ValueError(f"{source}: nothing to train on ({lines[0] if lines else 'no files'})")
    return files, lines


def _has_records(file: SourceFile) -> bool:
    """True to read a file as records; a .json file that the user names must have records."""
    return holds_records(file) or (file.named and file.path.name.lower().endswith(JSON))


LEAST_TAIL = 16
"""Least length of a tail in tokens."""


def split_windows(example: Example, context_length: int) -> Iterator[Example]:
    """Split an example into windows of up to `context_length` + 1 ids that overlap by one id."""
    for number, start in enumerate(range(0, max(1, len(example) - 1), context_length)):
        stop = start + context_length + 1
        place = f"{example.place}, window {number + 1}" if len(example) > context_length + 1 else example.place
        index = number + (example.window_index or 0)
        yield Example(example.ids[start:stop], example.loss_mask[start:stop], place, index)


def large_texts(rows: Sequence[Record], share: float) -> list[Record]:
    """Plain texts that are each longer than this fraction of their total length."""
    texts = [row for row in rows if row.format == "text"]
    limit = share * sum(len(row.turns[-1].text) for row in texts)
    return [row for row in texts if len(row.turns[-1].text) > limit]


def split_tails(texts: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split texts into heads and tails with about `share` of their tokens; short texts have no tail.

    A tail starts with the last training token, which predicts its first target.
    """
    heads, tails = [], []
    for text in texts:
        cut = len(text) - round((len(text) - 1) * share)
        if len(text) - cut < LEAST_TAIL:
            heads.append(text)
            continue
        heads.append(Example(text.ids[:cut], text.loss_mask[:cut], text.place, 0))
        tails.append(Example(text.ids[cut - 1 :], text.loss_mask[cut - 1 :], f"{text.place}, its end", 1))
    return heads, tails
