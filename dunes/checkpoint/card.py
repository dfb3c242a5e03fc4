"""The card of a model folder, `dunes.json`, with digests of the other files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files import atomic, json_file
from dunes.files.model_file import find_file, listed_file
from dunes.units import plural

CARD = "dunes.json"
FORMAT = 3
MAX_FILES = 20_000
MAX_CHANGES = 500
"""Most changes in a card, as repeating the structure of each visits all modules."""


def read_card(folder: Path) -> dict[str, Any]:
    """The folder's card, or {} without one. Raises ValueError if it is damaged."""
    if find_file(folder, CARD) is None:
        return {}
    card = json_file.read(folder / CARD)
    for key in ("changes", "history"):
        if not isinstance(changes := card.get(key, []), list) or not all(isinstance(c, dict) for c in changes):
            raise ValueError(f"{folder / CARD}: {key!r} must be a list of objects; download the file again")
        if len(changes) > MAX_CHANGES:
            raise ValueError(f"{folder / CARD}: lists {len(changes):,} changes; the limit is {MAX_CHANGES:,}")
    if type(number := card.get("format", FORMAT)) is not int or number > FORMAT:
        raise ValueError(f"{folder / CARD}: of format {quote(number)}, this version reads {FORMAT}; update dunes")
    if card.get("format") == 1 and "context" in card:  # the name in format 1
        card["context_length"] = card.pop("context")
    return card


def listed_files(folder: Path, card: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that a card lists. Raises ValueError for a damaged card."""
    files = card.get("files", None if card else {})
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise ValueError(f"{folder / CARD}: 'files' must have size and sha256 of each file, or be {{}}")
    if len(files) > MAX_FILES:
        raise ValueError(f"{folder / CARD}: names {len(files):,} files; the limit is {MAX_FILES:,}")
    return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}


def check_files(folder: Path, card: Mapping[str, Any], max_bytes: float = atomic.LARGE) -> None:
    """Raise ValueError for the first file that differs from its entry in the card.

    Each must be a plain file in the folder with the listed size and, if all files have at most `max_bytes` in
    total, the listed SHA-256.
    """
    files = listed_files(folder, card)
    paths = {name: listed_file(folder, name, folder / CARD) for name in files}
    for name, (size, _) in files.items():
        if (actual := paths[name].stat().st_size) != size:
            raise _file_error(folder, name, f"{plural(actual, 'byte')} instead of {size}")
    total = sum(size for size, _ in files.values())
    if total > max_bytes:
        return
    with atomic.progress("hashing", total) as advance:
        for name, (_, digest) in files.items():
            if atomic.digest(paths[name], advance) != digest:
                raise _file_error(folder, name, "another SHA-256")


def _file_error(folder: Path, name: str, reason: str) -> ValueError:
    return ValueError(
        f"{folder / name}: not the bytes that were written ({reason}); the save was interrupted or the file was "
        f"changed since; if it was changed on purpose, set 'files' to {{}} in {folder / CARD}"
    )


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
