"""A corpus: the text files in some files and folders, less what nobody wants to learn.

What .gitignore excludes, binaries, generated giants and exact duplicates are passed over, and
counted with their reasons. Validation is whole files, chosen by a hash of their path, so that the
same file is on the same side on every machine and after every edit elsewhere.
"""

import codecs
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from dunes.data.files import OUTSIDE, SourceFile, Walk, open_plain

BLOCK = 1 << 20
GIANT = 400_000


@dataclass(frozen=True)
class Document:
    """One file of text. `name` is its path within the source; `digest` is of its bytes."""

    path: Path
    name: str
    size: int
    digest: str

    def text(self) -> Iterator[str]:
        """The text in blocks that end at line ends, so that a file may be larger than memory.

        Raises ValueError if the file is no longer what it was when it was collected.
        """
        seen, whole = blake2b(digest_size=16), False
        try:
            yield from _decoded(self.path, seen, self.size)
            whole = seen.hexdigest() == self.digest
        except (OSError, UnicodeDecodeError):
            pass
        if not whole:
            raise ValueError(f"{self.path}: changed while it was being read; start again")

    @property
    def place(self) -> float:
        """Where the path's hash falls in [0, 1)."""
        return int.from_bytes(blake2b(self.name.encode(errors="surrogateescape"), digest_size=8).digest()) / 2**64


@dataclass
class Corpus:
    """The documents of a corpus, those kept for validation, and what was passed over and why."""

    train: list[Document] = field(default_factory=list)
    valid: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return Counter({reason: len(names) for reason, names in self.skipped.items()})

    def report(self) -> str:
        """One line: how much was found and what was passed over."""
        size = sum(d.size for d in self.train + self.valid) / 1e6
        skipped = ", ".join(f"{n} {reason}" for reason, n in self.counts.most_common())
        kept = f"{len(self.train)} files to learn, {len(self.valid)} to validate, {size:.1f} MB"
        hint = "; --follow-links reads what lies outside" if OUTSIDE in self.skipped else ""
        return f"{kept}; passed over: {skipped or 'nothing'}{hint}"


def collect(sources: Sequence[str | Path], share: float = 0.05, follow_links: bool = False) -> Corpus:
    """The corpus of some files and folders; `stdlib` names the running Python's standard library.

    About `share` of the files, and of several at least one, but never all, go to validation. Links that lead
    outside the sources are read with `follow_links` only. Raises ValueError if a source is missing, or if no
    text is found.
    """
    walk = Walk(sources, follow_links)
    corpus = Corpus(skipped=walk.skipped)
    documents: dict[str, Document] = {}
    for file in walk.files():
        found = _examine(file)
        if isinstance(found, str):
            walk.skip(found, file.name)
        elif found.digest in documents:
            walk.skip("duplicates", file.name)
        else:
            documents[found.digest] = found
    if not documents:
        where = ", ".join(map(str, sources))
        raise ValueError(
            f"{where}: no text to learn from ({corpus.report()}); give files or folders of UTF-8 text"
        )
    order = sorted(documents.values(), key=lambda d: (d.place, d.name))
    held = min(max(sum(d.place < share for d in order), 1), len(order) - 1)
    corpus.valid, corpus.train = sorted(order[:held], key=_name), sorted(order[held:], key=_name)
    return corpus


def _name(document: Document) -> str:
    return document.name


def _examine(file: SourceFile) -> Document | str:
    """The document, or why it is none. A file that the user named himself is never too large."""
    try:
        status = file.path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not regular files"
        if not status.st_size:  # nor are files read that say so and have content: of /proc, and some never end
            return "empty"
        with open_plain(file.path) as opened:
            head = opened.read(1 << 16)
        if b"\0" in head:
            return "binary"
        if not head.strip():
            return "empty"
        if not file.named and status.st_size > GIANT and generated(head):
            return "generated"
        seen = blake2b(digest_size=16)
        for block in _decoded(file.path, seen, status.st_size):
            if "\0" in block:
                return "binary"
        return Document(file.path, file.name, status.st_size, seen.hexdigest())
    except UnicodeDecodeError:
        return "not UTF-8"
    except _ChangedError:
        return "changed while being read"
    except OSError:
        return "unreadable"


class _ChangedError(OSError):
    """A file has more or fewer bytes than it had."""


def _decoded(path: Path, seen: "blake2b", size: int) -> Iterator[str]:
    """Blocks of whole lines of a UTF-8 file of so many bytes, which go into the digest on the way.

    No more is read than the size, so that a file that grows all the time has an end.
    """
    decoder, rest, left = codecs.getincrementaldecoder("utf-8")(), "", size + 1
    with open_plain(path) as file:
        while data := file.read(min(BLOCK, left)):
            left -= len(data)
            seen.update(data)
            text = rest + decoder.decode(data)
            cut = text.rfind("\n") + 1 or (len(text) if len(text) > 4 * BLOCK else 0)
            if cut:
                yield text[:cut]
            rest = text[cut:]
    if left != 1:
        raise _ChangedError(f"{path}: changed while it was being read")
    decoder.decode(b"", True)
    if rest:
        yield rest


def generated(head: bytes) -> bool:
    """Whether a large file looks like a program's output: it says so, or is mostly not words, or has no lines."""
    lower = head[:2000].lower()
    if any(mark in lower for mark in (b"@generated", b"do not edit", b"generated by")):
        return True
    words = sum(head.count(bytes([b])) for b in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n\t")
    words += sum(b >= 0x80 for b in head)
    return words < 0.6 * len(head) or len(head) / (head.count(b"\n") + 1) > 5000
