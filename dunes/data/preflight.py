"""What is known of examples before the first step, and the faults for which no step is taken.

Each of them trains without a complaint, to a loss that looks well, and gives a model that does not do what the
examples show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dunes.data.examples import Example
from dunes.plural import plural
from dunes.text.templates import Template
from dunes.text.tokenizer import Tokenizer

QUANTILES = (0.5, 0.9, 0.99, 1.0)
FEW = 0.05
"""Below this share of trained tokens something is probably wrong with the template or the data."""


@dataclass(frozen=True)
class DataReport:
    """Counts of examples to learn from, except where `validation` is named.

    `texts` are windows of plain text, the others conversations. `tokens` counts what windows share once, `trained`
    are the targets that remain within the context and `lost` those beyond it, `lengths` the QUANTILES in ids
    before anything is cut, `ended` the conversations in which a token that ends an answer is a target, `blank` the
    examples without any target, `doubled` those that begin twice, validation's included, `used` the different ids,
    and `highest` the highest of them all.
    """

    examples: int
    texts: int
    validation: int
    tokens: int
    trained: int
    lost: int
    lengths: tuple[int, ...]
    context: int
    truncated: int
    duplicates: int
    shared: int
    ended: int
    blank: int
    doubled: int
    used: int
    highest: int
    vocab: int

    @property
    def share_truncated(self) -> float:
        return self.truncated / max(self.examples, 1)

    @property
    def share_trained(self) -> float:
        return self.trained / max(self.tokens, 1)

    def lines(self) -> list[str]:
        """The report for a person, a line for each subject."""
        lengths = ", ".join(f"{q:.0%} {n}" for q, n in zip(QUANTILES, self.lengths, strict=True))
        windows = f" ({self.texts} of them windows of plain text)" if self.texts else ""
        return [
            f"{plural(self.examples, 'example')}{windows}, {self.validation} for validation; "
            f"{plural(self.duplicates, 'is a copy of another', 'are copies of others')}, "
            f"{plural(self.shared, 'of those for validation is', 'of those for validation are')} also learnt from",
            f"{plural(self.tokens, 'token')}, {self.trained} of them trained on ({self.share_trained:.1%}); "
            f"{plural(self.blank, 'example')} with nothing to train on",
            f"length in tokens: {lengths}; cut at {self.context}: {self.share_truncated:.1%} of the examples, "
            f"{plural(self.lost, 'trained token')} lost",
            f"{self.used} of {self.vocab} different tokens are met; "
            f"{plural(self.ended, 'example ends', 'examples end')} an answer",
        ]

    def warnings(self) -> list[str]:
        """What is no error, and should be looked at."""
        found = []
        if self.share_trained < FEW:
            found.append(f"only {self.share_trained:.1%} of the tokens are trained on; look at a few examples")
        if self.shared:
            found.append(
                f"{plural(self.shared, 'validation example is', 'validation examples are')} also learnt from; "
                "the loss on them says little"
            )
        if self.blank:
            found.append(
                f"{plural(self.blank, 'example is', 'examples are')} left out, with nothing to train on "
                "within the context"
            )
        if self.truncated:
            found.append(
                f"{plural(self.truncated, 'example is', 'examples are')} cut at the end, "
                f"where {plural(self.lost, 'trained token is', 'trained tokens are')} lost"
            )
        return found


def data_report(
    examples: Sequence[Example],
    validation: Sequence[Example],
    context: int,
    vocab: int,
    template: Template,
    tokenizer: Tokenizer,
) -> DataReport:
    """What is known of the examples in rows of `context` tokens, for a model of `vocab` ids."""
    lengths = np.array([len(e) for e in examples], np.int64)
    kept = [e.loss_mask[1 : context + 1] for e in examples]
    learnt = [e.ids.tobytes() for e in examples]
    distinct = set(learnt)
    every = [*examples, *validation]
    stops = np.array(sorted({template.stop_id(tokenizer), *tokenizer.stops}))
    spoken = [(e, k) for e, k in zip(examples, kept, strict=True) if e.window_index is None]
    ends = [bool(np.isin(e.ids[1 : context + 1][k], stops).any()) for e, k in spoken]
    return DataReport(
        examples=len(examples),
        texts=len(examples) - len(spoken),
        validation=len(validation),
        tokens=int(lengths.sum()) - sum(bool(e.window_index) for e in examples),
        trained=sum(int(k.sum()) for k in kept),
        lost=sum(int(e.loss_mask[context + 1 :].sum()) for e in examples),
        lengths=_quantiles(lengths),
        context=context,
        truncated=int((lengths > context + 1).sum()),
        duplicates=len(learnt) - len(distinct),
        shared=sum(e.ids.tobytes() in distinct for e in validation),
        ended=sum(ends),
        blank=sum(not k.any() for k in kept),
        doubled=sum(_doubled(e, tokenizer.document_start) for e in every),
        used=len(np.unique(np.concatenate([e.ids for e in examples]))) if examples else 0,
        highest=max((int(e.ids.max()) for e in every if len(e)), default=-1),
        vocab=vocab,
    )


def _quantiles(lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> tuple[int, ...]:
    if not len(lengths):
        return (0,) * len(QUANTILES)
    return tuple(int(n) for n in np.quantile(lengths, QUANTILES, method="inverted_cdf"))


def _doubled(example: Example, begin: Sequence[int]) -> bool:
    """Whether the example begins twice. Nothing asked and nothing answered is a beginning and an end."""
    n = len(begin)
    return 0 < 2 * n < len(example) and example.ids[: 2 * n].tolist() == [*begin, *begin]


def check_report(found: DataReport, limit: float = 0.05) -> None:
    """Raises ValueError for what cannot be meant; `limit` is the share of examples that may be cut."""
    if not found.examples:
        raise ValueError("there are no examples to learn from")
    if found.highest >= found.vocab:
        raise ValueError(
            f"the examples hold the id {found.highest}, and the model has {found.vocab}; "
            "the tokenizer is another model's, or the model has to be made larger"
        )
    if found.doubled:
        raise ValueError(
            f"{plural(found.doubled, 'example begins', 'examples begin')} with the token of the beginning twice; "
            "the chat template writes it and the tokenizer adds it"
        )
    # Before the rest: what is cut may be why nothing is left to train on.
    if found.share_truncated > limit:
        raise ValueError(
            f"{found.share_truncated:.1%} of the examples are longer than the context of {found.context} and "
            f"would lose {plural(found.lost, 'trained token')}, allowed are {limit:.1%}; half of the "
            f"examples have up to {plural(found.lengths[0], 'token')}, 99 % up to {found.lengths[2]}: "
            "choose a longer context, or allow more"
        )
    if not found.trained:
        raise ValueError(f"none of {plural(found.tokens, 'token')} is trained on: the examples have no answers")
    if found.texts < found.examples and not found.ended:
        raise ValueError(
            "the token that ends an answer is never trained on, so that the model would never stop; "
            "choose another template, or a longer context"
        )
