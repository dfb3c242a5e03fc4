"""Tokens of a corpus on disk: private, immutable, digested, mapped into memory.

A shard is a folder with `tokens.bin` (little-endian ids, one document after another, each closed by
the end token) and `shard.json`. It is kept under a key made of the documents' contents, the tokenizer
and the settings, so a changed corpus or tokenizer never meets old tokens.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, file_digest, sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dunes.data.sources import Document
from dunes.text import Tokenizer

FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """`length` token ids, all below `vocab`, that stand for `size` bytes of text in `documents` files."""

    folder: Path
    length: int
    size: int
    documents: int
    vocab: int
    key: str

    @cached_property
    def tokens(self) -> NDArray[np.uint16] | NDArray[np.uint32]:
        """All ids, mapped from the file."""
        return np.memmap(self.folder / "tokens.bin", _dtype(self.vocab), "r", shape=(self.length,))


def default_cache() -> Path:
    """Where shards are kept: $DUNES_HOME, or the user's cache folder."""
    home = (
        os.environ.get("DUNES_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dunes"
    )
    return Path(home) / "tokens"


def cached(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    cache: Path | None = None,
    told: Callable[[int], None] = lambda size: None,
) -> Shard:
    """The shard of these documents, from the cache or written now; `told` hears of bytes as they are done.

    Raises ValueError if a document changes under our hands.
    """
    card = _card(documents, tokenizer)
    folder = (cache or default_cache()) / str(card["key"])
    if (shard := _read(folder, card)) is not None:
        return shard
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:8]}-", dir=folder.parent))  # private: mode 0700
    try:
        _write(made, documents, tokenizer, card, told)
        if _read(folder, card) is None:  # or another process was faster, and its shard may be in use
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one, if any
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    shard = _read(folder, card)
    assert shard is not None, "a shard that was just written reads back"
    return shard


def _card(documents: Sequence[Document], tokenizer: Tokenizer) -> dict[str, str | int]:
    """What shard.json will say, as far as that is known before a token is made."""
    return {
        "format": FORMAT,
        "key": _key(documents, tokenizer),
        "size": sum(d.size for d in documents),
        "documents": len(documents),
        "vocab": tokenizer.vocab,
    }


def _key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    seen = blake2b(f"{FORMAT}\n{tokenizer.json()}".encode(), digest_size=20)
    for document in documents:
        seen.update(document.digest.encode())
    return seen.hexdigest()


def _dtype(vocab: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def _write(
    folder: Path,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    card: dict[str, str | int],
    told: Callable[[int], None],
) -> None:
    dtype, end, length, digest = _dtype(tokenizer.vocab), tokenizer.end, 0, sha256()
    path = folder / "tokens.bin"
    with path.open("wb") as file:
        for document in documents:
            for block in document.text():
                ids = [i for piece in tokenizer.encode_all(_pieces(block)) for i in piece]
                length += len(ids)
                digest.update(data := np.array(ids, dtype).tobytes())
                file.write(data)
            digest.update(data := np.array([end], dtype).tobytes())
            file.write(data)
            length += 1
            told(document.size)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o400)
    (folder / "shard.json").write_text(json.dumps(card | {"length": length, "sha256": digest.hexdigest()}))


def _pieces(block: str, size: int = 1 << 16) -> list[str]:
    """Parts of a block that end at line ends, where tokens end too: work for all cores."""
    parts, start = [], 0
    while start < len(block):
        end = block.find("\n", start + size)
        end = len(block) if end < 0 else end + 1
        parts.append(block[start:end])
        start = end
    return parts


def _read(folder: Path, card: dict[str, str | int]) -> Shard | None:
    """The shard in this folder if it is whole: the card, the size, and the digest it was written with."""
    try:
        found = json.loads((folder / "shard.json").read_text())
        length, path = found["length"], folder / "tokens.bin"
        whole = all(found[k] == v for k, v in card.items())
        whole = whole and path.stat().st_size == length * _dtype(found["vocab"]).itemsize
        if not whole or _digest(path) != found["sha256"]:
            return None
        return Shard(folder, length, found["size"], found["documents"], found["vocab"], found["key"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
