"""The bytes of tokens by a tokenizer's decoder: byte-level characters, or pieces with ▁ for a space."""

import codecs
import re
from dataclasses import dataclass

import tokenizers

from dunes.text import library
from dunes.text.byte_pairs import CHAR_TO_BYTE

SPACE = "▁"
FIRST_TOKEN = -1
"""All spaces of the first token are stripped, as by the Metaspace decoder."""

# sentencepiece writes U+FFFD for each invalid byte, Python one for several.
codecs.register_error("each-byte", lambda error: ("\ufffd", getattr(error, "start", 0) + 1))


@dataclass(frozen=True)
class ByteDecoder:
    """The spelling of bytes: `byte_level` as characters, `metaspace` with ▁ for a space, else as plain text.

    With `byte_fallback` a token `<0xNN>` is that byte. `strip` spaces are removed from the beginning of a text.
    """

    byte_level: bool = False
    metaspace: bool = False
    byte_fallback: bool = False
    strip: int = 0

    @property
    def errors(self) -> str:
        """The codec error handler for broken UTF-8."""
        return "each-byte" if self.metaspace else "replace"

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        if self.byte_level:
            known = all(c in CHAR_TO_BYTE for c in token)  # else as it is, as the library does
            return bytes(CHAR_TO_BYTE[c] for c in token) if known else token.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE, " ") if self.metaspace else token).encode()

    def strip_leading(self, token: bytes, strip: int) -> tuple[bytes, int]:
        """The next token of a text without leading spaces, and the number of spaces left to strip."""
        if strip == FIRST_TOKEN:
            return token.replace(b" ", b""), 0 if token else FIRST_TOKEN
        rest = token[min(strip, len(token) - len(token.lstrip(b" "))) :]
        return rest, 0 if rest else strip - len(token)


def byte_decoder(inner: tokenizers.Tokenizer) -> ByteDecoder:
    """The `ByteDecoder` that is equivalent to the tokenizer's decoder."""
    steps = list(library.steps(library.pipeline(inner), "decoder"))
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return ByteDecoder(byte_level=True)
    replaced = any(s.get("pattern") == {"String": SPACE} and s.get("content") == " " for s in steps)
    if not replaced and not any(s.get("replacement") == SPACE for s in steps):
        return ByteDecoder()
    strip = sum(s["start"] for s in steps if s["type"] == "Strip" and s["content"] == " ")
    if any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps):
        strip = FIRST_TOKEN
    return ByteDecoder(metaspace=True, byte_fallback="ByteFallback" in types, strip=strip)
