"""Data of a finetuning run: the tokenized examples, and the base model's scores and answers on them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from dunes.checkpoint import LoadedModel
from dunes.data.document import Document, holds_records, plain_document
from dunes.data.examples import (
    RECORD_FORMATS,
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
from dunes.data.files import Walk, skipped_line
from dunes.data.records import JSON
from dunes.data.sources import validation_share
from dunes.evaluate.text_loss import Score
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.measure import ranks
from dunes.progress import Display
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.objectives import OBJECTIVES
from dunes.runs.saving import read_score
from dunes.runs.task import FINAL_TOKENS
from dunes.text import Tokenizer, chat_template, templates
from dunes.text.templates import Conversation, Template, Turn
from dunes.units import plural

MAX_CONTEXT = 2048
"""Maximum default context length."""
MIN_CONTEXT = 128
"""Minimum default context length."""

DEFAULT_TEMPLATES = {"alpaca": "alpaca", "dolly": "alpaca", "qa": "alpaca", "completion": "plain", "text": "plain"}
"""Default template by format. For conversations, the default is chatml if the tokenizer has the special tokens of
chatml, else mistral."""

PLAIN_KINDS = ("completion", "text")
"""Formats of plain text; no chat template is applied to their records."""

LEAST_TAIL = 16
"""Minimum length in tokens of the tail of a text."""

FORGETTING_TOKENS = 65_536
"""Maximum number of tokens of the forgetting data to score before and after finetuning."""

PROBED = 2_048
"""Number of tokens to score first, to estimate how many tokens fit into the time budget."""

LINES = 5
"""Maximum number of lines of an answer in the report."""
LINE = 200
"""Maximum number of characters per line of an answer in the report."""


@dataclass(frozen=True)
class FinetuneData:
    """The base model and the tokenized training and validation examples.

    `tokenizer` and `template` are for the finetuned model. `leaked` is the number of validation records from
    --val-data that are near-duplicates of training records.
    """

    config: FinetuneConfig
    base: LoadedModel
    tokenizer: Tokenizer
    template: Template
    train: Sequence[Example]
    valid: Sequence[Example]
    val_records: Sequence[Record]
    leaked: int = 0

    @classmethod
    def read(cls, config: FinetuneConfig, base: LoadedModel, display: Display) -> "FinetuneData":
        """Read and tokenize the examples.

        Raises ValueError if the examples cannot be read, if the context length is too large for the model, or if
        no validation examples remain.
        """
        read = partial(
            read_dataset, text_field=config.text_field, follow_links=config.follow_links, names=config.field_names
        )
        files, lines = read(config.data)
        val_files, val_lines = read(config.val_data) if config.val_data else ([], [])
        for line in (*lines, *val_lines, *ignored_line([*files, *val_files])):
            display.detail(line)
        check_formats(config, [*files, *val_files])
        tokenizer = base.require_tokenizer()
        # Conversations determine the template if there are any, else Alpaca records without history.
        records = min([*files, *val_files], key=lambda r: (r.format in PLAIN_KINDS, _single_tasks(r)))
        template = choose_template(config, records, tokenizer, base.card)
        display.detail(f"template: {template.name}")
        own_template = own_template_name(base)
        if own_template is None or config.template or records.format not in PLAIN_KINDS:
            tokenizer = templates.attach_template(template, tokenizer)
            if own_template not in (None, template.name):
                display.line(f"warning: it replaces the base model's own template: {own_template}")
        write = partial(_tokenize, config, template, records.format not in PLAIN_KINDS, tokenizer)
        (rows, train), (val_records, valid) = (
            write([row for r in side for row in r.rows]) for side in (files, val_files)
        )
        leaked = count_leaked(rows, val_records)
        if val_records:
            config = replace(config, context_length=choose_context_length(config, [*train, *valid], base))
        else:
            config, train, valid, val_records = _split_examples(rows, train, config, base)
            if copies := len(rows) - len({*record_hashes(rows)}):
                display.detail(
                    f"{plural(copies, 'pair repeats', 'pairs repeat')} a prompt on the same side of the split"
                    if rows[0].rejected
                    else f"near-duplicates: {plural(copies, 'record differs', 'records differ')} from others only "
                    "in white space or a few lines; each is on the same side of the split as its original"
                )
        if not val_records:
            raise ValueError(f"{config.data}: no examples left for validation; add examples, or pass --val-data")
        train, valid = (
            [w for e in side for w in split_windows(e, config.context_length)] for side in (train, valid)
        )
        return cls(config, base, tokenizer, template, train, valid, val_records, leaked)

    @property
    def template_name(self) -> str | None:
        """Name of the finetuned model's chat template, or None. If the tokenizer is unchanged, the template is the
        base model's."""
        if self.tokenizer is self.base.tokenizer:
            return self.base.card.get("template")
        return self.template.name if isinstance(self.template, templates.NamedTemplate) else None

    @property
    def loaded(self) -> LoadedModel:
        """The finetuned model; it shares the base's module, since finetuning changes the module in place."""
        context_length = max(self.config.context_length, self.base.context_length)
        return replace(self.base, tokenizer=self.tokenizer, context_length=context_length)


def check_formats(config: FinetuneConfig, files: Sequence[Records]) -> None:
    """Raise ValueError for records of a format that the objective does not read."""
    wanted = config.goal.row_format
    for records in files:
        readers = [name for name, objective in OBJECTIVES.items() if objective.row_format == records.format]
        if records.format != wanted if wanted else readers:
            formats = {name: form.description for name, form in RECORD_FORMATS.items()}
            remedy = f"expected {formats[wanted]}" if wanted else f"use --objective {' or '.join(readers)}"
            asked = f"{formats[records.format]} with --objective {config.objective}"
            raise ValueError(f"{records.path}: {asked}; {remedy}")


def _single_tasks(records: Records) -> bool:
    """True if all records are tasks without system prompt or history, as Alpaca's template requires."""
    return DEFAULT_TEMPLATES.get(records.format) == "alpaca" and all(len(row.turns) == 2 for row in records.rows)


def choose_template(
    config: FinetuneConfig, records: Records, tokenizer: Tokenizer, card: Mapping[str, Any]
) -> templates.Template:
    """The configured template if set. Conversations otherwise get the model's own template, if any. In all other
    cases, the default for the format of the records is returned."""
    if config.template:
        return templates.get_template(config.template)
    template = None if records.format in PLAIN_KINDS else templates.find_template(tokenizer, card)
    if template is not None:
        return template
    has_chatml = all(tokenizer.inner.token_to_id(t) is not None for t in templates.get_template("chatml").needs)
    chat = "chatml" if has_chatml else "mistral"
    single = _single_tasks(records) or records.format in PLAIN_KINDS
    return templates.get_template(DEFAULT_TEMPLATES[records.format] if single else chat)


def _tokenize(
    config: FinetuneConfig, template: Template, conversations: bool, tokenizer: Tokenizer, rows: Sequence[Record]
) -> tuple[list[Record], list[Example]]:
    """Tokenize the rows; returns the rows, with `seen` copied from their examples, and the examples.

    If `conversations` is true, plain text among the rows is tokenized without the template.
    """
    examples: list[Example] = []
    for plain, group in groupby(rows, key=lambda row: conversations and row.format in PLAIN_KINDS):
        row_template = templates.get_template("plain") if plain else template
        examples += tokenize_records([*group], row_template, tokenizer, config.train_on)
    return [replace(row, seen=e.seen) for row, e in zip(rows, examples, strict=True)], examples


def _split_examples(
    rows: Sequence[Record], written: Sequence[Example], config: FinetuneConfig, base: LoadedModel
) -> tuple[FinetuneConfig, list[Example], list[Example], list[Record]]:
    """Split the rows; `written` contains the example of each row.

    Returns the config with its context length, the training examples, the validation examples and the validation
    records. Records are split by hash; the end of each large text is used for validation. Validation examples have
    a target within the context, unless the split selects no such example.
    """
    by_row = {id(row): example for row, example in zip(rows, written, strict=True)}
    share = config.val_fraction
    if share is None:
        share = validation_share(sum(len(turn.full_text) for row in rows for turn in row.turns))
    large = large_texts(rows, share)
    if large:
        rows = _without_copies(rows, large)
        large = large_texts(rows, share)
    heads, tails = split_tails([by_row[id(row)] for row in large], share)
    excluded = {id(row) for row in large} if tails else set()
    heads, large = (heads, large) if tails else ([], [])
    rest = [row for row in rows if id(row) not in excluded]
    examples = [by_row[id(row)] for row in rest]
    config = replace(config, context_length=choose_context_length(config, [*examples, *heads, *tails], base))
    usable = [r for r, e in zip(rest, examples, strict=True) if e.targets(config.context_length)]
    val_records: list[Record] = []
    for candidates in (usable, rest):  # `check_report` rejects too few targets
        val_records = val_records or split_records(candidates, share)[1]
    valid_rows = {id(row) for row in val_records}
    pairs = [(id(row) in valid_rows, e) for row, e in zip(rest, examples, strict=True)]
    train, valid = ([e for is_valid, e in pairs if is_valid == side] for side in (False, True))
    return config, [*train, *heads], [*valid, *tails], [*val_records, *large]


def _without_copies(rows: Sequence[Record], large: Sequence[Record]) -> list[Record]:
    """The rows, except near-duplicates of a row in `large`, since they would put its validation tail into the
    training data."""
    hashes = dict(zip(map(id, rows), record_hashes(rows), strict=True))
    firsts = {hashes[id(row)]: row for row in reversed(large)}
    return [row for row in rows if firsts.get(hashes[id(row)], row) is row]


def choose_context_length(config: FinetuneConfig, examples: Sequence[Example], base: LoadedModel) -> int:
    """The configured context length, or a power of two that fits the longest example.

    For plain text, the default is at most the base model's context length. Raises ValueError if the configured
    length is larger than the base model's context length and, with rotary embeddings, also larger than
    MAX_CONTEXT.
    """
    trained = base.context_length
    limit = trained if base.model.embed.place is not None else max(trained, MAX_CONTEXT)
    if config.context_length > limit:
        length = config.context_length
        raise ValueError(f"--context-length is {length}; this model supports at most {limit} tokens")
    lengths = (len(e) if e.window_index is None else min(len(e), trained + 1) for e in examples)
    power = 1 << (max(1, max(lengths, default=0) - 2)).bit_length()
    if all(e.window_index is not None for e in examples):
        limit = min(limit, trained)
    return config.context_length or min(limit, MAX_CONTEXT, max(MIN_CONTEXT, power))


def own_template_name(base: LoadedModel) -> str | None:
    """Name of the base model's own chat template, or None."""
    tokenizer = base.require_tokenizer()
    own = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    name: str | None = base.card.get("template")
    return name or (None if own is None else templates.ModelTemplate.name)


def read_dataset(
    source: Path | str,
    text_field: Sequence[str] = (),
    follow_links: bool = False,
    *,
    names: Mapping[str, str] | None = None,
) -> tuple[list[Records], list[str]]:
    """Read the records of a file, or of all files below a folder; also returns lines about read and skipped files.

    A file of plain text is one record; .gitignore, binaries, generated files, links and duplicates are handled as
    in `collect_corpus`. `names` maps the field names of RECORD_FORMATS to the names in the file. Raises ValueError
    for an invalid record, naming the file and the line or row, and if the source contains no records.
    """
    walk = Walk([source], follow_links)
    files: list[Records] = []
    documents: dict[str, Document] = {}
    for file in walk.files():
        if holds_records(file, True) or (file.named and file.path.name.lower().endswith(JSON)):
            files.append(read_records(file.path, text_field, names))
        elif isinstance(document := plain_document(file), str):
            walk.skip(document, file.name)
        elif document.digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents[document.digest] = document
    if names and not files:
        raise ValueError(f"{source}: --fields is for records, and no file has records")
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


def split_windows(example: Example, context_length: int) -> Iterator[Example]:
    """Split plain text into windows of up to `context_length` + 1 ids that overlap by one id.

    A conversation is not split.
    """
    if example.window_index is None:
        yield example
        return
    for number, start in enumerate(range(0, max(1, len(example) - 1), context_length)):
        stop = start + context_length + 1
        place = f"{example.place}, window {number + 1}" if len(example) > context_length + 1 else example.place
        window_index = number + example.window_index
        yield Example(example.ids[start:stop], example.loss_mask[start:stop], place, window_index)


def large_texts(rows: Sequence[Record], share: float) -> list[Record]:
    """Plain texts that are longer than `share` (a fraction) of the total length of all plain texts."""
    texts = [row for row in rows if row.format == "text"]
    limit = share * sum(len(row.turns[-1].text) for row in texts)
    return [row for row in texts if len(row.turns[-1].text) > limit]


def split_tails(texts: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split each text into a head and a tail; the tail has about the fraction `share` of the text's tokens.

    Short texts are not split. A head and its tail overlap by one token, from which the tail's first target is
    predicted.
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


@dataclass(frozen=True)
class Baseline:
    """The validation score of a model, its score on the forgetting data, and its answers.

    `text` is the fingerprint of the forgetting data, and `limits` are the token limits of the two scores.
    `seconds` is the time to measure forgetting and to generate the answers.
    """

    score: Score
    forgetting: Score | None
    answers: list[str]
    text: str
    limits: tuple[int, int] = (FINAL_TOKENS, FORGETTING_TOKENS)
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a baseline from a file written by `write`. Raises ValueError for a file with other content."""
        stored = json_file.read(path)
        try:
            scores = {name: read_score(stored[name]) for name in ("score", "forgetting")}
            return cls(**stored | scores | {"limits": tuple(stored["limits"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: not the baseline of a finetune: {error!r:.200}") from None

    def write(self, path: Path) -> None:
        scores = {"score": astuple(self.score), "forgetting": self.forgetting and astuple(self.forgetting)}
        write_file(path, json.dumps(asdict(self) | scores, indent=1).encode())

    def compare(self, after: "Baseline", records: Sequence[Record]) -> list[str]:
        """Lines of the final report: validation, forgetting, and answers, before and after training."""
        lines = after.score.compare(self.score)
        if self.forgetting and after.forgetting:
            before, later = self.forgetting.loss, after.forgetting.loss
            values = f"{before:.3f} before, {later:.3f} after ({later - before:+.3f})"
            lines.append(f"forgetting: loss on the base model's own text {values}")
        for texts in self._answers(after, records):
            lines += ["", *(f"{label:>8}  {_short(text)}" for label, text in texts.items())]
        return [*lines, ""]

    def table(self, after: "Baseline", records: Sequence[Record]) -> str:
        """Answers before and after training, as a Markdown table."""
        rows = ["## Validation examples, before and after", ""]
        rows += ["| prompt | expected | before | after |", "|---|---|---|---|"]
        for texts in self._answers(after, records):
            cells = [text.replace("|", "\\|").replace("\n", "<br>") for text in texts.values()]
            rows.append("| " + " | ".join(cells) + " |")
        return "\n".join([*rows, "", ""])

    def _answers(self, after: "Baseline", records: Sequence[Record]) -> Iterator[dict[str, str]]:
        """For each answered record, yields the prompt, the expected answer, and the answers before and after."""
        for record, was, now in zip(records, self.answers, after.answers, strict=False):
            last = record.turns[-1]
            calls = [chat_template.to_json(call["function"]) for call in last.fields.get("tool_calls", ())]
            expected = "\n".join(filter(None, [last.text, *calls])) if last.role == "assistant" else ""
            yield {"prompt": question(record.turns), "expected": expected, "before": was, "after": now}


def score_within(
    seconds: float, score: Callable[[int], Score | None], most: int, available: int
) -> tuple[Score | None, int]:
    """Score as many tokens as fit into `seconds`, but at most `most`; returns the score and the limit on its
    tokens."""
    start = monotonic()
    if seconds == inf or min(most, available) <= PROBED or (first := score(PROBED)) is None:
        return score(most), most
    limit = ranks.broadcast(min(most, int(PROBED * (seconds / max(1e-9, monotonic() - start) - 1))))
    return (score(limit), limit) if limit > 2 * PROBED else (first, PROBED)


def question(turns: Conversation) -> str:
    """The text of the last user turn of a conversation; empty if it has no user turn."""
    return next((turn.full_text for turn in reversed(turns) if turn.role == "user"), "")


def _short(text: str) -> str:
    """The first lines of an answer for the report; samples.md has the full text."""
    lines = [line[:LINE] for line in text.split("\n") if line.strip()]
    cut = len(lines) > LINES or len(text) > LINE * LINES
    return "\n          ".join([*lines[:LINES], *["..."] * cut])
