"""The card of a model folder, `dunes.json`, and whether the folder's other files are those that it names."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dunes.checkpoint import atomic
from dunes.checkpoint.inside import inside
from dunes.checkpoint.seen import Seen, note_of
from dunes.plural import plural
from dunes.text import json_file

CARD = "dunes.json"
FORMAT = 1
MOST_FILES = 20_000


def read(folder: Path) -> dict[str, Any]:
    """What the folder's card says; empty without one. Raises ValueError if it is damaged."""
    if not (folder / CARD).is_file():
        return {}
    card = json_file.read(folder / CARD)
    if not isinstance(changes := card.get("changes", []), list):
        raise ValueError(
            f"{folder / CARD}: 'changes' must be a list, not {type(changes).__name__}; {_remedy(folder)}"
        )
    return card


def named(folder: Path, card: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that a card names; none for an empty card.

    Raises ValueError if it says something else.
    """
    files = card.get("files", None if card else {})
    if not isinstance(files, dict) or not all(map(_fact, files.values())):
        raise ValueError(f"{folder / CARD}: 'files' must hold size and sha256 of each file; {_remedy(folder)}")
    if len(files) > MOST_FILES:
        raise ValueError(f"{folder / CARD}: names {len(files):,} files; {MOST_FILES:,} are the limit")
    return {name: (fact["size"], fact["sha256"]) for name, fact in files.items()}


def check(folder: Path, card: Mapping[str, Any], digests: bool = True) -> None:
    """Raise ValueError for the first file that is not the card's.

    Each must be a plain file in the folder, of that size, and with `digests` of that SHA-256; of what was
    hashed before and has not changed since that is known.
    """
    files = named(folder, card)
    paths = {name: inside(folder, name, folder / CARD) for name in files}
    for name, (size, _) in files.items():
        if (found := paths[name].stat().st_size) != size:
            raise _another(folder, name, f"{plural(found, 'byte')} instead of {size}")
    if digests and files:
        _digests(folder, {name: (paths[name], digest) for name, (_, digest) in files.items()})


def _digests(folder: Path, files: Mapping[str, tuple[Path, str]]) -> None:
    seen = Seen(note_of(folder))
    for name, (path, digest) in files.items():
        if wrong := seen.wrong(path, digest, partial(_hashed, path, digest)):
            raise _another(folder, name, wrong)
    seen.keep()


def _hashed(path: Path, digest: str) -> str | None:
    return None if atomic.digest(path) == digest else "another SHA-256"


def _another(folder: Path, name: str, how: str) -> ValueError:
    return ValueError(
        f"{folder / name}: not the bytes that were written ({how}); the save was interrupted or the file was "
        f"changed since; {_remedy(folder)}"
    )


def _remedy(folder: Path) -> str:
    return f"if it was changed on purpose, remove {folder / CARD}"


def _fact(fact: Any) -> bool:
    return isinstance(fact, dict) and type(fact.get("size")) is int and isinstance(fact.get("sha256"), str)
