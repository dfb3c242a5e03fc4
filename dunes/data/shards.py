"""Token shards: the ids of a corpus on disk, in private, immutable files with a digest.

A shard is a folder with `tokens.bin` (little-endian ids; each text has its start and end tokens), `starts.bin`
(the index of each text's first id, in eight bytes) and `shard.json`. The shard's key is a hash of the documents'
contents, the tokenizer and the settings, so a changed corpus or tokenizer gets a new shard.

A shard is written in batches. `batches.bin` has each batch's sizes and digest, so that a new writer can continue
the work of a killed writer.
"""

import json
import os
import platform
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dunes.context import prefix_errors
from dunes.data.document import BLOCK, Document
from dunes.data.fim import FILE
from dunes.files.atomic import cache_home, folder_lock, staging_folder
from dunes.progress import advance, phase
from dunes.text import Tokenizer
from dunes.text.lines import line_parts

FORMAT = 2
"""Format version; increase it if the ids, or their division into batches, change."""
BATCHES = "batches.bin"
ENTRY = Struct("<II32s")
"""Size in bytes of a batch's ids, size in bytes of its starts, and the SHA-256 of both."""
AHEAD = 4
"""Maximum number of batches that are tokenized ahead of the batch that is written."""
Batch = tuple[int, list[str | list[int] | None]]
"""Size of the texts in bytes, and a list: strings to encode, ids to insert, and None where a text starts."""
Encoded = tuple[int, NDArray[np.uint32], NDArray[np.int64]]
"""Size of the texts in bytes, their ids, and the index of each text's first id."""


@dataclass(frozen=True)
class Shard:
    """A shard with `length` token ids, all below `vocab`, from `size` bytes of text in `documents` documents."""

    folder: Path
    length: int
    size: int
    documents: int
    vocab: int
    key: str

    @cached_property
    def tokens(self) -> NDArray[np.uint16] | NDArray[np.uint32]:
        """All ids, memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", _dtype(self.vocab), "r", shape=(self.length,))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first id of each text."""
        return np.fromfile(self.folder / "starts.bin", "<i8")

    @cached_property
    def token_file(self) -> "TokenFile":
        """All ids, read from the file on demand."""
        return TokenFile(self.folder / "tokens.bin", _dtype(self.vocab), self.length)


class TokenFile:
    """Ids in a file that is read on demand, without a memory map.

    If a memory-mapped file is truncated, the process that reads it is killed. This class raises ValueError instead
    if the size or modification time of the file has changed since it was opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        self.path, self.dtype, self.length = path, dtype, length
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._initial_stat = self._stat()

    def __repr__(self) -> str:
        return f"TokenFile({self.path}, {self.length:,} ids of {self.dtype})"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """The ids (N, T) at an index (N, T). Each row is read at once, from its smallest to its largest index."""
        if self._stat() != self._initial_stat:
            raise ValueError(f"{self.path}: the tokens changed while they were in use; start again")
        return np.stack([self._span(int(i.min()), int(i.max()) + 1)[i - i.min()] for i in index])

    def _span(self, start: int, stop: int) -> NDArray[Any]:
        width = self.dtype.itemsize
        return np.frombuffer(os.pread(self._file, (stop - start) * width, start * width), self.dtype)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


def default_cache() -> Path:
    """The folder of shards in $DUNES_HOME, or in the user's cache folder."""
    return cache_home() / "tokens"


def token_shard(
    documents: Sequence[Document], tokenizer: Tokenizer, cache: Path | None = None, *, headers: bool = False
) -> Shard:
    """The shard of these documents, from the cache or newly written; an unfinished shard is completed.

    With `headers`, each file starts with its `file_header`. Raises ValueError if a document changes meanwhile, or
    if the tokenizer lacks the token that headers need.
    """
    card = _card(documents, tokenizer, headers)
    folder = (cache or default_cache()) / str(card["key"])
    if (shard := _read(folder, card)) is not None:
        return shard
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder, f"{card['key']}-{platform.node()}") as staged:  # other machines may not see locks
        staged.chmod(0o700)
        with phase("tokenizing"):
            _write(staged, documents, tokenizer, card, headers)
        with folder_lock(folder.parent):
            if _read(folder, card) is None:  # otherwise, another writer was faster, and its shard may be in use
                shutil.rmtree(folder, ignore_errors=True)  # a damaged shard, if any
                staged.rename(folder)
                (folder / BATCHES).unlink()
                for name in ("tokens.bin", "starts.bin"):  # not earlier, so that another writer can resume
                    (folder / name).chmod(0o400)
            shutil.rmtree(staged, ignore_errors=True)
    shard = _read(folder, card)
    assert shard is not None, "a shard that was just written cannot be read"
    return shard


def file_header(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Ids before a file in a stream of files: <|file_sep|>, the file's path and a line end; empty for records.

    Raises ValueError if the tokenizer has no <|file_sep|>.
    """
    header = document.header
    return [tokenizer.token_id(FILE), *tokenizer.encode_continuation(header)] if header else []


def _card(documents: Sequence[Document], tokenizer: Tokenizer, headers: bool) -> dict[str, str | int]:
    """The content of shard.json that is known before tokenizing."""
    return {
        "format": FORMAT,
        "key": _key(documents, tokenizer, headers),
        "size": sum(d.size for d in documents),
        "documents": len(documents),
        "vocab": tokenizer.vocab,
    }


def _key(documents: Sequence[Document], tokenizer: Tokenizer, headers: bool) -> str:
    specials = f"{tokenizer.text_start} {tokenizer.eos}"  # not part of a tokenizer.json
    hasher = blake2b(f"{FORMAT} {specials}\n{tokenizer.json()}".encode(), digest_size=20)
    for document in documents:
        hasher.update(document.digest.encode())
        if headers:
            hasher.update(repr(document.header).encode())  # quotation marks distinguish headers from digests
    return hasher.hexdigest()


def _dtype(vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def _write(
    folder: Path, documents: Sequence[Document], tokenizer: Tokenizer, card: dict[str, str | int], headers: bool
) -> None:
    dtype, digest = _dtype(tokenizer.vocab), sha256()
    tick, batches = advance(sum(d.size for d in documents)), _batches(documents, tokenizer, headers)
    add: Callable[[str], BinaryIO] = lambda name: (folder / name).open("a+b")
    with add("tokens.bin") as tokens, add("starts.bin") as starts, add(BATCHES) as entries:
        for size, _ in islice(batches, _resume(tokens, starts, entries, digest)):
            tick(size)
        for size, ids, positions in _tokenized(batches, tokenizer):
            positions += tokens.tell() // dtype.itemsize
            data = ids.astype(dtype).tobytes(), positions.astype("<i8").tobytes()
            digest.update(data[0])
            entry = ENTRY.pack(*map(len, data), sha256(b"".join(data)).digest())
            for file, content in zip((tokens, starts, entries), (*data, entry), strict=True):
                file.write(content)
                file.flush()
            tick(size)
        os.fsync(tokens.fileno())
        length = tokens.tell() // dtype.itemsize
    digest.update((folder / "starts.bin").read_bytes())
    (folder / "shard.json").write_text(json.dumps(card | {"length": length, "sha256": digest.hexdigest()}))


def _resume(tokens: BinaryIO, starts: BinaryIO, entries: BinaryIO, digest: Any) -> int:
    """Truncate a killed writer's files after its intact batches, and return the number of these batches.

    The digest is updated with the ids of these batches.
    """
    files, ends = (tokens, starts, entries), [0, 0, 0]
    for file in files:
        file.seek(0)
    while len(entry := entries.read(ENTRY.size)) == ENTRY.size:
        size, start_size, expected = ENTRY.unpack(entry)
        ids, positions = tokens.read(size), starts.read(start_size)
        if sha256(ids + positions).digest() != expected:
            break
        digest.update(ids)
        ends = [file.tell() for file in files]
    for file, end in zip(files, ends, strict=True):
        file.truncate(end)
        file.seek(end)
    return ends[2] // ENTRY.size


def _tokenized(batches: Iterator[Batch], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode batches ahead in two threads, since converting ids to Python integers occupies only one core."""
    waiting = deque[Future[Encoded]]()
    with ThreadPoolExecutor(2, "tokenizer") as pool:
        for batch in batches:
            waiting.append(pool.submit(_encode, batch, tokenizer))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def _encode(batch: Batch, tokenizer: Tokenizer) -> Encoded:
    (size, parts), ids, starts = batch, list[int](), list[int]()
    encoded = tokenizer.encode_all([part for part in parts if isinstance(part, str)])
    for part in parts:
        if part is None:
            starts.append(len(ids))
        else:
            ids += next(encoded) if isinstance(part, str) else part
    return size, np.array(ids, np.uint32), np.array(starts, np.int64)


def _batches(documents: Sequence[Document], tokenizer: Tokenizer, headers: bool) -> Iterator[Batch]:
    """Yield batches of about BLOCK bytes of text."""
    size, parts = 0, list[str | list[int] | None]()
    for document in documents:
        header = file_header(document, tokenizer) if headers else []
        for text in document.texts():
            parts += [None, tokenizer.text_start + header]
            lines = (part for block in text for part in line_parts(block))
            for part in lines if tokenizer.line_separable else ["".join(lines)]:
                parts.append(part)
                size += len(part.encode())
                if size > BLOCK:
                    yield size, parts
                    size, parts = 0, []
            parts.append([tokenizer.eos])
    yield size, parts


def _read(folder: Path, card: dict[str, str | int]) -> Shard | None:
    """The shard in this folder; None unless the shard is intact and matches `card`."""
    try:
        shard = open_shard(folder)
    except ValueError:
        return None
    return shard if all(getattr(shard, k) == v for k, v in card.items() if k != "format") else None


def open_shard(folder: Path) -> Shard:
    """The shard in a folder. Raises ValueError if shard.json, the size or the digest is wrong."""
    hasher = sha256()
    errors = OSError, ValueError, LookupError, TypeError
    with prefix_errors(f"{folder}: not a shard of tokens", errors, describe=repr):
        card = json.loads((folder / "shard.json").read_text())
        format, digest = card["format"], card["sha256"]
        shard = Shard(folder, *(card[k] for k in ("length", "size", "documents", "vocab", "key")))
        with (folder / "tokens.bin").open("rb") as file:
            while data := file.read(1 << 22):
                hasher.update(data)
        hasher.update((folder / "starts.bin").read_bytes())
    if format != FORMAT:
        raise ValueError(f"{folder}: format {format!r}; this version reads {FORMAT}")
    size = shard.length * _dtype(shard.vocab).itemsize
    if hasher.hexdigest() != digest or (folder / "tokens.bin").stat().st_size != size:
        raise ValueError(f"{folder}: the SHA-256 or size of tokens.bin and starts.bin does not match shard.json")
    return shard
