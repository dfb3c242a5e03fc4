"""Llama 3's own `tokenizer.model` as a tokenizer of the `tokenizers` library.

The format is tiktoken's, not sentencepiece's: one line per token with its bytes in base64 and its rank
(https://github.com/openai/tiktoken/blob/main/tiktoken/load.py). The pattern and the special tokens are in Llama's
code, not in the file. 256 special tokens follow the others. Their spelling varies: Llama 3
(https://github.com/meta-llama/llama3, llama/tokenizer.py) names only special tokens of texts and turns, 3.1 three
more, and later code (https://github.com/meta-llama/llama-models, models/llama3) another two. The file does not
name its version; here all are spelled as in the 3.1 folders on the Hub.
"""

import base64
import re

import tokenizers

from dunes.text.byte_pairs import BYTE_TO_CHAR
from dunes.text.tekken import MAX_TOKEN, MAX_VOCAB, build_bpe

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TURNS = ("<|eom_id|>", "<|eot_id|>")
"""Ends of a message and of a turn, at which a model stops, too."""
SPECIAL = (
    *(BEGIN, END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
    *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", *TURNS, "<|python_tag|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)


def is_tiktoken_file(data: bytes) -> bool:
    """True if a `tokenizer.model` has this format: it starts with a token in base64 and a number."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data[:4096]) is not None


def convert(data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer with the same ids as Llama 3's code; BEGIN is added before a text with special tokens.

    Raises ValueError, without the file's name, if the file is invalid or exceeds a limit.
    """
    tokens = _read(data)
    return build_bpe(PATTERN, tokens, {t: len(tokens) + i for i, t in enumerate(SPECIAL)}, 0, BEGIN)


def _read(data: bytes) -> list[str]:
    """The tokens in order of rank, spelled as in byte-level BPE."""
    lines = data.split(b"\n", MAX_VOCAB)
    tokens = [_token(line, rank) for rank, line in enumerate(lines if lines[-1] else lines[:-1])]
    if missing := {*BYTE_TO_CHAR.values()} - {*tokens}:
        raise ValueError(f"not a file of ranks: {len(missing)} of 256 bytes have no token")
    return tokens


def _token(line: bytes, rank: int) -> str:
    try:
        text, number = line.split()
        raw = base64.b64decode(text, validate=True)
        valid = int(number) == rank and 0 < len(raw) <= MAX_TOKEN
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"not a file of ranks: line {rank + 1} is {line[:40]!r}; expected base64 and {rank}")
    return "".join(BYTE_TO_CHAR[byte] for byte in raw)
