"""Plain text to finetune on: windows of the context's length, and what of it is held out."""

from collections.abc import Iterator, Sequence

from dunes.data.examples import Example, Record

LEAST_TAIL = 16
"""Tokens at the end of a text that are worth measuring on."""


def split_windows(example: Example, context: int) -> Iterator[Example]:
    """The text in windows of up to `context` + 1 ids that share their ends: all but the first are targets once."""
    for number, start in enumerate(range(0, max(1, len(example) - 1), context)):
        stop = start + context + 1
        place = f"{example.place}, window {number + 1}" if len(example) > context + 1 else example.place
        yield Example(
            example.ids[start:stop], example.loss_mask[start:stop], place, number + (example.window_index or 0)
        )


def large_texts(rows: Sequence[Record], share: float) -> list[Record]:
    """The plain texts of which each is more than the share of all of them."""
    texts = [row for row in rows if row.format == "text"]
    limit = share * sum(len(row.turns[-1].text) for row in texts)
    return [row for row in texts if len(row.turns[-1].text) > limit]


def split_tails(texts: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """The texts without their last tokens, about `share` of them, and these; short texts are only learned from.

    A tail begins with the last token that is learned, as what the first one to predict is predicted from.
    """
    learn, held = [], []
    for text in texts:
        cut = len(text) - round((len(text) - 1) * share)
        if len(text) - cut < LEAST_TAIL:
            learn.append(text)
            continue
        learn.append(Example(text.ids[:cut], text.loss_mask[:cut], text.place, 0))
        held.append(Example(text.ids[cut - 1 :], text.loss_mask[cut - 1 :], f"{text.place}, its end", 1))
    return learn, held
