"""Plain text for finetuning: windows of the context length, and tails for validation."""

from collections.abc import Iterator, Sequence

from dunes.data.examples import Example, Record

LEAST_TAIL = 16
"""The minimum length of a tail in tokens."""


def split_windows(example: Example, context_length: int) -> Iterator[Example]:
    """Windows of up to `context_length` + 1 ids that overlap by one, so that no id is a target twice."""
    for number, start in enumerate(range(0, max(1, len(example) - 1), context_length)):
        stop = start + context_length + 1
        place = f"{example.place}, window {number + 1}" if len(example) > context_length + 1 else example.place
        yield Example(
            example.ids[start:stop], example.loss_mask[start:stop], place, number + (example.window_index or 0)
        )


def large_texts(rows: Sequence[Record], share: float) -> list[Record]:
    """The plain texts that are each longer than this share of their total length."""
    texts = [row for row in rows if row.format == "text"]
    limit = share * sum(len(row.turns[-1].text) for row in texts)
    return [row for row in texts if len(row.turns[-1].text) > limit]


def split_tails(texts: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """The texts without their tails, about `share` of their tokens, and the tails; short texts have no tail.

    A tail begins with the last training token, which predicts its first target.
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
