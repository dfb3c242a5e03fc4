"""Mistral's `tekken.json` (NeMo, Pixtral, Mistral Small 3) as a tokenizer of the `tokenizers` library.

It is byte-level BPE as in tiktoken (https://github.com/openai/tiktoken/blob/main/src/lib.rs): a pattern splits the
text; a word that is a token is that token, else the neighbours whose merged bytes have the lowest rank are merged.
Special tokens have the first ids
(https://github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py).
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from dunes.text import library
from dunes.text.byte_pairs import BYTE_TO_CHAR, CHAR_TO_BYTE, add_special, merge_pairs, split_lookalikes
from dunes.units import plural

MAX_BYTES, MAX_VOCAB, MAX_TOKEN, MAX_WORK = 1 << 27, 1 << 20, 1024, 100_000_000
"""Limits on the file's bytes, the number of tokens, a token's bytes, and the sum of the squared lengths."""

DEFAULT_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
"""The special tokens of files that do not list them."""


def convert(data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer with the same ids as mistral-common; `<s>` is added before a text with special tokens.

    Raises ValueError, without the file's name, if the file is invalid or exceeds a limit.
    """
    pattern, special, tokens = _read(data)
    begin = "<s>" if "<s>" in special else None
    return build_bpe(pattern, tokens, {text: i for i, text in enumerate(special)}, len(special), begin)


def build_bpe(
    pattern: str, tokens: Sequence[str], special: Mapping[str, int], first: int, begin: str | None
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of tokens by rank, whose ids start at `first`.

    `begin` is put before a text with special tokens. Raises ValueError for duplicate tokens.
    """
    vocab = {**special, **{text: first + i for i, text in enumerate(tokens)}}
    if len(vocab) != len(special) + len(tokens) or len({*vocab.values()}) != len(vocab):
        raise ValueError("not a list of tokens: one occurs twice, or is spelled like a special one")
    merges, parts = _merges(tokens)
    inner = tokenizers.Tokenizer(library.bpe(vocab, merges, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(library.regex(pattern, "its pattern"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *split_lookalikes({text: parts(text) for text in special if set(text) <= CHAR_TO_BYTE.keys()}),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    add_special(inner, special, begin)
    return inner


def _read(data: bytes) -> tuple[str, list[str], list[str]]:
    """The pattern, the special tokens, and the others as byte-level BPE spells them."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes; a tekken.json has at most {MAX_BYTES}")
    try:
        content = json.loads(data)
        config, listed = content["config"], content["vocab"]
        pattern, size, count = (config[k] for k in ("pattern", "default_vocab_size", "default_num_special_tokens"))
        special = _special(content.get("special_tokens"), count)
        if not 256 <= size - count <= min(len(listed), MAX_VOCAB):
            raise ValueError(
                f"{plural(size, 'id')} with {plural(count, 'special one')}, "
                f"and {plural(len(listed), 'token')} in the list"
            )
        return pattern, special, [_token(token, rank) for rank, token in enumerate(listed[: size - count])]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a tekken.json: {type(error).__name__}: {error}".replace("\n", " ")) from None


def _special(listed: Sequence[Mapping[str, Any]] | None, count: int) -> list[str]:
    if not 0 <= count <= MAX_VOCAB:
        raise ValueError(plural(count, "special token"))
    names = DEFAULT_SPECIAL if listed is None else [token["token_str"] for token in listed]
    if listed is not None and [token["rank"] for token in listed] != list(range(len(listed))):
        raise ValueError("the special tokens' ranks do not count from 0")
    if len(names) > count or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{plural(len(names), 'special token')} of at most {count}, each of which needs a text")
    return [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]


def _token(token: Mapping[str, Any], rank: int) -> str:
    raw = base64.b64decode(token["token_bytes"], validate=True)
    if token["rank"] != rank or not 0 < len(raw) <= MAX_TOKEN or (rank < 256 and raw != bytes([rank])):
        raise ValueError(
            f"token {rank} is {raw[:20]!r} of rank {token['rank']}; 256 bytes in order are expected first"
        )
    return "".join(BYTE_TO_CHAR[byte] for byte in raw)


def _merges(tokens: Sequence[str]) -> tuple[list[tuple[str, str]], Callable[[str], list[str]]]:
    """The last merge of each token that merges produce, by rank, and the function that merges any text."""
    if sum(len(token) ** 2 for token in tokens) > MAX_WORK:
        raise ValueError("not a list of tokens that can be read: they are too long in total")
    scores = {token: -rank for rank, token in enumerate(tokens)}
    merged = (merge_pairs(list(token), scores.get) for token in tokens)
    merges = [last for parts, last in merged if len(parts) == 1 and last is not None]
    return merges, lambda text: merge_pairs(list(text), scores.get)[0]
