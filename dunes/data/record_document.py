"""The texts of a file of records as two documents: one for training and one for validation."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from dunes.data.document import Document
from dunes.data.examples import record_texts, split_hash, text_reader, validation_limit
from dunes.data.files import SourceFile
from dunes.data.records import JSON, LINES, TABLES, file_format, first_row
from dunes.text.templates import Turn
from dunes.units import plural


@dataclass(frozen=True)
class RecordDocument(Document):
    """The texts of a file of records for validation (hashes below `limit`) or for training (other hashes).

    `count` is their number, `content` a description of the fields that are read as text, `blank` the number of
    records without text, `file_digest` the digest of all texts in the file.
    """

    file_digest: str
    fields: tuple[str, ...]
    limit: float
    validation: bool
    content: str
    count: int
    blank: int

    def text(self) -> Iterator[str]:
        """Each text as a block. Raises ValueError if the file has changed since it was collected."""
        hasher, intact = blake2b(digest_size=16), False
        try:
            for _, text in record_texts(self.path, self.fields):
                hasher.update(_delimited(text))
                if text and (_split_hash(text) < self.limit) == self.validation:
                    yield text
            intact = hasher.hexdigest() == self.file_digest
        except ValueError:
            pass
        if not intact:
            raise ValueError(f"{self.path}: changed while it was being read; start again")

    def texts(self) -> Iterator[Iterable[str]]:
        return ((text,) for text in self.text())

    @property
    def header(self) -> str:
        """Empty: records are no files."""
        return ""


def holds_records(file: SourceFile) -> bool:
    """True if a file has records, by its name, or if that is ambiguous, by its first row.

    A .json file in a folder must be a list of objects; a file named by the user need only start with an object.
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
    """The training and validation documents of a file of records, about `share` of them for validation.

    If the records differ, at least one is for validation, never all. A document without text is omitted. Raises
    ValueError that names the file, the line and the expected value.
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
    parts = [d for d in documents if isinstance(d, RecordDocument)]
    return [
        _describe(content, [d for d in parts if d.content == content])
        for content in dict.fromkeys(d.content for d in parts)
    ]


def _describe(content: str, parts: Sequence[RecordDocument]) -> str:
    count, blank, files = sum(d.count for d in parts), sum(d.blank for d in parts), len({d.path for d in parts})
    in_files = f" in {files} files" if files > 1 else ""
    skipped = f"; {blank} without text skipped" if blank else ""
    return f"text from records: {content} ({plural(count + blank, 'record')}{in_files}{skipped})"


def _split_hash(text: str) -> float:
    return split_hash((Turn("text", text),))


def _delimited(text: str) -> bytes:
    """The text prefixed with its length, so that different lists of texts have different bytes."""
    data = text.encode()
    return len(data).to_bytes(8) + data
