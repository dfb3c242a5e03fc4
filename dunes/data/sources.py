"""A corpus: the text in some files and folders.

Files that .gitignore excludes, links, binaries, large generated files and duplicates are skipped and counted by
reason. Files for validation are selected by a hash of their path, so that the split is the same on every machine
and after edits to other files, and near-duplicates of a file follow it; records for validation are selected by
their own hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dunes.data.document import Document, header_name, plain_document
from dunes.data.duplicates import LARGE, SPLIT_VERSION, group_duplicates
from dunes.data.files import SourceFile, Walk, skipped_line
from dunes.data.record_document import RecordDocument, describe_records, holds_records, record_documents
from dunes.units import plural

SHARE = 0.05
"""The share of the files that are for validation, and of those for a test."""
SHOWN = 5
"""The number of unreadable files of records that are named; the others are counted."""


NEAR_DUPLICATES = "near-duplicates:"
"""The beginning of the note on them."""


@dataclass
class Corpus:
    """The documents of a corpus for training, validation and a test, and the names of skipped files by reason.

    `notes` describe which records were read and skipped. `split` is how validation data is selected: whole `files`
    and records, or the `tails` of all. `duplicates` maps the digest of each near-duplicate of another file to that
    of the one which its group follows.
    """

    train: list[Document] = field(default_factory=list)
    valid: list[Document] = field(default_factory=list)
    test: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    split: Literal["files", "tails"] = "files"
    duplicates: dict[str, str] = field(default_factory=dict)

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
    split_version: int = SPLIT_VERSION,
) -> Corpus:
    """The corpus of some files and folders; `stdlib` is the standard library of the running Python.

    About `share` of the files, of several at least one but never all, are for validation; for files of records,
    about `share` of the records. Near-duplicates of a file are on its side, but with `split_version` 0, that of
    earlier trainings. Links to files outside the sources are only followed with `follow_links`. Of records only
    the fields in `text_field` are read, if any. Raises ValueError if a source is missing, if a file of records
    that the user named cannot be read, if there is no text, or for an unknown version.
    """
    if split_version not in range(SPLIT_VERSION + 1):
        raise ValueError(
            f"the text was divided by another version of dunes ({str(split_version)[:20]}); update dunes"
        )
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
    if split_version:
        _find_duplicates(corpus, [*documents.values()])
    _divide(corpus, [*documents.values()], share)
    return corpus


def hold_out_test(corpus: Corpus, share: float = SHARE) -> Corpus:
    """The corpus with about `share` of its files for a test, which neither training nor validation reads.

    They are training files whose hashes are in [share, 2 * share): of three or more files at least one, never all.
    Near-duplicates are on one side. Files are then in the order of their paths. Records are not divided again.
    """
    groups, validated = _groups(corpus, corpus.documents), {d.digest for d in corpus.valid}
    groups = [group for group in groups if group.files[0].digest not in validated]
    count = max(sum(g.split_hash < 2 * share for g in groups), len(_files(corpus.documents)) > 2)
    records = any(isinstance(d, RecordDocument) for d in corpus.train)
    test = [d for g in groups[: max(0, min(count, len(groups) - (not records)))] for d in g.files]
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


@dataclass(frozen=True)
class _Group:
    """Near-duplicates, or a single file. `split_hash` is that of the first file; 1 is added for a large group."""

    files: list[Document]
    split_hash: float


def _find_duplicates(corpus: Corpus, documents: Sequence[Document]) -> None:
    """Set the corpus's near-duplicates, and note them. A group follows its file with the shortest path."""
    files = sorted(_files(documents), key=lambda d: (len(d.name), d.name))
    firsts = group_duplicates(d.text() for d in files) if len(files) > 1 else [0] * len(files)
    pairs = [(file, files[first]) for file, first in zip(files, firsts, strict=True) if file is not files[first]]
    corpus.duplicates = {file.digest: first.digest for file, first in pairs}
    if pairs:
        example = " of ".join(header_name(d.name)[:200] for d in pairs[0])
        corpus.notes.append(
            f"{NEAR_DUPLICATES} {plural(len(pairs), 'file')}, each on one side with its like ({example})"
        )


def _files(documents: Sequence[Document]) -> list[Document]:
    return [d for d in documents if not isinstance(d, RecordDocument)]


def _groups(corpus: Corpus, documents: Sequence[Document]) -> list[_Group]:
    """The files in groups of near-duplicates, in the order in which they are held out."""
    groups: dict[str, list[Document]] = {}
    files = sorted(_files(documents), key=lambda d: d.digest in corpus.duplicates)  # a group's first file first
    for file in files:
        groups.setdefault(corpus.duplicates.get(file.digest, file.digest), []).append(file)
    size, count = LARGE * sum(d.size for d in files), LARGE * len(files)
    large = {k for k, g in groups.items() if len(g) > 1 and (len(g) > count or sum(d.size for d in g) > size)}
    hashed = [_Group(group, group[0].split_hash + (key in large)) for key, group in groups.items()]
    return sorted(hashed, key=lambda group: (group.split_hash, group.files[0].name))


def _divide(corpus: Corpus, documents: Sequence[Document], share: float) -> None:
    """Split the documents: files by their hashes, at least one of several unless records are for validation."""
    records = [d for d in documents if isinstance(d, RecordDocument)]
    groups = _groups(corpus, documents)
    valid: list[Document] = [d for d in records if d.validation]
    count = max(0, min(max(sum(g.split_hash < share for g in groups), not valid), len(groups) - 1))
    name = attrgetter("name")
    corpus.valid = sorted([*(d for g in groups[:count] for d in g.files), *valid], key=name)
    train = [d for g in groups[count:] for d in g.files]
    corpus.train = sorted([*train, *(d for d in records if not d.validation)], key=name)
