"""Which ids stand at the beginning of a text and which end it, from the files beside a tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dunes.text import json_file


@dataclass(frozen=True)
class Marks:
    """What a folder's files say of a tokenizer's marks; None where they say nothing.

    `begin` stands in front of a text, `end` after it, and each of `stops` ends what a model writes.
    """

    begin: tuple[int, ...] | None = None
    end: int | None = None
    stops: frozenset[int] = frozenset()


def marks(folder: Path, number: Callable[[str], int | None]) -> Marks:
    """From tokenizer_config.json, generation_config.json and config.json; `number` is the id of a token.

    Raises ValueError that names the file and the key for what is neither a token nor ids.
    """
    path = folder / "tokenizer_config.json"
    words = json_file.read_if_present(path)
    first, last = (_id(path, words, key, number) for key in ("bos_token", "eos_token"))
    ids = [last] if last is not None else []
    for name in ("config.json", "generation_config.json"):
        ids += _ids(folder / name)
    adds = words.get("add_bos_token")
    begin = (first,) if adds is True and first is not None else () if adds is False else None
    return Marks(begin, ids[0] if ids else None, frozenset(ids))


def token(words: dict[str, Any], key: str) -> str | None:
    """A token as tokenizer_config.json spells it: a text, or an object with its `content`."""
    found = words.get(key)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _id(path: Path, words: dict[str, Any], key: str, number: Callable[[str], int | None]) -> int | None:
    if words.get(key) is None:
        return None
    text = token(words, key)
    if text is None:
        raise ValueError(f"{path}: {key} is {ascii(words[key])[:80]}; expected a token's text")
    try:
        return number(text)
    except UnicodeEncodeError:
        raise ValueError(f"{path}: {key} is {ascii(text)[:80]}; expected a token's text") from None


def _ids(path: Path) -> list[int]:
    found = json_file.read_if_present(path).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{path}: eos_token_id is {ascii(found)[:80]}; expected an id or a list of ids")
    return ids
