"""Read JSON objects from untrusted files, with limits on size and errors in one line."""

import json
from os.path import lexists
from pathlib import Path
from typing import Any

from dunes.files.model_file import read_file

MAX_BYTES = 64 << 20
"""The index of a published model of 90,000 tensors has nine megabytes."""
MAX_CONFIG_BYTES = 8 << 20
"""Limit for a config file; most have a kilobyte."""
_ERRORS = {"error", "errors", "message", "detail"}
_BESIDE_ERRORS = {"code", "status", "status_code", "statusCode", "success", "title", "type"}
"""Keys of what servers send in place of a file."""
MAX_ITEMS = 2_000_000
"""Commas and brackets: each may be an object, which takes twenty times its size in the file."""


def read(path: Path, largest: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `largest` bytes.

    Raises ValueError for anything else, for a link that leads out of its folder, and for a duplicate key.
    """
    return parse(read_file(path, largest), path)


def read_if_present(path: Path) -> dict[str, Any]:
    """The object in a config file; empty if there is no file. Raises ValueError like `read`."""
    return read(path, MAX_CONFIG_BYTES) if lexists(path) else {}


def parse(text: bytes, path: Path, most: int = MAX_ITEMS) -> dict[str, Any]:
    """The object in the text of a JSON file; `path` is for error messages. Raises ValueError like `read`."""
    if (items := sum(map(text.count, (b",", b"[", b"{")))) > most:
        raise ValueError(f"{path}: {items:,} commas and brackets; a JSON file has at most {most:,}")
    try:
        content = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not JSON: byte {error.start} is not UTF-8; save it in UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    if _ERRORS & content.keys() and content.keys() <= _ERRORS | _BESIDE_ERRORS:
        raise ValueError(f"{path}: an error that a server sent, {ascii(text[:80])[1:]}; fetch the file again")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, as a hook of the JSON parser. Raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return content
