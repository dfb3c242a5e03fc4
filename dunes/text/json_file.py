"""JSON objects from files that others wrote: bounded, and refused in one line."""

import json
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""Bytes. The index of a published model of 90,000 tensors has nine megabytes."""
CONFIG = 8 << 20
"""Bytes of a file of settings; most have a kilobyte."""
PARTS = 2_000_000
"""Commas and brackets: each may stand for an object, which takes twenty times its place in the file."""


def read(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes.

    Raises ValueError for anything else, for a key that stands there twice, too.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(
            f"{path}: {size / 1e6:.0f} MB are too much for a JSON file; {largest / 1e6:.0f} MB is the limit"
        )
    return parsed(path.read_bytes(), path)


def read_if_present(path: Path) -> dict[str, Any]:
    """The object in a JSON file of settings; empty if there is no file. Raises ValueError like `read`."""
    return read(path, CONFIG) if path.is_file() else {}


def parsed(text: bytes, path: Path) -> dict[str, Any]:
    """The object in the text of a JSON file that messages call `path`. Raises ValueError like `read`."""
    if (parts := sum(map(text.count, (b",", b"[", b"{")))) > PARTS:
        raise ValueError(
            f"{path}: {parts:,} commas and brackets are too many for a JSON file; {PARTS:,} is the limit"
        )
    try:
        content = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as a hook of the parser. Raises ValueError for a key that stands there twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return content
