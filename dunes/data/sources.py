"""A corpus: the text files in some files and folders, less what nobody wants to learn.

What .gitignore excludes, binaries, generated giants and exact duplicates are passed over, and
counted with their reasons. Validation is whole files, chosen by a hash of their path, so that the
same file is on the same side on every machine and after every edit elsewhere.
"""

import codecs
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from dunes.data.ignore import Rules, above, ignored, parsed, rules
from dunes.text.plural import plural

BLOCK = 1 << 20
GIANT = 400_000
NEVER = {".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "site-packages"}
STDLIB_TESTS = ["test/", "tests/", "idle_test/", "site-packages/"]


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
            yield from _decoded(self.path, seen)
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
        kept = f"{plural(len(self.train), 'file')} to learn, {len(self.valid)} to validate, {size:.1f} MB"
        return f"{kept}; passed over: {skipped or 'nothing'}"


def collect(sources: Sequence[str | Path], share: float = 0.05) -> Corpus:
    """The corpus of some files and folders; `stdlib` names the running Python's standard library.

    About `share` of the files, and of several at least one, but never all, go to validation. Raises
    ValueError if a source is missing, or if no text is found.
    """
    corpus = Corpus()
    documents: dict[str, Document] = {}
    for path, name, named in _files(sources, corpus):
        found = _examine(path, name, named)
        if isinstance(found, str):
            corpus.skipped.setdefault(found, []).append(name)
        elif found.digest in documents:
            corpus.skipped.setdefault("duplicates", []).append(name)
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


def _files(sources: Sequence[str | Path], corpus: Corpus) -> Iterator[tuple[Path, str, bool]]:
    """(path, name within its source, whether the user named the file itself)."""
    for source in sources:
        if str(source) == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"]).resolve()
            yield from _walk(root, root, [(root, parsed(STDLIB_TESTS))], corpus)
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            yield from _walk(path, path, above(path), corpus)
        elif path.exists():
            yield path, path.name, True
        else:
            raise ValueError(f"{path}: no such file or folder")


def _walk(folder: Path, root: Path, found: Rules, corpus: Corpus) -> Iterator[tuple[Path, str, bool]]:
    """Every file below, in the order of names. A link to a folder is not followed: it may lead back."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError:
        corpus.skipped.setdefault("unreadable", []).append(folder.relative_to(root).as_posix())
        return
    found, real = [*found, *rules(folder)], folder.resolve()
    for entry in entries:
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        name = path.relative_to(root).as_posix()
        if entry.name in NEVER or (entry.is_symlink() and os.path.isdir(path)):
            continue
        if ignored(real / entry.name, is_folder, found):
            corpus.skipped.setdefault("ignored", []).append(name)
        elif is_folder:
            yield from _walk(path, root, found, corpus)
        else:
            yield path, name, False


def _examine(path: Path, name: str, named: bool) -> Document | str:
    """The document, or why it is none. A file that the user named himself is never too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not regular files"
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if b"\0" in head:
            return "binary"
        if not head.strip():
            return "empty"
        if not named and status.st_size > GIANT and generated(head):
            return "generated"
        seen = blake2b(digest_size=16)
        for block in _decoded(path, seen):
            if "\0" in block:
                return "binary"
        return Document(path, name, status.st_size, seen.hexdigest())
    except UnicodeDecodeError:
        return "not UTF-8"
    except OSError:
        return "unreadable"


def _decoded(path: Path, seen: "blake2b") -> Iterator[str]:
    """Blocks of whole lines of a UTF-8 file; its bytes go into the digest on the way."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            seen.update(data)
            text = rest + decoder.decode(data)
            cut = text.rfind("\n") + 1 or (len(text) if len(text) > 4 * BLOCK else 0)
            if cut:
                yield text[:cut]
            rest = text[cut:]
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
