"""Collect a corpus: the text in files and folders.

Links, binaries, generated files, third-party code, tables of numbers, duplicates, and files that .gitignore
excludes are skipped, and counted by reason. Validation files are selected by a hash of their path among files of
similar kind and size, so that the split is the same on every machine. Near-duplicates are on the same side of the
split. Validation records are selected by a hash of their text.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dunes.data.document import (
    LEFT_OUT,
    Document,
    RecordDocument,
    describe_records,
    header_name,
    holds_records,
    plain_document,
    record_documents,
)
from dunes.data.duplicates import LARGE, group_duplicates
from dunes.data.files import SourceFile, Walk, file_size, skipped_line
from dunes.data.installed import describe_package
from dunes.units import format_bytes, plural

SPLIT_VERSION = 3
"""Version of the corpus split in model cards; increase it if the same sources would be split differently."""
SHARE = 0.1
"""Default fraction of the text for validation."""
LEAST = 80_000
"""Minimum bytes of text for validation (some 20,000 tokens)."""
MOST = 0.2
"""Maximum fraction of the text for validation."""
TESTED = 0.05
"""Default fraction of the text for the test split."""
COMMON = 20
"""Files with the same suffix are split separately if there are at least this many; all others are split
together."""
SHOWN = 5
"""Maximum number of unreadable files of records whose names are shown; further files are only counted."""


NEAR_DUPLICATES = "near-duplicates:"
"""Prefix of the note on near-duplicates."""


@dataclass
class Corpus:
    """A corpus: documents for training, validation and test, and the names of skipped files for each reason.

    `notes` are lines on records, near-duplicates and files left out. With `split` "files", entire files and
    records are for validation; with "tails", the last part of each document is. `duplicates` maps the digest of
    each near-duplicate to the digest of the first file in its group. `packages` are the installed packages whose
    code was collected, with versions and licences. `share` is the fraction of the text for validation.
    """

    train: list[Document] = field(default_factory=list)
    valid: list[Document] = field(default_factory=list)
    test: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    split: Literal["files", "tails"] = "files"
    duplicates: dict[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)
    share: float = SHARE

    def __repr__(self) -> str:
        return f"Corpus({self.report()})"

    def report(self) -> str:
        """One line: the amount of text and the number of skipped files."""
        test = f", {len(self.test)} for the test" if self.test else ""
        validation = f" ({format_bytes(sum(d.size for d in self.valid))})" if self.valid else ""
        files = f"{plural(len(self.train), 'training file')}, {len(self.valid)} for validation{validation}{test}"
        return f"{files}, {self.size / 1e6:.1f} MB; {skipped_line(self.skipped)}"

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(d.size for d in self.documents)

    @property
    def documents(self) -> list[Document]:
        """All documents, training documents first."""
        return self.train + self.valid + self.test


def collect_corpus(
    sources: Sequence[str | Path],
    share: float | None = None,
    *,
    follow_links: bool = False,
    text_field: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Corpus:
    """Collect the corpus in files and folders.

    The source `stdlib` is the standard library of the running Python, and `installed` is the code of installed
    packages (`dunes.data.installed`) without near-duplicates. About `share` of the text (default
    `validation_share`) is for validation. A text file is entirely for training or for validation; files of records
    are divided record by record. If there are several files or records, at least one is for validation and at
    least one for training. Near-duplicates are on the same side. Links to files outside the sources are followed
    only with `follow_links`. If `text_field` is given, only these fields of records are read; `names` are as for
    `read_records`. Raises ValueError if a source is missing, if a file of records that the user named cannot be
    read, or if there is no text.
    """
    walk = Walk(sources, follow_links)
    corpus = Corpus(skipped=walk.skipped)
    documents, files, packages = dict[str, Document](), [*walk.files()], dict[str, str]()
    if share is None:
        share = validation_share(sum(file_size(file.path) for file in files))
    corpus.share = share
    left_out = list[tuple[int, str]]()
    collected: Sequence[Document] | str
    for file in files:
        if holds_records(file, bool(text_field or names)):
            collected = _read_records(file, share, text_field, names, corpus.notes)
        else:
            document = plain_document(file)
            collected = document if isinstance(document, str) else [document]
        if isinstance(collected, str):
            walk.skip(collected, file.name)
            left_out += [(file_size(file.path), file.name)] * (collected in LEFT_OUT)
        elif collected[0].digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents |= {document.digest: document for document in collected}
            packages |= {document.digest: file.package for document in collected if file.package}
    if not documents:
        notes = [_left_out_line(left_out), *corpus.notes[:1]]
        listed, reasons = ", ".join(map(str, sources)), "; ".join(filter(None, [corpus.report(), *notes]))
        raise ValueError(f"{listed}: no text to train on ({reasons}); give files or folders of UTF-8 text")
    if unread := corpus.notes[SHOWN:]:
        corpus.notes[SHOWN:] = [f"skipped: {plural(len(unread), 'more file')} of records"]
    corpus.notes[:0] = filter(None, [_left_out_line(left_out), *describe_records([*documents.values()])])
    _find_duplicates(corpus, documents, packages)
    corpus.packages = sorted({describe_package(Path(packages[d])) for d in documents if d in packages})
    _divide(corpus, [*documents.values()], share)
    return corpus


def validation_share(size: float) -> float:
    """Validation fraction for `size` bytes of text: SHARE, raised to reach LEAST bytes, but at most MOST."""
    return min(MOST, max(SHARE, LEAST / max(1.0, size)))


def hold_out_test(corpus: Corpus, share: float = TESTED) -> Corpus:
    """The corpus with about `share` of its text in the test split, taken from the training split.

    If there are three or more files, at least one is in the test split, unless no training data would remain.
    Near-duplicates are in the same split. Records stay in their split. The documents of each split are sorted by
    path.
    """
    groups, validated = _groups(corpus, corpus.documents), {d.digest for d in corpus.valid}
    groups = [group for group in groups if group.files[0].digest not in validated]
    groups, count = _order_for_selection(groups, share)
    count = max(count, len(_files(corpus.documents)) > 2)
    records = any(isinstance(d, RecordDocument) for d in corpus.train)
    test = [d for g in groups[: max(0, min(count, len(groups) - (not records)))] for d in g.files]
    tested = {d.digest for d in test}
    train = [d for d in corpus.train if d.digest not in tested]
    order = lambda d: (str(d.path), isinstance(d, RecordDocument) and d.validation)
    train, valid, test = (sorted(documents, key=order) for documents in (train, corpus.valid, test))
    return replace(corpus, train=train, valid=valid, test=test)


def _left_out_line(files: Sequence[tuple[int, str]]) -> str:
    """One line on skipped `files` (bytes, name), for reasons in LEFT_OUT; empty if there are none."""
    (size, name), total = max(files, default=(0, "")), format_bytes(sum(size for size, _ in files))
    largest = f"{total}, the largest {header_name(name)[:200]}, {format_bytes(size)}"
    text = f"left out: {plural(len(files), 'file')} of generated or third-party text or data ({largest})"
    return f"{text}; to read one, pass it as a source" if files else ""


def _read_records(
    file: SourceFile, share: float, fields: Sequence[str], names: Mapping[str, str] | None, notes: list[str]
) -> Sequence[Document] | str:
    """The documents in a file of records, or the reason to skip the file (ValueError if the user named it)."""
    try:
        return record_documents(file, share, fields, names)
    except ValueError as error:
        if file.named:
            raise
        notes.append(f"skipped: {error}")
        return "unreadable records"


@dataclass(frozen=True)
class _Group:
    """A group of near-duplicates, or one file. `split_hash` is the first file's hash, plus 1 for a large group."""

    files: list[Document]
    split_hash: float

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(d.size for d in self.files)

    @property
    def suffix(self) -> str:
        """The suffix of the first file."""
        return self.files[0].path.suffix


def _find_duplicates(corpus: Corpus, documents: dict[str, Document], installed: Collection[str]) -> None:
    """Set `corpus.duplicates`, and add a note to `corpus.notes`. The first file of a group is the file with the
    shortest path.

    A near-duplicate that is installed code (its digest is in `installed`) is instead removed from `documents`.
    """
    files = sorted(_files([*documents.values()]), key=lambda d: (len(d.name), d.name))
    firsts = group_duplicates(d.text() for d in files) if len(files) > 1 else [0] * len(files)
    pairs = [(file, files[first]) for file, first in zip(files, firsts, strict=True) if file is not files[first]]
    for file, _ in pairs:
        if file.digest in installed:
            corpus.skipped.setdefault("installed near-duplicates", []).append(documents.pop(file.digest).name)
    pairs = [(file, first) for file, first in pairs if file.digest in documents]
    corpus.duplicates = {file.digest: first.digest for file, first in pairs}
    if pairs:
        example = " of ".join(header_name(d.name)[:200] for d in pairs[0])
        corpus.notes.append(
            f"{NEAR_DUPLICATES} {plural(len(pairs), 'file')}, each on the same side as its original ({example})"
        )


def _files(documents: Sequence[Document]) -> list[Document]:
    return [d for d in documents if not isinstance(d, RecordDocument)]


def _groups(corpus: Corpus, documents: Sequence[Document]) -> list[_Group]:
    """The files in groups of near-duplicates."""
    groups: dict[str, list[Document]] = {}
    files = sorted(_files(documents), key=lambda d: d.digest in corpus.duplicates)  # a group's first file first
    for file in files:
        groups.setdefault(corpus.duplicates.get(file.digest, file.digest), []).append(file)
    size, count = LARGE * sum(d.size for d in files), LARGE * len(files)
    large = {k for k, g in groups.items() if len(g) > 1 and (len(g) > count or sum(d.size for d in g) > size)}
    return [_Group(group, group[0].split_hash + (key in large)) for key, group in groups.items()]


def _order_for_selection(groups: Sequence[_Group], share: float) -> tuple[list[_Group], int]:
    """The groups in the order in which they are selected for validation, and the number of selected groups.

    Groups are selected by their hashes until they have about `share` of the text of each suffix and size. If a
    group is too large to be selected, smaller groups replace it. Groups come last if they exceed a quarter of the
    fraction `share` (at least SHARE) of the text, or have 1 added to their hash.
    """
    size, suffixes = sum(g.size for g in groups), Counter(g.suffix for g in groups)
    large = {id(g) for g in groups if g.split_hash >= 1 or g.size > max(share, SHARE) * size / 4}
    strata: dict[tuple[int, str], list[_Group]] = {}
    for group in sorted(groups, key=_group_order):
        suffix = group.suffix if suffixes[group.suffix] >= COMMON else ""
        strata.setdefault((-group.size.bit_length() // 2, suffix), []).append(group)
    selected, remaining, target, total = list[_Group](), list[_Group](), 0.0, 0.0
    for _, stratum in sorted(strata.items()):
        target += share * sum(g.size for g in stratum)
        for group in stratum:
            takes = id(group) not in large and total + group.size / 2 <= target
            (selected if takes else remaining).append(group)
            total += group.size * takes
    return [*selected, *sorted(remaining, key=lambda g: (id(g) in large, *_group_order(g)))], len(selected)


def _group_order(group: _Group) -> tuple[float, str]:
    return group.split_hash, group.files[0].name


def _divide(corpus: Corpus, documents: Sequence[Document], share: float) -> None:
    """Set `corpus.train` and `corpus.valid`.

    If there are several groups and no validation records, at least one group is for validation.
    """
    records = [d for d in documents if isinstance(d, RecordDocument)]
    groups = _groups(corpus, documents)
    valid: list[Document] = [d for d in records if d.validation]
    groups, count = _order_for_selection(groups, share)
    count = max(0, min(max(count, not valid), len(groups) - 1))
    name = attrgetter("name")
    corpus.valid = sorted([*(d for g in groups[:count] for d in g.files), *valid], key=name)
    train = [d for g in groups[count:] for d in g.files]
    corpus.train = sorted([*train, *(d for d in records if not d.validation)], key=name)


def without_files(corpus: Corpus) -> Corpus:
    """The corpus with the tail of each document for validation. Only the first of several near-duplicates is kept.

    Otherwise, the training text of one near-duplicate would contain the validation tail of another.
    """
    documents = [d for d in corpus.documents if d.digest not in corpus.duplicates]
    notes = [note for note in corpus.notes if not note.startswith(NEAR_DUPLICATES)]
    if dropped := len(corpus.documents) - len(documents):
        notes.append(f"{NEAR_DUPLICATES} {plural(dropped, 'file')} left out, since tails are for validation")
    return replace(corpus, train=documents, valid=[], test=[], split="tails", notes=notes)
