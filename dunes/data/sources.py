"""A corpus: the text in some files and folders.

Files that .gitignore excludes, links, binaries, large generated files and duplicates are skipped and counted by
reason. Files for validation are selected by a hash of their path, so that the split is the same on every machine
and after edits to other files; records for validation are selected by their own hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dunes.data.document import Document, plain_document
from dunes.data.files import SourceFile, Walk, skipped_line
from dunes.data.record_document import RecordDocument, describe_records, holds_records, record_documents
from dunes.units import plural

SHARE = 0.05
"""The share of the files that are for validation, and of those for a test."""
SHOWN = 5
"""The number of unreadable files of records that are named; the others are counted."""


@dataclass
class Corpus:
    """The documents of a corpus for training, validation and a test, and the names of skipped files by reason.

    `notes` describe which records were read and skipped. `split` is how validation data is selected: whole `files`
    and records, or the `tails` of all.
    """

    train: list[Document] = field(default_factory=list)
    valid: list[Document] = field(default_factory=list)
    test: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    split: Literal["files", "tails"] = "files"

    def __repr__(self) -> str:
        return f"Corpus({self.report()})"

    def report(self) -> str:
        """One line: the amount of text and the number of skipped files."""
        size = sum(d.size for d in self.documents) / 1e6
        tested = f", {len(self.test)} for the test" if self.test else ""
        files = f"{plural(len(self.train), 'training file')}, {len(self.valid)} for validation{tested}"
        return f"{files}, {size:.1f} MB; {skipped_line(self.skipped)}"

    @property
    def documents(self) -> list[Document]:
        """All documents, those for training first."""
        return self.train + self.valid + self.test


def collect_corpus(
    sources: Sequence[str | Path],
    share: float = SHARE,
    *,
    follow_links: bool = False,
    text_field: Sequence[str] = (),
) -> Corpus:
    """The corpus of some files and folders; `stdlib` is the standard library of the running Python.

    About `share` of the files, of several at least one but never all, are for validation; for files of records,
    about `share` of the records. Links to files outside the sources are only followed with `follow_links`. Of
    records only the fields in `text_field` are read, if any. Raises ValueError if a source is missing, if a file
    of records that the user named cannot be read, or if there is no text.
    """
    walk = Walk(sources, follow_links)
    corpus = Corpus(skipped=walk.skipped)
    documents: dict[str, Document] = {}
    for file in walk.files():
        new = _documents(file, share, text_field, corpus.notes)
        if isinstance(new, str):
            walk.skip(new, file.name)
        elif new[0].digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents |= {document.digest: document for document in new}
    if not documents:
        names, reasons = ", ".join(map(str, sources)), "; ".join([corpus.report(), *corpus.notes[:1]])
        raise ValueError(f"{names}: no text to train on ({reasons}); give files or folders of UTF-8 text")
    unread = corpus.notes[SHOWN:]
    corpus.notes[SHOWN:] = (
        [f"skipped: {plural(len(unread), 'more file', 'more files')} of records"] if unread else []
    )
    corpus.notes[:0] = describe_records([*documents.values()])
    _divide(corpus, [*documents.values()], share)
    return corpus


def hold_out_test(corpus: Corpus, share: float = SHARE) -> Corpus:
    """The corpus with about `share` of its files for a test, which neither training nor validation reads.

    They are training files whose hashes are in [share, 2 * share): of three or more files at least one, never all.
    Files are then in the order of their paths. Records are not divided again.
    """
    files = [d for d in corpus.documents if not isinstance(d, RecordDocument)]
    validated = {d.digest for d in corpus.valid}
    order = sorted((d for d in files if d.digest not in validated), key=lambda d: (d.split_hash, d.name))
    count = max(sum(d.split_hash < 2 * share for d in order), len(files) > 2)
    test = order[: max(0, min(count, len(order), len(corpus.train) - 1))]
    tested = {d.digest for d in test}
    train = [d for d in corpus.train if d.digest not in tested]
    train, valid, test = ([*sorted(documents, key=_file_order)] for documents in (train, corpus.valid, test))
    return replace(corpus, train=train, valid=valid, test=test)


def _file_order(document: Document) -> tuple[str, bool]:
    return str(document.path), isinstance(document, RecordDocument) and document.validation


def _documents(
    file: SourceFile, share: float, fields: Sequence[str], notes: list[str]
) -> Sequence[Document] | str:
    """The documents in a file, or why it has none. Raises ValueError for bad records in named files."""
    if not holds_records(file):
        document = plain_document(file)
        return document if isinstance(document, str) else [document]
    try:
        return record_documents(file, share, fields)
    except ValueError as error:
        if file.named:
            raise
        notes.append(f"skipped: {error}")
        return "unreadable records"


def _divide(corpus: Corpus, documents: Sequence[Document], share: float) -> None:
    """Split the documents: files by their hashes, at least one of several unless records are for validation."""
    records = [d for d in documents if isinstance(d, RecordDocument)]
    order = sorted(
        (d for d in documents if not isinstance(d, RecordDocument)), key=lambda d: (d.split_hash, d.name)
    )
    valid: list[Document] = [d for d in records if d.validation]
    count = max(0, min(max(sum(d.split_hash < share for d in order), not valid), len(order) - 1))
    name = attrgetter("name")
    corpus.valid = sorted([*order[:count], *valid], key=name)
    corpus.train = sorted([*order[count:], *(d for d in records if not d.validation)], key=name)
