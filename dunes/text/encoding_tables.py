"""The tables of a tokenizer trained here, from which a program in another language encodes and decodes."""

import json
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dunes.text.byte_pairs import CHAR_TO_BYTE
from dunes.text.tokenizer import UNKNOWN, Tokenizer, splits_characters, splits_lines

Tables = Mapping[str, NDArray[np.int64] | NDArray[np.uint8]]
NO_CHARACTER = -1
"""Stands for all characters without an id."""
_PLAIN_BPE = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
    "ignore_merges": False,
}


def encoding_tables(tokenizer: Tokenizer) -> Tables | None:
    """The tables of a tokenizer of bytes, byte pairs or characters; None for any other.

    `bytes` (N,) are those of all ids in sequence and `ends` (ids,) where each id's end; `first` (N, 2) has the id
    of each byte, or of each character as the number that its UTF-8 bytes make; `merges` (N, 3) two ids and the id
    that they become, first learned first. `characters` is there if text is split into characters, not lines.
    """
    content = json.loads(tokenizer.json())
    plain = content["normalizer"] is None and all(token["special"] for token in content["added_tokens"])
    model = content["model"]
    if plain and splits_characters(tokenizer) and model["type"] == "WordLevel":
        return _tables(tokenizer, _characters(model["vocab"]), []) | {"characters": np.ones(1, np.uint8)}
    if not (plain and splits_lines(tokenizer) and model["type"] == "BPE"):
        return None
    first = {CHAR_TO_BYTE[c]: i for c, i in model["vocab"].items() if len(c) == 1 and c in CHAR_TO_BYTE}
    if len(first) < 256 or any(model.get(key) not in (value, False, "") for key, value in _PLAIN_BPE.items()):
        return None
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [[model["vocab"][t] for t in (left, right, left + right)] for left, right in pairs]
    return _tables(tokenizer, first, merges)


def _characters(vocab: Mapping[str, int]) -> dict[int, int]:
    ids = {int.from_bytes(token.encode(), "big"): i for token, i in vocab.items() if len(token) == 1}
    return ids | {NO_CHARACTER: vocab[UNKNOWN]}


def _tables(tokenizer: Tokenizer, first: Mapping[int, int], merges: list[list[int]]) -> dict[str, NDArray]:  # type: ignore[type-arg]
    tokens = tokenizer.token_bytes
    return {
        "bytes": np.frombuffer(b"".join(tokens), np.uint8).copy(),
        "ends": np.array([*accumulate(map(len, tokens))], np.int64),
        "first": np.array(sorted(first.items()), np.int64).reshape(-1, 2),
        "merges": np.array(merges, np.int64).reshape(-1, 3),
    }
