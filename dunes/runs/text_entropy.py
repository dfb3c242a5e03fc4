"""The factor of a text in the estimated loss of a run, from the text's entropy under a model of byte n-grams.

The n-gram model is interpolated with Witten-Bell smoothing (https://arxiv.org/abs/cmp-lg/9606011, section 2.5).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dunes.data import Corpus, Document
from dunes.data.document import RecordDocument
from dunes.runs.train_config import TrainConfig

# Fitted to nine texts (docs/log/training.md, "What a dry run says to expect").
PLAIN, COMPLETING = 0.955, 1.09
"""Factors of a text with REFERENCE bits/byte, without and with --complete."""
REFERENCE = 2.0
"""About the bits/byte of source code under the n-gram model."""
POWER = 1.03
"""Exponent of a text's bits/byte, relative to REFERENCE, in its factor."""
SPREAD = 0.15
"""Relative half-width of the interval of an estimated loss, which contains 95 % of texts."""

ORDER = 6
"""Maximum number of context bytes; context and byte fit into 64 bits."""
COUNTED = 4_000_000
"""Maximum bytes of training text in which n-grams are counted."""
SCORED = 200_000
"""Maximum bytes of validation text whose n-grams are scored."""
PIECES = 50
"""A sample of a larger text consists of small files, and of pieces of 1/PIECES of the sample."""


def text_factor(corpus: Corpus, config: TrainConfig) -> float:
    """Factor of the estimated loss for the text of a corpus, and for a run that completes lines or not."""
    share = corpus.share if corpus.split == "tails" else 0.0
    train = [(d, 0, d.size - round(share * d.size)) for d in corpus.train]
    valid = [(d, end, d.size) for d, _, end in train] + [(d, 0, d.size) for d in corpus.valid]
    bits = ngram_bits(_sample(train, COUNTED), _sample(valid, SCORED))
    return float((COMPLETING if config.complete else PLAIN) * (bits / REFERENCE) ** POWER)


def ngram_bits(train: bytes, valid: bytes) -> float:
    """Bits/byte of validation text under the n-gram model of the training text."""
    return float(-np.log2(ngram_probabilities(train, valid)).sum() / max(1, len(valid)))


def ngram_probabilities(train: bytes, valid: bytes) -> NDArray[np.float64]:
    """Probability of each byte of the validation text, given up to ORDER bytes before it.

    With counts c of the training text, and T distinct bytes after a context, the probability is
    (c(context, byte) + T p) / (c(context) + T), where p is the probability after the context without its first
    byte. After an unseen context, the probability is p. Without any context, p is 1/256.
    """
    texts = [np.frombuffer(text, np.uint8).astype(np.uint64) for text in (train, valid)]
    grams: list[NDArray[Any]] = [np.zeros(len(text) + 1, np.uint64) for text in texts]
    probabilities = np.full(len(valid), 1 / 256)
    for order in range(min(ORDER + 1, len(train), len(valid))):
        grams = [text[: len(g) - 1] << 8 * order | g[1:] for text, g in zip(texts, grams, strict=True)]
        probabilities[order:] = _interpolate(grams[0], grams[1], probabilities[order:])
    return probabilities


def _interpolate(counted: NDArray[Any], scored: NDArray[Any], shorter: NDArray[Any]) -> Any:
    """Probabilities of the n-grams `scored`; `shorter` are those after the contexts without their first bytes."""
    grams, counts = np.unique(counted, return_counts=True)
    contexts, starts, distinct = np.unique(grams >> 8, return_index=True, return_counts=True)
    total = _look_up(contexts, np.add.reduceat(counts, starts), scored >> 8, 0)
    share = _look_up(contexts, distinct, scored >> 8, 1)  # 1 keeps `shorter` after an unseen context
    return (_look_up(grams, counts, scored, 0) + share * shorter) / (total + share)


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
