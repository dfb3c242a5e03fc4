"""JSON objects from files that others wrote: bounded, and refused in one line."""

import json
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""Bytes. The largest index of a published model has some hundred kilobytes, a tokenizer some ten megabytes."""


def read(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError for anything else, for a key that stands there twice, too."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(
            f"{path}: {size / 1e6:.0f} MB are too much for a JSON file; {LARGEST / 1e6:.0f} MB is the limit"
        )
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands there twice")
    return content
