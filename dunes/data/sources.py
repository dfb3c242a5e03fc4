"""A corpus: the text in some files and folders, without what nobody wants to train on.

Files that .gitignore excludes, links, binaries, large generated files and duplicates are skipped and counted by
reason. Whole files are kept for validation, chosen by a hash of their path, so that the same file is on the same
side on every machine and after every edit elsewhere; of files of records it is some of the records, by their hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dunes.data.document import Document, plain_document
from dunes.data.files import SourceFile, Walk, skipped_line
from dunes.data.record_document import RecordDocument, describe_records, holds_records, record_documents
from dunes.plural import plural

SHOWN = 5
"""Files of records that cannot be read: so many are named, the others counted."""


@dataclass
class Corpus:
    """The documents of a corpus for training and validation, and the names of skipped files by reason.

    `notes` tell what was read from files of records, and what was not. `split` tells what validation is: whole
    `files` and records, or the `tails` of all.
    """

    train: list[Document] = field(default_factory=list)
    valid: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    split: Literal["files", "tails"] = "files"

    def report(self) -> str:
        """One line: how much text there is and what was skipped."""
        size = sum(d.size for d in self.train + self.valid) / 1e6
        kept = f"{plural(len(self.train), 'training file')}, {len(self.valid)} for validation, {size:.1f} MB"
        return f"{kept}; {skipped_line(self.skipped)}"


def collect_corpus(
    sources: Sequence[str | Path],
    share: float = 0.05,
    *,
    follow_links: bool = False,
    text_field: Sequence[str] = (),
) -> Corpus:
    """The corpus of some files and folders; `stdlib` names the running Python's standard library.

    About `share` of the files, and of several at least one, but never all, go to validation; of files of records,
    about `share` of the records. Links that lead outside the sources are read with `follow_links` only, and of
    records the fields `text_field`, if any are named. Raises ValueError if a source is missing, if a file of
    records that is a source cannot be read, or if no text is new.
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
        where, why = ", ".join(map(str, sources)), "; ".join([corpus.report(), *corpus.notes[:1]])
        raise ValueError(f"{where}: no text to train on ({why}); give files or folders of UTF-8 text")
    unread = corpus.notes[SHOWN:]
    corpus.notes[SHOWN:] = (
        [f"skipped: {plural(len(unread), 'more file', 'more files')} of records"] if unread else []
    )
    corpus.notes[:0] = describe_records([*documents.values()])
    _divide(corpus, [*documents.values()], share)
    return corpus


def _documents(
    file: SourceFile, share: float, fields: Sequence[str], notes: list[str]
) -> Sequence[Document] | str:
    """The documents in a file, or why there are none. Raises ValueError for bad records that the user named."""
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
    """Split the documents: files by their hashes, one of several at least unless records are for validation."""
    records = [d for d in documents if isinstance(d, RecordDocument)]
    order = sorted(
        (d for d in documents if not isinstance(d, RecordDocument)), key=lambda d: (d.split_hash, d.name)
    )
    held: list[Document] = [d for d in records if d.validation]
    count = max(0, min(max(sum(d.split_hash < share for d in order), not held), len(order) - 1))
    corpus.valid = sorted([*order[:count], *held], key=_name)
    corpus.train = sorted([*order[count:], *(d for d in records if not d.validation)], key=_name)


def _name(document: Document) -> str:
    return document.name
