"""Convert Mistral's `tekken.json` and Llama 3's `tokenizer.model` to tokenizers of the `tokenizers` library.

Both are byte-level BPE as in tiktoken (https://github.com/openai/tiktoken/blob/main/src/lib.rs). A pattern splits
the text into words. A word in the vocabulary becomes one token; within any other word, the pair of lowest rank is
merged first.

In a tekken.json (NeMo, Pixtral, Mistral Small 3) special tokens have the first ids
(https://github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py). Llama 3's file has one line per token,
with the token's bytes in base64 and its rank (https://github.com/openai/tiktoken/blob/main/tiktoken/load.py). The
pattern and the 256 special tokens, which have the last ids, are not in the file but in Llama's code. Llama 3
(https://github.com/meta-llama/llama3, llama/tokenizer.py) defines only the special tokens around texts and turns,
and reserves the other special tokens. Llama 3.1 defines three of the reserved tokens, and later code
(https://github.com/meta-llama/llama-models, models/llama3) another two. A `tokenizer.model` does not record its
version, so special tokens are spelled as in Llama 3.1's folders on the Hub.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers

from dunes.files import json_file
from dunes.text import hf_tokenizers, split_rules
from dunes.text.byte_pairs import BYTE_TO_CHAR, CHAR_TO_BYTE, add_special, merge_pairs, split_lookalikes

TEKKEN_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
"""Special tokens of a tekken.json that does not list them."""

LLAMA3_BEGIN, LLAMA3_END = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_TURNS = ("<|eom_id|>", "<|eot_id|>")
"""End-of-message and end-of-turn tokens; generation also stops at these."""
LLAMA3_SPECIAL = (
    *(LLAMA3_BEGIN, LLAMA3_END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *(*LLAMA3_TURNS, "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248))),
)


def convert_llama3(data: bytes) -> tokenizers.Tokenizer:
    """A tokenizer with the same ids as Llama 3's code.

    If special tokens are requested, a text starts with LLAMA3_BEGIN. For an invalid file, raises an error that
    does not name the file.
    """
    tokens = []
    for rank, line in enumerate(data.splitlines()):
        token, number = line.split()
        tokens.append(_spelled(token, int(number), rank))
    if missing := {*BYTE_TO_CHAR.values()} - {*tokens}:
        raise ValueError(f"not a file of ranks: {len(missing)} of 256 bytes have no token")
    special = {token: len(tokens) + i for i, token in enumerate(LLAMA3_SPECIAL)}
    return _build(split_rules.LLAMA3, tokens, special, 0, LLAMA3_BEGIN)


def is_llama3_file(data: bytes) -> bool:
    """True if a `tokenizer.model` has Llama 3's format, which starts with a token in base64 and a number."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data[:4096]) is not None


def _spelled(token: bytes | str, number: int, rank: int) -> str:
    """The byte-level spelling of a token in base64. Raises ValueError if `number` is not `rank`."""
    raw = base64.b64decode(token, validate=True)
    if number != rank or not raw:
        raise ValueError(f"token {rank}, {raw[:20]!r}, has rank {number}; ranks must count up from 0")
    return "".join(BYTE_TO_CHAR[byte] for byte in raw)


def convert_tekken(data: bytes) -> tokenizers.Tokenizer:
    """A tokenizer with the same ids as mistral-common. If special tokens are requested, a text starts with `<s>`.

    For an invalid file, raises an error that does not name the file.
    """
    content = json_file.parse(data, Path("tekken.json"))
    config, listed = content["config"], content["vocab"]
    size, count = config["default_vocab_size"], config["default_num_special_tokens"]
    special = TEKKEN_SPECIAL
    if (entries := content.get("special_tokens")) is not None:
        special = [entry["token_str"] for entry in entries]
        if [entry["rank"] for entry in entries] != [*range(len(entries))]:
            raise ValueError("the ranks of special tokens must count up from 0")
    if not 256 <= size - count <= len(listed) or len(special) > count:
        raise ValueError(f"expected {size} ids, {count} special; found {len(listed)} and {len(special)} special")
    special = [*special, *(f"<SPECIAL_{i}>" for i in range(len(special), count))]
    tokens = [_spelled(t["token_bytes"], t["rank"], rank) for rank, t in enumerate(listed[: size - count])]
    begin = "<s>" if "<s>" in special else None
    return _build(config["pattern"], tokens, {text: i for i, text in enumerate(special)}, count, begin)


def _build(
    pattern: str, tokens: Sequence[str], special: Mapping[str, int], first: int, begin: str | None
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer. `tokens` are sorted by rank, and their ids start at `first`.

    `begin` is put before a text if special tokens are requested. Raises ValueError for duplicate tokens.
    """
    vocab = {**special, **{text: first + i for i, text in enumerate(tokens)}}
    if len(vocab) != len(special) + len(tokens) or len({*vocab.values()}) != len(vocab):
        raise ValueError("not a list of tokens: a token occurs twice, or is spelled like a special token")
    merges, parts = _merges(tokens)
    inner = tokenizers.Tokenizer(hf_tokenizers.bpe(vocab, merges, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *split_lookalikes({text: parts(text) for text in special if set(text) <= CHAR_TO_BYTE.keys()}),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    add_special(inner, special, begin)
    return inner


def _merges(tokens: Sequence[str]) -> tuple[list[tuple[str, str]], Callable[[str], list[str]]]:
    """The last merge of each token that merges can produce, sorted by rank, and a function that merges a text."""
    scores = {token: -rank for rank, token in enumerate(tokens)}
    merges_by_token = (merge_pairs(list(token), scores.get) for token in tokens)
    merges = [last for parts, last in merges_by_token if len(parts) == 1 and last is not None]
    return merges, lambda text: merge_pairs(list(text), scores.get)[0]
