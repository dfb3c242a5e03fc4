"""An index of files to copy from, in memory and in RUN/completion.

`index.safetensors` contains the ids and the bytes of the training files, each with the sorted order of its
contexts; `files.json` contains the files' names and offsets. Both files are written to RUN/completion in the first
seconds of a run, and written again at the end of the run, then including the validation text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dunes.completion.text import FileTokenizer
from dunes.context import prefix_errors
from dunes.data import Document
from dunes.files import json_file
from dunes.files.atomic import write_file
from dunes.files.model_file import find_file
from dunes.generate.context_index import DEPTH, ContextIndex
from dunes.generate.copying import DEPTH_BYTES, TextSource, index_ids, longest_match
from dunes.ops.kernels import one_line
from dunes.progress import advance, each
from dunes.text.lines import valid_text

FOLDER, FORMAT = "completion", 1
REMEDY = "remove this folder to complete without it, or train again"

MOST = 12_000_000
"""Maximum bytes of text in an index; sorting the contexts of more text takes longer than ten seconds."""
SHORT = 4_000
"""Minimum size, in bytes, of a text from which `named_texts` takes a part."""
COPIED = 16
"""Minimum number of bytes of a match of which `find_copy` returns the place."""


@dataclass(frozen=True)
class IndexedFile:
    """A file in an index: its path relative to its source, and the offsets of its first id and first byte."""

    name: str
    start: int
    first_byte: int


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The texts of files as bytes (`text`), and two context indexes: `ids` of the token ids, `contexts` of the
    bytes."""

    files: Sequence[IndexedFile]
    ids: ContextIndex
    text: bytes
    contexts: ContextIndex

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files; records of data files have no name and are left out."""
        return frozenset(file.name for file in self.files if file.name)

    def without(self, hidden: Set[str] = frozenset()) -> TextSource:
        """The text to copy from, without the files named in `hidden`, a subset of `names`."""
        if not hidden:
            return TextSource(self.text, self.contexts, self.ids)
        ends = [*self.files, IndexedFile("", len(self.ids), len(self.text))]
        places = [(a, b) for a, b in pairwise(ends) if a.name in hidden]
        ids = self.ids.without([(a.start, b.start) for a, b in places])
        contexts = self.contexts.without([(a.first_byte, b.first_byte) for a, b in places])
        return TextSource(self.text, contexts, ids)

    def texts(self) -> list[tuple[str, str]]:
        """The name and the text of each file."""
        bounds = pairwise([*(file.first_byte for file in self.files), len(self.text)])
        parts = (self.text[a : b - 1].decode() for a, b in bounds)
        return [(file.name, text) for file, text in zip(self.files, parts, strict=True)]


def find_copy(text: bytes, sources: Sequence[TextSource], indexes: Iterable[TextIndex]) -> tuple[str, int] | None:
    """The file and the line, counted from 1, at which the longest match of the end of `text` ends. The file is
    empty for a source without an index. None if fewer than COPIED bytes match.

    Among equally long matches, the first source wins, and then the last match. This is where the text occurs; that
    a model wrote it because of this occurrence is not known.
    """
    length, positions, found = longest_match(sources, text[-DEPTH_BYTES:])
    if length < COPIED:
        return None
    last = positions[0] - 1
    files = [file for index in indexes if index.text is found for file in index.files if file.first_byte <= last]
    name, start = (files[-1].name or "a record", files[-1].first_byte) if files else ("", 0)
    return name, 1 + found.count(b"\n", start, last)


def first_documents(documents: Sequence[Document]) -> Sequence[Document]:
    """As many of the first documents as fit into MOST bytes; always at least one, even if it is larger."""
    sizes = np.cumsum([document.size for document in documents])
    return documents[: max(1, int(np.searchsorted(sizes, MOST, "right")))]


def named_texts(documents: Sequence[Document], first: float = 0, last: float = 1) -> list[tuple[str, str]]:
    """The path (within its source) and the text (without byte order mark) of each document.

    With `first` and `last`, each text is cut to the part between these fractions of its bytes; texts of fewer than
    SHORT bytes become empty. Each document is cut to at most MOST bytes.
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
    """Yield the bytes of a text from `start` to `stop`, block by block."""
    offset = 0
    for block in text:
        data = block.encode()
        yield data[max(0, start - offset) : max(0, stop - offset)]
        offset += len(data)


def index_texts(texts: Sequence[tuple[str, str]], files: FileTokenizer) -> TextIndex:
    """The index of files, given as (path, text)."""
    indexed, ids, data = list[IndexedFile](), list[int](), bytearray()
    for name, text in each(texts, end=0.15):
        indexed.append(IndexedFile(name, len(ids), len(data)))
        text = valid_text(text)
        ids += [*files.tokenize(text, valid_text(name)).ids, files.tokenizer.eos]
        data += text.encode() + b"\0"
    contexts = ContextIndex(np.frombuffer(data, np.uint8), depth=DEPTH_BYTES, progress=advance(1, 0.15, 0.85))
    return TextIndex(indexed, index_ids(ids, len(files.pieces)), bytes(data), contexts)


def write_index(run: Path, index: TextIndex, sources: Sequence[str] = (), follow_links: bool = False) -> None:
    """Write the index of a run, and the sources of its text."""
    tensors = {"ids": index.ids.items, "order": index.ids.order}
    tensors |= {"text": index.contexts.items, "text_order": index.contexts.order}
    files = [[f.name, f.start, f.first_byte] for f in index.files]
    record = {"format": FORMAT, "files": files, "sources": [*sources], "follow_links": follow_links}
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    data = save({name: np.ascontiguousarray(items) for name, items in tensors.items()})
    write_file(run / FOLDER / "index.safetensors", data)
    write_file(run / FOLDER / "files.json", json.dumps(record).encode())


def read_sources(run: Path) -> Mapping[str, Any]:
    """A record whose `sources` and `follow_links` describe the index's text, as in a model card; empty if the run
    has no index. Raises ValueError for a damaged record."""
    return read_record(run, "files.json", FORMAT, REMEDY) or {}


def read_index(run: Path) -> TextIndex | None:
    """The index of a run; None if the run has no index. Raises ValueError for a damaged index."""
    find_file(run, f"{FOLDER}/index.safetensors")
    if (record := read_record(run, "files.json", FORMAT, REMEDY)) is None:
        return None
    with damage_reported(run, "index", REMEDY):
        tensors = load_file(run / FOLDER / "index.safetensors")
        ids = ContextIndex(tensors["ids"], tensors["order"], DEPTH)
        contexts = ContextIndex(tensors["text"], tensors["text_order"], DEPTH_BYTES)
        files = [IndexedFile(str(name), int(start), int(byte)) for name, start, byte in record["files"]]
        text = contexts.items.tobytes()
        text.decode()
        return TextIndex(files, ids, text, contexts)


def read_record(run: Path, name: str, format: int, remedy: str) -> dict[str, Any] | None:
    """A record in RUN/completion; None if the file does not exist. Raises ValueError for another version of the
    format."""
    if (path := find_file(run, f"{FOLDER}/{name}")) is None:
        return None
    record = json_file.read(path)
    if (number := record.get("format")) != format:
        raise ValueError(f"{path}: format {number!r:.60}, but this version reads {format}; {remedy}")
    return record


def damage_reported(run: Path, subject: str, remedy: str) -> AbstractContextManager[None]:
    """Errors in the `with` block, which reads a file, become a ValueError that names the damage and the remedy."""
    errors = OSError, SafetensorError, RuntimeError, LookupError, TypeError, ValueError, ArithmeticError
    message = f"{run / FOLDER}: a damaged {subject}"
    return prefix_errors(message, (*errors, AttributeError), f"; {remedy}", one_line)
