"""The factor of a text in the estimated loss of a run, from the text's entropy under a model of byte n-grams.

The n-gram model has interpolated Kneser-Ney smoothing (https://doi.org/10.1109/ICASSP.1995.479394).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dunes.data import Corpus, Document
from dunes.data.document import RecordDocument
from dunes.runs.autosize import expected_bits, unique_tokens
from dunes.runs.train_config import TrainConfig

# Fitted to runs on other projects (docs/log/training.md, "The estimate of a dry run, again").
PLAIN, COMPLETING = 0.82, 0.85
"""Loss of the REFERENCE run on a text with 1 bit/byte under the n-gram model, without and with --complete."""
REFERENCE = 600_000, 2_700_000
"""Parameters and training tokens of the run whose loss follows from the text's n-grams alone."""
POWER = 1.18
"""Exponent of the text's bits/byte under the n-gram model in the loss of the REFERENCE run."""
SPREAD = 0.1
"""Relative half-width of the interval of an estimated loss, which contains 95 % of texts."""

ORDER = 7
"""Maximum number of context bytes; context and byte fit into 64 bits."""
COUNTED = 4_000_000
"""Maximum bytes of training text in which n-grams are counted."""
SCORED = 200_000
"""Maximum bytes of validation text whose n-grams are scored."""
PIECES = 50
"""A sample of a larger text consists of small files, and of pieces of 1/PIECES of the sample."""


def text_factor(corpus: Corpus, config: TrainConfig) -> float:
    """Factor of `expected_bits` for the text of a corpus, and for a run that completes lines or not.

    With this factor, the REFERENCE run has the loss that follows from the text's n-grams. They reflect how much
    text there is, so that the formula's loss of that run, which does, too, is divided out.
    """
    share = corpus.share if corpus.split == "tails" else 0.0
    train = [(d, 0, d.size - round(share * d.size)) for d in corpus.train]
    valid = [(d, end, d.size) for d, _, end in train] + [(d, 0, d.size) for d in corpus.valid]
    bits = ngram_bits(_sample(train, COUNTED), _sample(valid, SCORED))
    expected = expected_bits(*REFERENCE, unique_tokens(config, sum(d.size for d in corpus.train)))
    return float((COMPLETING if config.complete else PLAIN) * bits**POWER / expected)


def ngram_bits(train: bytes, valid: bytes) -> float:
    """Bits/byte of validation text under the n-gram model of the training text."""
    return float(-np.log2(ngram_probabilities(train, valid)).sum() / max(1, len(valid)))


def ngram_probabilities(train: bytes, valid: bytes) -> NDArray[np.float64]:
    """Probability of each byte of the validation text, given up to ORDER bytes before it.

    A byte after a context of ORDER bytes counts c times if it occurs c times in the training text; after a shorter
    context, if it does so after c distinct bytes. The probability is (max(c - D, 0) + D T p) / C, where D is the
    discount, T the number of distinct bytes after the context, C the sum of their counts, and p the probability
    after the context without its first byte. After an unseen context, the probability is p. Without any context,
    p is 1/256.
    """
    grams: list[NDArray[Any]] = [np.frombuffer(text, np.uint8).astype(np.uint64) for text in (train, valid)]
    probabilities = np.full(len(valid), 1 / 256)
    last = min(ORDER, len(train) - 1, len(valid) - 1)
    for order in range(last):
        longer = [g[:-1] << 8 | g[1:] & 255 for g in grams]
        preceded = np.unique(longer[0]) & (256 ** (order + 1) - 1)  # once for each distinct byte before
        probabilities[order:] = _interpolate(preceded, grams[1], probabilities[order:])
        grams = longer
    if last >= 0:
        probabilities[last:] = _interpolate(grams[0], grams[1], probabilities[last:])
    return probabilities


def _interpolate(counted: NDArray[Any], scored: NDArray[Any], shorter: NDArray[Any]) -> Any:
    """Probabilities of the n-grams `scored`; `shorter` are those after the contexts without their first bytes."""
    grams, counts = np.unique(counted, return_counts=True)
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = (once + 1) / (once + 2 * twice + 2)
    contexts, starts, distinct = np.unique(grams >> 8, return_index=True, return_counts=True)
    total = _look_up(contexts, np.add.reduceat(counts, starts), scored >> 8, 0)
    share = _look_up(contexts, discount * distinct, scored >> 8, 1)  # 1 keeps `shorter` after an unseen context
    return ((_look_up(grams, counts, scored, 0) - discount).clip(0) + share * shorter) / total.clip(1)


def _look_up(keys: NDArray[Any], values: NDArray[Any], wanted: NDArray[Any], absent: int) -> NDArray[Any]:
    """The values of the wanted keys, or `absent`; `keys` are sorted."""
    places = np.searchsorted(keys[:-1], wanted)
    return np.where(keys[places] == wanted, values[places], absent)


def _sample(parts: list[tuple[Document, int, int]], limit: int) -> bytes:
    """The text of the parts (document, first byte, end), or about `limit` bytes of it.

    The sample consists of pieces that are spread evenly over the parts, except that files of records are read from
    the beginning of their part.
    """
    piece = limit // PIECES
    steps = [(d, start, end, d.size if isinstance(d, RecordDocument) else piece) for d, start, end in parts]
    blocks = [(d, at, min(at + step, end)) for d, start, end, step in steps for at in range(start, end, step)]
    share = min(1.0, limit / max(1, sum(end - start for _, start, end in blocks)))
    sample, seen = bytearray(), 0
    for document, start, end in blocks:
        seen += end - start
        missing = round(share * seen) - len(sample)
        if missing >= min(end - start, piece):
            sample += _read(document, start, min(end, start + missing))
    return bytes(sample)


def _read(document: Document, start: int, end: int) -> bytes:
    """The bytes `start` to `end` of a document's text."""
    if not isinstance(document, RecordDocument):
        with document.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
    text = bytearray()
    for record in document.text():
        text += record.encode()
        if len(text) >= end:
            break
    return bytes(text[start:end])
