"""Read BOS, EOS and stop ids from the config files of a tokenizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dunes.files import json_file


@dataclass(frozen=True)
class SpecialTokens:
    """Special ids in a folder's config files; `bos` and `eos` are None if no file determines them.

    `bos` has the ids that are put before a text, `eos` ends a document, and generation stops at each of `stops`.
    """

    bos: tuple[int, ...] | None = None
    eos: int | None = None
    stops: frozenset[int] = frozenset()


def read_special_tokens(folder: Path, token_id: Callable[[str], int | None]) -> SpecialTokens:
    """The special tokens in tokenizer_config.json, generation_config.json and config.json.

    Raises ValueError that names the file and the key for an invalid token or id.
    """
    path = folder / "tokenizer_config.json"
    config = json_file.read_if_present(path)
    bos, eos = (_token_id(path, config, key, token_id) for key in ("bos_token", "eos_token"))
    stops = [eos] if eos is not None else []
    for name in ("config.json", "generation_config.json"):
        stops += configured_ids(folder / name, json_file.read_if_present(folder / name), "eos_token_id")
    adds_bos = config.get("add_bos_token")
    begin = (bos,) if adds_bos is True and bos is not None else () if adds_bos is False else None
    return SpecialTokens(begin, stops[0] if stops else None, frozenset(stops))


def token_text(config: dict[str, Any], key: str) -> str | None:
    """The text of a token in tokenizer_config.json (a string, or an object with `content`); otherwise None."""
    token = config.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _token_id(path: Path, config: dict[str, Any], key: str, token_id: Callable[[str], int | None]) -> int | None:
    if config.get(key) is None:
        return None
    try:
        return token_id(token_text(config, key))  # type: ignore[arg-type]  # which the library refuses
    except (TypeError, UnicodeEncodeError):
        raise ValueError(f"{path}: {key} is {ascii(config[key])[:80]}; expected a token's text") from None


def configured_ids(path: Path, config: Mapping[str, Any], key: str, least: int = 0) -> list[int]:
    """The ids under a key of a config file: one id, a list, or null. Raises ValueError for anything else."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= least for i in ids):
        raise ValueError(f"{path}: {key} is {ascii(value)[:80]}; expected an id or a list of ids")
    return ids
