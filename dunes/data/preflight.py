"""Check finetuning examples for faults before the first step.

Training with such faults raises no error and shows a plausible loss, but the model does not follow the examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dunes.data.examples import Example
from dunes.text.templates import Template
from dunes.text.tokenizer import Tokenizer
from dunes.units import plural

QUANTILES = (0.5, 0.9, 0.99, 1.0)
FEW = 0.05
"""Fraction of trained tokens below which the template or the data is probably wrong."""


@dataclass(frozen=True)
class DataReport:
    """Counts of training examples. `validation` is the number of validation examples. `val_trained` counts their
    targets within the context length.

    `windows` counts windows of plain text; other examples are conversations. `tokens` counts an id shared by two
    windows once. `trained` counts targets within the context length, and `lost` counts targets beyond it.
    `lengths` are QUANTILES of the examples' lengths in ids before truncation. `leaked` counts validation examples
    that are also training examples, or preferences whose prompt is in the training data. `with_stop` counts
    conversations with a stop token as target. `without_target` and, for validation, `val_without_target` count
    examples for which `Example.targets` is 0. `double_bos` counts training and validation examples that start with
    two BOS tokens. `max_id` is the largest id of all examples. A preference is one example (`noun` is "pair") with
    the tokens and targets of both sides, and the length of the longer side.
    """

    examples: int
    windows: int
    validation: int
    tokens: int
    trained: int
    lost: int
    lengths: tuple[int, ...]
    context_length: int
    truncated: int
    duplicates: int
    leaked: int
    with_stop: int
    without_target: int
    double_bos: int
    distinct_ids: int
    max_id: int
    vocab: int
    val_trained: int
    val_without_target: int
    noun: str = "example"

    @property
    def truncated_share(self) -> float:
        """Truncated examples as a share of all examples."""
        return self.truncated / max(self.examples, 1)

    @property
    def trained_share(self) -> float:
        """Targets of the loss as a share of all tokens."""
        return self.trained / max(self.tokens, 1)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lengths = ", ".join(f"{q:.0%} {n}" for q, n in zip(QUANTILES, self.lengths, strict=True))
        windows = f" ({self.windows} of them windows of plain text)" if self.windows else ""
        return [
            f"{plural(self.examples, self.noun)}{windows}, {self.validation} for validation; "
            f"{plural(self.duplicates, 'duplicate')}, {self._leaks}",
            f"{plural(self.tokens, 'token')}, {self.trained} of them targets ({self.trained_share:.1%}); "
            f"{plural(self.without_target, self.noun)} without targets; {self.val_trained} for validation",
            f"length in tokens: {lengths}; truncated at {self.context_length}: {self.truncated_share:.1%} of the "
            f"{self.noun}s, {plural(self.lost, 'target')} lost",
            f"{self.distinct_ids} of {self.vocab} vocabulary ids used; "
            f"{plural(self.with_stop, f'{self.noun} ends', f'{self.noun}s end')} an answer",
        ]

    def warnings(self) -> list[str]:
        """Descriptions of problems that are not errors but should be checked."""
        targets, skipped = f"{self.trained_share:.1%}", "skipped: no targets in the context"
        skipped += ", or equal sides" if self.noun == "pair" else ""
        problems = (
            (self.trained_share < FEW, f"only {targets} of the tokens are targets; check a few examples"),
            (self.leaked, f"{self._leaks}; the validation loss is too low"),
            (self.without_target, f"{_are(self.without_target, self.noun)} {skipped}"),
            (self.val_without_target, f"{_are(self.val_without_target, f'validation {self.noun}')} {skipped}"),
            (self.truncated, f"{_are(self.truncated, self.noun)} truncated, {plural(self.lost, 'target')} lost"),
        )
        return [text for applies, text in problems if applies]

    @property
    def _leaks(self) -> str:
        if self.noun == "pair":
            pairs = plural(self.leaked, "validation pair repeats", "validation pairs repeat")
            return f"{pairs} a training prompt"
        return f"{_are(self.leaked, 'validation example')} in the training data"


def _are(count: int, noun: str) -> str:
    return plural(count, f"{noun} is", f"{noun}s are")


def data_report(
    examples: Sequence[Example],
    validation: Sequence[Example],
    context_length: int,
    vocab: int,
    template: Template,
    tokenizer: Tokenizer,
) -> DataReport:
    """The report on these examples, for rows of `context_length` tokens and a model with `vocab` ids."""
    lengths = np.array([len(e) for e in examples], np.int64)
    sides, targets = [side for e in examples for side in e.sides], [e.targets(context_length) for e in examples]
    val_targets = [e.targets(context_length) for e in validation]
    seen = {e.seen or _content(e) for e in examples}
    all_sides = [side for e in (*examples, *validation) for side in e.sides]
    stops = np.array(sorted({template.stop_id(tokenizer), *tokenizer.stops}))
    conversations = [e for e in examples if e.window_index is None]
    within = slice(1, context_length + 1)
    ends = [all(np.isin(s.ids[within][s.loss_mask[within]], stops).any() for s in e.sides) for e in conversations]
    return DataReport(
        examples=len(examples),
        windows=len(examples) - len(conversations),
        validation=len(validation),
        tokens=sum(len(side.ids) for side in sides) - sum(bool(e.window_index) for e in examples),
        trained=sum(int(side.loss_mask[within].sum()) for side in sides),
        lost=sum(int(side.loss_mask[context_length + 1 :].sum()) for side in sides),
        lengths=tuple(map(int, np.quantile(lengths if len(lengths) else 0, QUANTILES, method="inverted_cdf"))),
        context_length=context_length,
        truncated=int((lengths > context_length + 1).sum()),
        duplicates=len(examples) - len({*map(_content, examples)}),
        leaked=sum((e.seen or _content(e)) in seen for e in validation),
        with_stop=sum(ends),
        without_target=targets.count(0),
        double_bos=sum(_double_bos(side, tokenizer.document_start) for side in all_sides),
        distinct_ids=len(np.unique(np.concatenate([side.ids for side in sides]))) if examples else 0,
        max_id=max((int(side.ids.max()) for side in all_sides if len(side)), default=-1),
        vocab=vocab,
        val_trained=sum(val_targets),
        val_without_target=val_targets.count(0),
        noun="pair" if len(sides) > len(examples) else "example",
    )


def _content(example: Example) -> bytes:
    return b"|".join(side.ids.tobytes() for side in example.sides)


def _double_bos(example: Example, begin: Sequence[int]) -> bool:
    """True if the example starts with two BOS tokens, and has further tokens."""
    n = len(begin)
    return 0 < 2 * n < len(example) and example.ids[: 2 * n].tolist() == [*begin, *begin]


def check_report(report: DataReport, limit: float = 0.05) -> None:
    """Raise ValueError for unusable examples; `limit` is the maximum fraction of truncated examples."""
    if report.max_id >= report.vocab:
        raise ValueError(
            f"the examples contain the id {report.max_id}, and the model has {report.vocab} embeddings; "
            "use the model's own tokenizer"
        )
    if report.double_bos:
        raise ValueError(
            f"{plural(report.double_bos, 'example begins', 'examples begin')} with the BOS token twice; "
            "both the chat template and the tokenizer add it"
        )
    # Checked before missing targets, since truncation may have removed them.
    if report.truncated_share > limit:
        raise ValueError(
            f"{report.truncated_share:.1%} of the examples are longer than the context of {report.context_length} "
            f"and would lose {plural(report.lost, 'target')}; at most {limit:.1%} may be truncated. Half of the "
            f"examples have up to {plural(report.lengths[0], 'token')}, 99% up to {report.lengths[2]}: "
            "choose a longer context length, or allow more truncation"
        )
    if not report.trained:
        reason = f"answers begin beyond --context-length {report.context_length}" if report.lost else "no answers"
        raise ValueError(f"none of {plural(report.tokens, 'token')} is a target: {reason}")
    if report.validation and not report.val_trained:
        raise ValueError(
            f"none of {plural(report.validation, 'validation example')} has a target within the context of "
            f"{plural(report.context_length, 'token')}: their answers begin later or are excluded from the loss; "
            "choose a longer context length, or other examples with --val-data"
        )
    if report.windows < report.examples and not report.with_stop:
        raise ValueError(
            "the token that ends an answer is never a target, so that the model would never stop; "
            "choose another template, or a longer context length"
        )
