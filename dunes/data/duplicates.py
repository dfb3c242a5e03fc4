"""Group near-duplicate texts, which are equal except for white space or have most of their lines in common.

Each text is reduced to a sketch of constant size: a digest of its characters without white space, and the minimum
line hash in each of BINS bins. The minima of two sketches give an estimate of the Jaccard similarity of the
two sets of lines (one permutation hashing, https://arxiv.org/abs/1208.1259).
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

LARGE = 0.2
"""A group of near-duplicates with more than this fraction of texts or bytes is selected for validation last."""

_WIDE_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]")
_SPACE, _LINE_ENDS = b" \t\v\f\x1c\x1d\x1e\x1f", bytes.maketrans(b"\r", b"\n")

BINS = 64
"""Number of bins in a sketch."""
EMPTY = 2**32 - 1
"""Value of a bin without lines."""
SIMILAR = 0.7
"""Minimum Jaccard similarity of near-duplicates; with 20 lines each, 17 of them equal, it is 17 / 23 = 0.74."""

FEW_LINES = 6
"""Minimum number of nonempty bins for a comparison by lines; shorter texts may have equal lines by chance."""
SHORT_LINE = 4
"""Minimum length in bytes of a compared line; shorter lines, such as brackets, may be equal by chance."""

KEYS = 4
"""Number of rarest hashes per text; two texts are compared only if they share one of them."""
COMPARED = 8
"""Maximum number of comparisons per text and hash, since some lines (of a licence) are in every file."""


def group_duplicates(texts: Iterable[Iterable[str]]) -> list[int]:
    """For each text, the index of the first text in its group of near-duplicates (its own index if it is alone).

    Each text is given in blocks of complete lines and read once. Groups depend only on the texts and their order.
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
            similar = next((c for c in compared if _is_similar(sketches[number], sketches[c])), None)
            if similar is not None:
                _join(firsts, number, similar)
            elif len(compared) < COMPARED:
                compared.append(number)
    return [_first(firsts, number) for number in range(len(firsts))]


def content_digest(blocks: Iterable[str]) -> bytes:
    """Digest of a text without its white space; the text is given in blocks."""
    hasher = blake2b(digest_size=16)
    for block in blocks:
        hasher.update(_without_space(block).replace(b"\n", b""))
    return hasher.digest()


def _sketch(blocks: Iterable[str]) -> tuple[bytes, NDArray[np.uint32]]:
    """Digest of a text without white space, and the minimum line hash (or EMPTY) in each bin (BINS,)."""
    least, hasher = np.full(BINS, EMPTY, np.uint32), blake2b(digest_size=16)
    for block in blocks:
        data = _without_space(block)
        hasher.update(data.replace(b"\n", b""))
        hashes = _hashes({line for line in data.split(b"\n") if len(line) >= SHORT_LINE})
        np.minimum.at(least, hashes % BINS, hashes)
    return hasher.digest(), least


def _without_space(text: str) -> bytes:
    """The bytes of a text without white space and byte order mark; all line ends become \\n."""
    text = text if text.isascii() else _WIDE_SPACE.sub("", text)
    return text.encode(errors="surrogatepass").translate(_LINE_ENDS, _SPACE)


def _hashes(lines: Iterable[bytes]) -> NDArray[np.uint32]:
    """Hashes of lines: CRC-32, which is linear, with its bits mixed by the finalizer of MurmurHash3."""
    hashes = np.array([*map(crc32, lines)], np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return hashes


def _candidates(sketches: Sequence[NDArray[np.uint32]], firsts: Sequence[int]) -> Iterable[list[int]]:
    """Yield groups of texts that share one of their rarest hashes; texts with equal digests count as one."""
    wide = [i for i, s in enumerate(sketches) if firsts[i] == i and (s != EMPTY).sum() >= FEW_LINES]
    if not wide:
        return
    table = np.sort(np.stack([sketches[i] for i in wide]), 1).astype(np.int64)
    _, index, counts = np.unique(table, return_inverse=True, return_counts=True)
    counts = counts[index.reshape(table.shape)]
    # Rare hashes come first, since the lines of a licence are in many texts.
    rarity = np.where((counts == 1) | (table == EMPTY), len(wide) + 1, counts)
    keys = np.take_along_axis(table, np.argsort(rarity, 1, kind="stable")[:, :KEYS], 1).ravel()
    owners = np.repeat(np.array(wide), KEYS)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    stops = np.append(starts[1:], len(order))
    for start, stop in zip(*(edge[stops - starts > 1].tolist() for edge in (starts, stops)), strict=True):
        yield owners[order[start:stop]].tolist()


def _is_similar(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> bool:
    occupied = (a != EMPTY) | (b != EMPTY)
    return bool((occupied & (a == b)).sum() >= SIMILAR * occupied.sum())


def _first(firsts: list[int], number: int) -> int:
    while firsts[number] != number:
        firsts[number] = firsts[firsts[number]]
        number = firsts[number]
    return number


def _join(firsts: list[int], a: int, b: int) -> None:
    low, high = sorted((_first(firsts, a), _first(firsts, b)))
    firsts[high] = low
