"""Documents: suitable text files, and the texts in files of records."""

import codecs
import stat
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dunes.data.examples import record_texts, split_hash, text_reader, validation_limit
from dunes.data.files import CODE_SUFFIXES, SourceFile, open_plain
from dunes.data.records import JSON, LINES, TABLES, file_format, first_row
from dunes.files.model_file import stand_in
from dunes.text.templates import Turn
from dunes.units import plural

BLOCK = 1 << 20
GIANT = 400_000
LETTERS = (string.ascii_letters + " \n\t").encode() + bytes(range(0x80, 0x100))


@dataclass(frozen=True)
class Document:
    """One file of text. `name` is its path within the source; `digest` is the hash of its bytes."""

    path: Path
    name: str
    size: int
    digest: str

    def text(self) -> Iterator[str]:
        """Yield the text in blocks that end at line ends, so that a file may be larger than memory.

        Raises ValueError if the file has changed since it was collected.
        """
        return _verified(self.path, self.digest, lambda hasher: _read_blocks(self.path, hasher, self.size))

    def texts(self) -> Iterator[Iterable[str]]:
        """Yield each text of the document as an iterable of blocks, to be consumed before the next text."""
        yield self.text()

    @property
    def header(self) -> str:
        """The path on one line (see `header_name`), which comes before the file's text in a stream of files."""
        return header_name(self.name) + "\n"

    @property
    def split_hash(self) -> float:
        """Hash of the path, in [0, 1)."""
        return int.from_bytes(blake2b(self.name.encode(errors="surrogateescape"), digest_size=8).digest()) / 2**64


@dataclass(frozen=True)
class RecordDocument(Document):
    """Either the validation texts (with hashes below `limit`) or the training texts of a file of records.

    `count` is the number of these texts, `content` describes the fields that are read as text, `blank` is the
    number of records without text (0 for validation), and `file_digest` is the digest of all texts in the file.
    """

    file_digest: str
    fields: tuple[str, ...]
    limit: float
    validation: bool
    content: str
    count: int
    blank: int

    def text(self) -> Iterator[str]:
        """Yield each text as a block. Raises ValueError if the file has changed since it was collected."""
        return _verified(self.path, self.file_digest, self._read_texts)

    def _read_texts(self, hasher: blake2b) -> Iterator[str]:
        for _, text in record_texts(self.path, self.fields):
            hasher.update(_delimited(text))
            if text and (_split_hash(text) < self.limit) == self.validation:
                yield text

    def texts(self) -> Iterator[Iterable[str]]:
        return ((text,) for text in self.text())

    @property
    def header(self) -> str:
        """Empty, since a record is not a file."""
        return ""


def _verified(path: Path, digest: str, read: Callable[[blake2b], Iterator[str]]) -> Iterator[str]:
    """Yield the blocks of `read`, which updates a hasher. Raises ValueError if its digest differs."""
    hasher, intact = blake2b(digest_size=16), False
    try:
        yield from read(hasher)
        intact = hasher.hexdigest() == digest
    except (OSError, ValueError):
        pass
    if not intact:
        raise ValueError(f"{path}: changed while it was being read; start again")


def header_name(name: str) -> str:
    """The path on one line: line ends become spaces, and undecodable bytes become U+FFFD."""
    return name.encode(errors="surrogateescape").decode(errors="replace").translate({10: " ", 13: " "})


def plain_document(file: SourceFile) -> Document | str:
    """The document, or the reason to skip the file. A file that the user named is never skipped as generated."""
    try:
        status = file.path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not regular files"
        with open_plain(file.path) as source:
            head = source.read(1 << 16)
        if stand_in(head):
            return "pointers to files that are not here (git lfs pull)"
        if b"\0" in head:
            return "binary"
        if not head.strip():
            return "empty"
        if not file.named and status.st_size > GIANT and looks_generated(head):
            return "generated"
        hasher = blake2b(digest_size=16)
        for block in _read_blocks(file.path, hasher, status.st_size):
            if "\0" in block:
                return "binary"
        return Document(file.path, file.name, status.st_size, hasher.hexdigest())
    except UnicodeDecodeError:
        return "not UTF-8"
    except _ChangedError:
        return "changed while being read"
    except OSError:
        return "unreadable"


class _ChangedError(OSError):
    """The size of a file has changed."""


def _read_blocks(path: Path, hasher: blake2b, size: int) -> Iterator[str]:
    """Yield the text of a UTF-8 file of `size` bytes in blocks of complete lines, and update the hasher.

    A line of more than 4 MiB may be split. At most `size` + 1 bytes are read, since the file may be growing.
    """
    decoder, rest, remaining = codecs.getincrementaldecoder("utf-8")(), "", size + 1
    with open_plain(path) as file:
        while data := file.read(min(BLOCK, remaining)):
            remaining -= len(data)
            hasher.update(data)
            text = rest + decoder.decode(data)
            cut = text.rfind("\n") + 1 or (len(text) if len(text) > 4 * BLOCK else 0)
            if cut:
                yield text[:cut]
            rest = text[cut:]
    if remaining != 1:
        raise _ChangedError(f"{path}: changed while it was being read")
    decoder.decode(b"", True)
    if rest:
        yield rest


def looks_generated(head: bytes) -> bool:
    """True if a large file looks generated: it says so, has few letters, or has very long lines."""
    lower = head[:2000].lower()
    if any(mark in lower for mark in (b"@generated", b"do not edit", b"generated by")):
        return True
    letters = len(head) - len(head.translate(None, LETTERS))
    return letters < 0.6 * len(head) or len(head) / (head.count(b"\n") + 1) > 5000


NamedText = tuple[str, str]
"""Name and text of a file."""


def code_fraction(documents: Iterable[Document]) -> float:
    """Fraction of the documents' bytes that is source code, in [0, 1]."""
    sizes = [(d.path.suffix.lower() in CODE_SUFFIXES, d.size) for d in documents]
    return sum(size for is_code, size in sizes if is_code) / max(1, sum(size for _, size in sizes))


def document_texts(documents: Iterable[Document]) -> Iterator[NamedText]:
    """Yield (name of its document, text) for each text of the documents, without byte order marks."""
    for document in documents:
        for text in document.texts():
            yield document.name, "".join(text).removeprefix("\ufeff")


def holds_records(file: SourceFile) -> bool:
    """True if a file contains records. Its name decides or, if the name is ambiguous, its first row.

    A .json file in a folder must be a list that starts with an object. A file that the user named must start with
    an object; a .json file that the user named may start with any row.
    """
    name = file.path.name.lower()
    if name.endswith((*LINES, *TABLES)):
        return True
    if not (file.named or name.endswith(JSON)):
        return False
    try:
        is_object = isinstance(first_row(file.path), dict)
        if file.named:
            return is_object or name.endswith(JSON)
        return is_object and file_format(file.path) == "a JSON list"
    except (ValueError, OSError):
        return False


def record_documents(file: SourceFile, share: float, fields: Sequence[str] = ()) -> list[RecordDocument]:
    """The training and validation documents of a file of records; about `share` of the records are for validation.

    If the records differ, at least one is for validation, but never all. A document without texts is omitted.
    Raises ValueError that names the file, the line and the expected value.
    """
    hasher, hashes, sizes, blank = blake2b(digest_size=16), array("d"), array("q"), 0
    for _, text in record_texts(file.path, fields):
        hasher.update(_delimited(text))
        blank += not text
        if text:
            hashes.append(_split_hash(text))
            sizes.append(len(text.encode()))
    content, _ = text_reader(first_row(file.path), fields)
    limit = validation_limit(min(hashes), max(hashes), share)
    is_validation, size = np.array(hashes) < limit, np.array(sizes)
    file_digest, documents = hasher.hexdigest(), []
    for validation in (False, True):
        digest = blake2b(f"{file_digest} {limit!r} {validation}".encode(), digest_size=16).hexdigest()
        part = size[is_validation == validation]
        details = (file_digest, tuple(fields), limit, validation, content, len(part), 0 if validation else blank)
        documents += [RecordDocument(file.path, file.name, int(part.sum()), digest, *details)] if len(part) else []
    return documents


def describe_records(documents: Sequence[Document]) -> list[str]:
    """Lines that describe the text from records: the fields, and the number of records with and without text."""
    parts_by_content: dict[str, list[RecordDocument]] = {}
    for document in documents:
        if isinstance(document, RecordDocument):
            parts_by_content.setdefault(document.content, []).append(document)
    lines = []
    for content, parts in parts_by_content.items():
        blank, files = sum(d.blank for d in parts), len({d.path for d in parts})
        records = plural(sum(d.count for d in parts) + blank, "record") + (
            f" in {files} files" if files > 1 else ""
        )
        skipped = f"; {blank} without text skipped" if blank else ""
        lines.append(f"text from records: {content} ({records}{skipped})")
    return lines


def _split_hash(text: str) -> float:
    return split_hash((Turn("text", text),))


def _delimited(text: str) -> bytes:
    """The text prefixed with its length, so that different lists of texts have different bytes."""
    data = text.encode()
    return len(data).to_bytes(8) + data
