"""Near-duplicates among texts: equal but for white space, or with most of their lines in common.

Of each text only a sketch is kept, whatever its length: a digest of its characters without white space, and the
least hash of its lines in each of BINS bins, from which the Jaccard similarity of two sets of lines is estimated
(one permutation hashing, https://arxiv.org/abs/1208.1259).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dunes.data.document import Document, NamedText

SPLIT_VERSION = 2
"""How texts are divided into training and validation: 0 by the hash of each, 1 keeps near-duplicates together, 2
holds out a share of the text instead of the files, of each kind and size."""

LARGE = 0.2
"""A group of near-duplicates with more than this part of the texts is held out last, so that it does not replace
all others there."""

_WIDE_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]")
_SPACE, _LINE_ENDS = b" \t\v\f\x1c\x1d\x1e\x1f", bytes.maketrans(b"\r", b"\n")

BINS, EMPTY = 64, 2**32 - 1
SIMILAR = 0.7
"""Texts are near-duplicates if they share this part of their different lines: 17 of 20 each, or 83 of 100."""

FEW_LINES, SHORT_LINE = 6, 4
"""Only texts with so many different lines are compared by lines, and only lines with so many bytes count: what is
shorter, such as brackets or a package's empty file, is equal by chance."""

KEYS, COMPARED = 4, 8
"""Texts are compared if one of their KEYS least hashes is equal, each with at most COMPARED others of that hash,
so that a line in every file, as of a licence, costs no more than any other."""


def group_duplicates(texts: Iterable[Iterable[str]]) -> list[int]:
    """For each text the index of the first text of its group of near-duplicates: its own, if it is alone or first.

    Each text is given in blocks of whole lines and read once. Groups depend only on the texts and their order.
    """
    digests: dict[bytes, int] = {}
    firsts, sketches = list[int](), list[NDArray[np.uint32]]()
    for number, blocks in enumerate(texts):
        digest, sketch = _sketch(blocks)
        firsts.append(digests.setdefault(digest, number))
        sketches.append(sketch)
    for members in _candidates(sketches, firsts):
        compared: list[int] = []
        for number in members:
            other = next((c for c in compared if _is_similar(sketches[number], sketches[c])), None)
            if other is not None:
                _join(firsts, number, other)
            elif len(compared) < COMPARED:
                compared.append(number)
    return [_first(firsts, number) for number in range(len(firsts))]


def content_digest(blocks: Iterable[str]) -> bytes:
    """The digest of a text in blocks, without its white space."""
    hashed = blake2b(digest_size=16)
    for block in blocks:
        hashed.update(_without_space(block).replace(b"\n", b""))
    return hashed.digest()


def _sketch(blocks: Iterable[str]) -> tuple[bytes, NDArray[np.uint32]]:
    """The digest of a text without white space, and the least hash of its lines in each bin, EMPTY without any."""
    least, hashed = np.full(BINS, EMPTY, np.uint32), blake2b(digest_size=16)
    for block in blocks:
        data = _without_space(block)
        hashed.update(data.replace(b"\n", b""))
        hashes = _hashes({line for line in data.split(b"\n") if len(line) >= SHORT_LINE})
        np.minimum.at(least, hashes % BINS, hashes)
    return hashed.digest(), least


def _without_space(text: str) -> bytes:
    """The lines of a text without white space and byte order mark, each ended by \\n whatever ended it."""
    text = text if text.isascii() else _WIDE_SPACE.sub("", text)
    return text.encode(errors="surrogatepass").translate(_LINE_ENDS, _SPACE)


def _hashes(lines: Iterable[bytes]) -> NDArray[np.uint32]:
    """Well mixed hashes of lines: CRC-32, which is linear, and the last steps of MurmurHash3."""
    hashes = np.array([*map(crc32, lines)], np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return hashes


def _candidates(sketches: Sequence[NDArray[np.uint32]], firsts: Sequence[int]) -> Iterable[list[int]]:
    """The texts that share one of their rarest hashes, in their order; of equal digests only the first text."""
    wide = [i for i, s in enumerate(sketches) if firsts[i] == i and (s != EMPTY).sum() >= FEW_LINES]
    if not wide:
        return
    table = np.sort(np.stack([sketches[i] for i in wide]), 1).astype(np.int64)
    _, index, counts = np.unique(table, return_inverse=True, return_counts=True)
    counts = counts[index.reshape(table.shape)]
    # Hashes that few texts share come first: the lines of a licence are in all.
    rarity = np.where((counts == 1) | (table == EMPTY), len(wide) + 1, counts)
    keys = np.take_along_axis(table, np.argsort(rarity, 1, kind="stable")[:, :KEYS], 1).ravel()
    owners = np.repeat(np.array(wide), KEYS)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    stops = np.append(starts[1:], len(order))
    for start, stop in zip(*(edge[stops - starts > 1].tolist() for edge in (starts, stops)), strict=True):
        yield owners[order[start:stop]].tolist()


def _is_similar(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> bool:
    used = (a != EMPTY) | (b != EMPTY)
    return bool((used & (a == b)).sum() >= SIMILAR * used.sum())


def _first(firsts: list[int], number: int) -> int:
    while firsts[number] != number:
        firsts[number] = firsts[firsts[number]]
        number = firsts[number]
    return number


def _join(firsts: list[int], a: int, b: int) -> None:
    low, high = sorted((_first(firsts, a), _first(firsts, b)))
    firsts[high] = low


def document_texts(documents: Iterable[Document]) -> Iterator[NamedText]:
    """The texts of documents with their names, without byte order marks."""
    for document in documents:
        for text in document.texts():
            yield document.name, "".join(text).removeprefix("\ufeff")


def text_digests(texts: Iterable[NamedText]) -> set[bytes]:
    """The digests of texts, whatever their white space."""
    return {content_digest([text]) for _, text in texts}
