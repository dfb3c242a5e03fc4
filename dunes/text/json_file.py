"""Read JSON objects from untrusted files, with limits on size and errors in one line."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""The index of a published model of 90,000 tensors has nine megabytes."""
MAX_CONFIG_BYTES = 8 << 20
"""Limit for a config file; most have a kilobyte."""
MAX_ITEMS = 2_000_000
"""Commas and brackets: each may be an object, which takes twenty times its size in the file."""


def read(path: Path, largest: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `largest` bytes.

    Raises ValueError for anything else, also for a duplicate key.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path}: {size / 1e6:.0f} MB; a JSON file has at most {largest / 1e6:.0f} MB")
    return parse(path.read_bytes(), path)


def read_if_present(path: Path) -> dict[str, Any]:
    """The object in a config file; empty if there is no file. Raises ValueError like `read`."""
    return read(path, MAX_CONFIG_BYTES) if path.is_file() else {}


def parse(text: bytes, path: Path, most: int = MAX_ITEMS) -> dict[str, Any]:
    """The object in the text of a JSON file; `path` is for error messages. Raises ValueError like `read`."""
    if (items := sum(map(text.count, (b",", b"[", b"{")))) > most:
        raise ValueError(f"{path}: {items:,} commas and brackets; a JSON file has at most {most:,}")
    try:
        content = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, as a hook of the JSON parser. Raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return content
