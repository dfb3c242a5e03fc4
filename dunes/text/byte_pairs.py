"""Helpers for byte-pair tokenizers: byte-level characters, merges by score, text spelled like special tokens."""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from dunes.text import hf_tokenizers

SPACE = "▁"
FIRST_TOKEN = -1
"""Value of `ByteDecoder.strip` that strips all spaces of the first token, as the Metaspace decoder does."""


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
BYTE_TO_CHAR = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
"""The printable character for each byte in byte-level BPE, by GPT-2's rule."""
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
_BYTE_LEVEL = codecs.charmap_build("".join(BYTE_TO_CHAR[byte] for byte in range(256)))


def merge_pairs(
    symbols: list[str], score: Callable[[str], float | None]
) -> tuple[list[str], tuple[str, str] | None]:
    """Merge neighbours, highest score first, leftmost first if scores are equal. Returns the remaining symbols and
    the last merge."""
    last = None
    scores = [score(a + b) for a, b in pairwise(symbols)]
    while True:
        best = max((s for s in scores if s is not None), default=None)
        if best is None:
            return symbols, last
        i = scores.index(best)
        last = symbols[i], symbols[i + 1]
        symbols = [*symbols[:i], "".join(last), *symbols[i + 2 :]]
        del scores[i]
        for j in (i - 1, i):
            if 0 <= j < len(scores):
                scores[j] = score(symbols[j] + symbols[j + 1])


def split_lookalikes(lookalikes: Mapping[str, Sequence[str]]) -> list[pre_tokenizers.PreTokenizer]:
    """Pre-tokenizers that split text spelled like certain tokens, so that it is not encoded as these tokens.

    `lookalikes` maps tokens that merges cannot produce to the parts into which merges encode their spelling.
    """
    splits = []
    for text, parts in lookalikes.items():
        ends = [len("".join(parts[:n])) for n in range(1, len(parts))]
        end = next((e for e in ends if text[:e] not in lookalikes and text[e:] not in lookalikes), None)
        if end is None:
            raise ValueError(f"a tokenizer whose {text!r} is indistinguishable from plain text is not supported")
        splits.append(rf"{re.escape(text[:end])}(?={re.escape(text[end:])}\z)")
    pattern = rf"\A(?:{'|'.join(splits)})"
    return [pre_tokenizers.Split(Regex(pattern), "isolated")] if splits else []


def add_special(inner: Tokenizer, tokens: Iterable[str], begin: str | None = None) -> None:
    """Add special tokens; `begin` is put before a text when special tokens are requested."""
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    if begin is not None:
        surround(inner, begin)


def surround(inner: Tokenizer, *begin: str, end: Sequence[str] = ()) -> None:
    """Put special tokens before and after each text when special tokens are requested."""
    special = [(token, inner.token_to_id(token)) for token in {*begin, *end}]
    single, second = [*begin, "$A", *end], [*(f"{t}:1" for t in begin), "$B:1", *(f"{t}:1" for t in end)]
    make = partial(processors.TemplateProcessing, single=single, pair=[*single, *second], special_tokens=special)
    inner.post_processor = hf_tokenizers.call(
        f"the tokens around each text, {hf_tokenizers.abbreviate([*begin, *end])}", make
    )


# sentencepiece writes U+FFFD for each invalid byte, Python one U+FFFD for several bytes.
codecs.register_error("each-byte", lambda error: ("\ufffd", getattr(error, "start", 0) + 1))


@dataclass(frozen=True)
class ByteDecoder:
    """Decodes tokens to bytes. Tokens are `byte_level` characters, `metaspace` text (▁ is a space), or plain text.

    With `byte_fallback`, a token `<0xNN>` is the byte NN. `strip` is the number of spaces that are removed at the
    start of a text, or FIRST_TOKEN.
    """

    byte_level: bool = False
    metaspace: bool = False
    byte_fallback: bool = False
    strip: int = 0

    @property
    def errors(self) -> str:
        """Name of the codec error handler for broken UTF-8."""
        return "each-byte" if self.metaspace else "replace"

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        if self.byte_level:
            try:
                return codecs.charmap_encode(token, "strict", _BYTE_LEVEL)[0]
            except UnicodeEncodeError:  # `tokenizers` decodes such a token to itself
                return token.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE, " ") if self.metaspace else token).encode()

    def strip_leading(self, token: bytes, strip: int) -> tuple[bytes, int]:
        """The bytes of the next token without leading spaces, and the number of spaces left to strip."""
        if strip == FIRST_TOKEN:
            return token.replace(b" ", b""), 0 if token else FIRST_TOKEN
        rest = token[min(strip, len(token) - len(token.lstrip(b" "))) :]
        return rest, 0 if rest else strip - len(token)


def byte_decoder(inner: tokenizers.Tokenizer) -> ByteDecoder:
    """The `ByteDecoder` equivalent to the tokenizer's decoder."""
    steps = list(hf_tokenizers.steps(hf_tokenizers.pipeline(inner), "decoder"))
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return ByteDecoder(byte_level=True)
    replaces_space = any(s.get("pattern") == {"String": SPACE} and s.get("content") == " " for s in steps)
    if not replaces_space and not any(s.get("replacement") == SPACE for s in steps):
        return ByteDecoder()
    strip = sum(s["start"] for s in steps if s["type"] == "Strip" and s["content"] == " ")
    if any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps):
        strip = FIRST_TOKEN
    return ByteDecoder(metaspace=True, byte_fallback="ByteFallback" in types, strip=strip)
