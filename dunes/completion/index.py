"""Files indexed for copying from them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from dunes.completion.text import FileTokenizer
from dunes.data import Document
from dunes.generate.context_index import ContextIndex
from dunes.generate.copying import DEPTH_BYTES, Far, TextSource

MOST = 12_000_000
"""Maximum bytes of text in an index; more take longer than ten seconds to sort."""
PARTS = 4
"""Size of three LRU caches: filtered indexes, sources at cursors, and indexed files of single requests."""
SHORT = 4_000
"""Minimum bytes of a text that is split into parts."""


@dataclass(frozen=True)
class IndexedFile:
    """A file in an index: its path in its source, and the offsets of its first id and first byte."""

    name: str
    start: int
    first_byte: int


@dataclass(frozen=True, eq=False)
class TextIndex:
    """Files as ids and as bytes, each with an index of its contexts; the last results of `without` are cached."""

    files: Sequence[IndexedFile]
    ids: ContextIndex
    text: bytes
    contexts: ContextIndex

    def without(self, names: Collection[str]) -> Far:
        """The sources to copy from, without the files of these names; records have no names."""
        return self._part(frozenset(file.name for file in self.files if file.name and file.name in names))

    @cached_property
    def _part(self) -> Callable[[frozenset[str]], Far]:
        return lru_cache(PARTS)(self._find_part)

    def _find_part(self, hidden: frozenset[str]) -> Far:
        if not hidden:
            return Far([self.ids], [TextSource(self.text, self.contexts)])
        ends = [*self.files, IndexedFile("", len(self.ids), len(self.text))]
        places = [(a, b) for a, b in pairwise(ends) if a.name in hidden]
        ids = self.ids.without([(a.start, b.start) for a, b in places])
        contexts = self.contexts.without([(a.first_byte, b.first_byte) for a, b in places])
        return Far([ids], [TextSource(self.text, contexts)])

    def texts(self) -> list[tuple[str, str]]:
        """The name and the text of each file."""
        bounds = pairwise([*(file.first_byte for file in self.files), len(self.text)])
        parts = (self.text[a : b - 1].decode() for a, b in bounds)
        return [(file.name, text) for file, text in zip(self.files, parts, strict=True)]


def first_documents(documents: Sequence[Document], most: int = MOST) -> Sequence[Document]:
    """The first documents with at most `most` bytes in total, at least one document."""
    sizes = np.cumsum([document.size for document in documents])
    return documents[: max(1, int(np.searchsorted(sizes, most, "right")))]


def named_texts(documents: Sequence[Document], first: float = 0, last: float = 1) -> list[tuple[str, str]]:
    """The path within its source and the text of each document, without byte order marks.

    With `first` and `last`, only the part of each text between these fractions of its bytes. At most `MOST` bytes
    in total; texts too short to split are left empty.
    """
    return [(d.header.rstrip("\n"), _part(d, first, last).removeprefix("\ufeff")) for d in documents]


def _part(document: Document, first: float, last: float) -> str:
    parts, room = list[str](), MOST
    sizes = [sum(len(block.encode()) for block in text) for text in document.texts()]
    for size, text in zip(sizes, document.texts(), strict=True):
        start, stop = int(first * size), int(last * size)
        stop = 0 if (first, last) != (0, 1) and size < SHORT else min(stop, start + room)
        parts.append(b"".join(_byte_range(text, start, stop)).decode(errors="ignore"))
        room -= max(0, stop - start)
    return "\n".join(filter(None, parts))


def _byte_range(text: Iterable[str], start: int, stop: int) -> Iterator[bytes]:
    """The bytes of a text from `start` to `stop`, without storing more."""
    offset = 0
    for block in text:
        data = block.encode()
        yield data[max(0, start - offset) : max(0, stop - offset)]
        offset += len(data)


def index_texts(texts: Sequence[tuple[str, str]], files: FileTokenizer) -> TextIndex:
    """The index of files, given as (path, text)."""
    indexed, ids, data = list[IndexedFile](), list[int](), bytearray()
    for name, text in texts:
        indexed.append(IndexedFile(name, len(ids), len(data)))
        ids += [*files.tokenize(text, name).ids, files.end]
        data += text.encode() + b"\0"
    dtype = np.uint16 if len(files.pieces) <= 1 << 16 else np.uint32
    contexts = ContextIndex(np.frombuffer(bytes(data), np.uint8), depth=DEPTH_BYTES)
    return TextIndex(indexed, ContextIndex(np.array(ids, dtype)), bytes(data), contexts)
