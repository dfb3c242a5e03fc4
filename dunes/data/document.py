"""Documents of a corpus: text files that are not skipped, and the texts in files of records."""

import codecs
import re
import stat
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dunes.data.examples import record_texts, split_hash, text_reader, validation_limit
from dunes.data.files import CODE_SUFFIXES, DOCUMENTATION, SourceFile, open_plain, reason_by_name
from dunes.data.records import DELIMITED, JSON, LINES, TABLES, file_format, first_row, rename_fields
from dunes.files.model_file import stand_in
from dunes.text.templates import Turn
from dunes.units import plural

BLOCK = 1 << 20
GIANT = 400_000
LEAST_DATA = 10_000
"""Minimum size in bytes of a file that may be skipped as data, since people also write short tables."""
LONG_LINE = 1000
LETTERS = (string.ascii_letters + " \n\t").encode() + bytes(range(0x80, 0x100))


@dataclass(frozen=True)
class Document:
    """One file of text. `name` is its path within the source; `digest` is the hash of the file's bytes."""

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
        """The file's path on one line (see `header_name`), put before its text in a stream of files."""
        return header_name(self.name) + "\n"

    @property
    def split_hash(self) -> float:
        """Hash of the path, in [0, 1)."""
        return int.from_bytes(blake2b(self.name.encode(errors="surrogateescape"), digest_size=8).digest()) / 2**64


@dataclass(frozen=True)
class RecordDocument(Document):
    """The validation texts (with hashes below `limit`) or the training texts of a file of records.

    `names` has a pair (field of RECORD_FORMATS, field in the file) for each renamed field. `count` is the number
    of texts in the document. `content` describes the fields that are read as text. `blank` is the number of
    records without text (0 for validation). `file_digest` is the digest of all texts in the file.
    """

    file_digest: str
    fields: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    limit: float
    validation: bool
    content: str
    count: int
    blank: int

    def text(self) -> Iterator[str]:
        """Yield each text as a block. Raises ValueError if the file has changed since it was collected."""
        return _verified(self.path, self.file_digest, self._read_texts)

    def _read_texts(self, hasher: blake2b) -> Iterator[str]:
        for _, text in record_texts(self.path, self.fields, dict(self.names)):
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
    """Yield the blocks of `read(hasher)`. Raises ValueError if `read` fails or the digest differs."""
    hasher, intact = blake2b(digest_size=16), False
    with suppress(OSError, ValueError):
        yield from read(hasher)
        intact = hasher.hexdigest() == digest
    if not intact:
        raise ValueError(f"{path}: changed while it was being read; start again")


def header_name(name: str) -> str:
    """The path on one line: line ends become spaces, and undecodable bytes become U+FFFD."""
    return name.encode(errors="surrogateescape").decode(errors="replace").translate({10: " ", 13: " "})


def plain_document(file: SourceFile) -> Document | str:
    """The document, or a reason to skip the file. LEFT_OUT does not concern files that the user named."""
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
        if not file.named and (reason := _reason(file, head, status.st_size)):
            return reason
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
    """True if a large file looks generated: it starts with a notice, has few letters, or has very long lines."""
    lower = head[:2000].lower()
    if any(mark in lower for mark in (b"@generated", b"do not edit", b"generated by")):
        return True
    letters = len(head) - len(head.translate(None, LETTERS))
    return letters < 0.6 * len(head) or len(head) / (head.count(b"\n") + 1) > 5000


LEFT_OUT = ("generated", "third-party", "data")
"""Reasons to skip text that the project's authors did not write. A file that the user names is read anyway."""
_COMMENTS = re.compile(
    rb"""(\xef\xbb\xbf)?(\s*(\#|//|--|;|%|<\?|<!--.*?-->|/\*.*?\*/|\(\*.*?\*\)|['"]use\ strict)[^\n]*)*""",
    re.VERBOSE | re.DOTALL,
)
"""Matches the comments at the beginning of a file; the match is empty if there are none."""
_MARK = re.compile(
    rb"""@generated\b | <auto-generated | (?i:^\W*code\ generated\ by\ )
    | (?i:^\W*(this\ file\ is\ )?((auto|machine)[a-z]*[-\ ]?)?generated\b.{0,200}\bnot\ (be\ )?(edit|modif|chang))
    | (?i:\b(this|the)\ (file|code|module)\ (is|was|has\ been)\ (auto|machine)[a-z]*[-\ ]?generated)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CODE_MARK = re.compile(rb"DO NOT (EDIT|MODIFY)(?! (BELOW|ABOVE|BEYOND|THIS (LINE|SECTION|BLOCK)))")
"""A notice in generated code. Only comments in source code are searched, since prose may use these words."""
_NUMBERS = re.compile(rb"[-+]?\b(0x[0-9a-f]+|\d[\d.]*(e[-+]?\d+)?)[ulf]*\b[,;]?", re.I)
_ENCODED = re.compile(rb"^[\s\"',]*(?=[^\n]*\d)[A-Za-z0-9+/=_-]{40,}[\s\"',]*$", re.MULTILINE)
"""A line of base64 or hexadecimal digits."""
_SPACES = b" \t" + bytes(range(0x80, 0x100))


def _reason(file: SourceFile, head: bytes, size: int) -> str:
    """The reason in LEFT_OUT to skip a file that starts with `head`; empty if the file seems written by people.

    The file's name, first comments and content are checked. A file of at least LEAST_DATA bytes is skipped if its
    content is mostly numbers, encoded bytes, or long lines with few spaces (such as pictures in a notebook).
    """
    if size > GIANT and looks_generated(head):
        return "generated"
    if reason := reason_by_name(file):
        return reason
    match, is_code = _COMMENTS.match(head[:4000]), file.path.suffix.lower() in CODE_SUFFIXES
    comments = match[0] if match else b""
    if _MARK.search(comments) or (is_code and _CODE_MARK.search(comments)):
        return "generated"
    if size < LEAST_DATA:
        return ""
    with open_plain(file.path) as source:
        source.seek(size // 2 if size > len(head) else size)
        sample = head + source.read(len(head))
    # Code is left out only if it consists almost entirely of numbers or encoded bytes.
    visible = len(sample.translate(None, b" \t\r\n"))
    numbers, encoded = (sum(len(m[0]) for m in part.finditer(sample)) for part in (_NUMBERS, _ENCODED))
    if numbers > (0.85 if is_code else 0.6) * visible or encoded > (0.9 if is_code else 0.5) * len(sample):
        return "data"
    long = [line for line in sample.split(b"\n") if len(line) > LONG_LINE]
    dense = sum(len(line) for line in long if len(line.translate(None, _SPACES)) > 0.9 * len(line))
    return "generated" if dense > (0.9 if is_code else 0.5) * len(sample) else ""


NamedText = tuple[str, str]
"""Name and text of a file."""


def code_size(documents: Iterable[Document]) -> tuple[int, int]:
    """Number of bytes of source code, and number of bytes of other text except documentation."""
    code = other = 0
    for document in documents:
        if document.path.suffix.lower() in CODE_SUFFIXES:
            code += document.size
        elif not (document.header and DOCUMENTATION.fullmatch(document.name)):
            other += document.size
    return code, other


def document_texts(documents: Iterable[Document]) -> Iterator[NamedText]:
    """Yield (document name, text) for each text of the documents, without byte order marks."""
    for document in documents:
        for text in document.texts():
            yield document.name, "".join(text).removeprefix("\ufeff")


def holds_records(file: SourceFile, asked: bool = False) -> bool:
    """True if a file contains records, by its name or, if the name is ambiguous, by its first row.

    A CSV or TSV file counts only if the user named it and `asked` for records. A .json file in a folder counts if
    it is a list that starts with an object. A .json file that the user named counts if it has a first row, and a
    named file with any other suffix if it starts with an object.
    """
    name = file.path.name.lower()
    if name.endswith(DELIMITED):
        return file.named and asked
    if name.endswith((*LINES, *TABLES)):
        return True
    if not (file.named or name.endswith(JSON)):
        return False
    with suppress(ValueError, OSError):
        is_object = isinstance(first_row(file.path), dict)
        if file.named:
            return is_object or name.endswith(JSON)
        return is_object and file_format(file.path) == "a JSON list"
    return False


def record_documents(
    file: SourceFile, share: float, fields: Sequence[str] = (), names: Mapping[str, str] | None = None
) -> list[RecordDocument]:
    """The training and validation documents of a file of records; about `share` of the records are for validation.

    Unless all records are equal, at least one is for validation and at least one for training. A document without
    texts is omitted. Raises ValueError that names the file, the line and the expected value.
    """
    hasher, hashes, sizes, blank = blake2b(digest_size=16), array("d"), array("q"), 0
    for _, text in record_texts(file.path, fields, names):
        hasher.update(_delimited(text))
        blank += not text
        if text:
            hashes.append(_split_hash(text))
            sizes.append(len(text.encode()))
    content, _ = text_reader(rename_fields(first_row(file.path), names or {}), fields, names or ())
    limit = validation_limit(min(hashes), max(hashes), share)
    is_validation, size = np.array(hashes) < limit, np.array(sizes)
    file_digest, documents = hasher.hexdigest(), []
    reading = file_digest, tuple(fields), tuple((names or {}).items()), limit
    for validation in (False, True):
        digest = blake2b(f"{file_digest} {limit!r} {validation}".encode(), digest_size=16).hexdigest()
        part = size[is_validation == validation]
        counts = len(part), 0 if validation else blank
        basics = file.path, file.name, int(part.sum()), digest
        documents += [RecordDocument(*basics, *reading, validation, content, *counts)] if len(part) else []
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
        records = plural(sum(d.count for d in parts) + blank, "record")
        records += f" in {files} files" if files > 1 else ""
        skipped = f"; {blank} without text skipped" if blank else ""
        lines.append(f"text from records: {content} ({records}{skipped})")
    return lines


def _split_hash(text: str) -> float:
    return split_hash((Turn("text", text),))


def _delimited(text: str) -> bytes:
    """The text prefixed with its length, so that different lists of texts have different bytes."""
    data = text.encode()
    return len(data).to_bytes(8) + data
