"""The texts of a file of records as documents: some of the records for validation, the others for training."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from dunes.data.document import Document
from dunes.data.examples import record_texts, split_hash, text_reader, validation_limit
from dunes.data.files import SourceFile
from dunes.data.records import JSON, LINES, TABLE, file_format, first_row
from dunes.plural import plural
from dunes.text.templates import Turn


@dataclass(frozen=True)
class RecordDocument(Document):
    """The texts of a file of records: those for validation, whose hashes are below `limit`, or the others.

    There are `count` of them, of `size` bytes, and `content` tells what is taken as text; `blank` have none.
    `file_digest` is that of all texts in the file.
    """

    file_digest: str
    fields: tuple[str, ...]
    limit: float
    validation: bool
    content: str
    count: int
    blank: int

    def text(self) -> Iterator[str]:
        """Each text as a block. Raises ValueError if the file is no longer what it was when it was collected."""
        seen, whole = blake2b(digest_size=16), False
        try:
            for _, text in record_texts(self.path, self.fields):
                seen.update(_delimited(text))
                if text and (_split_hash(text) < self.limit) == self.validation:
                    yield text
            whole = seen.hexdigest() == self.file_digest
        except ValueError:
            pass
        if not whole:
            raise ValueError(f"{self.path}: changed while it was being read; start again")

    def texts(self) -> Iterator[Iterable[str]]:
        return ((text,) for text in self.text())


def holds_records(file: SourceFile) -> bool:
    """Whether a file is one of records: by its name, or if its name leaves it open by its first row.

    A .json file in a folder is one if it is a list of objects; of a file that the user named himself it is enough
    that it begins as one of records does.
    """
    name = file.path.name.lower()
    if name.endswith((*LINES, TABLE)):
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
    """A file of records in two parts, about `share` for validation: of different ones one at least, never all.

    A side without text is left out. Raises ValueError that names the file, the line and what was expected.
    """
    seen, places, sizes, blank = blake2b(digest_size=16), array("d"), array("q"), 0
    for _, text in record_texts(file.path, fields):
        seen.update(_delimited(text))
        blank += not text
        if text:
            places.append(_split_hash(text))
            sizes.append(len(text.encode()))
    what, _ = text_reader(first_row(file.path), fields)
    limit = validation_limit(min(places), max(places), share)
    below, size = np.array(places) < limit, np.array(sizes)
    whole, sides = seen.hexdigest(), []
    for validates in (False, True):
        digest = blake2b(f"{whole} {limit!r} {validates}".encode(), digest_size=16).hexdigest()
        own = size[below == validates]
        rest = (whole, tuple(fields), limit, validates, what, len(own), 0 if validates else blank)
        sides += [RecordDocument(file.path, file.name, int(own.sum()), digest, *rest)] if len(own) else []
    return sides


def describe_records(documents: Sequence[Document]) -> list[str]:
    """Lines that tell what was taken as text from how many records, and how many have none."""
    sides = [d for d in documents if isinstance(d, RecordDocument)]
    return [
        _describe(what, [d for d in sides if d.content == what])
        for what in dict.fromkeys(d.content for d in sides)
    ]


def _describe(what: str, sides: Sequence[RecordDocument]) -> str:
    count, blank, files = sum(d.count for d in sides), sum(d.blank for d in sides), len({d.path for d in sides})
    where = f" in {files} files" if files > 1 else ""
    without = f"; {blank} without text skipped" if blank else ""
    return f"text from records: {what} ({plural(count + blank, 'record')}{where}{without})"


def _split_hash(text: str) -> float:
    return split_hash((Turn("text", text),))


def _delimited(text: str) -> bytes:
    """The text with its length in front, so that no two rows of texts are the same bytes."""
    data = text.encode()
    return len(data).to_bytes(8) + data
