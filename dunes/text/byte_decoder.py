"""The bytes that tokens stand for, by a tokenizer's decoder: byte-level letters, or pieces with ▁ for a space."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from dunes.text.byte_pairs import CHAR_TO_BYTE

SPACE = "▁"
FIRST_TOKEN = -1
"""All spaces of the first token are stripped: the decoder that splits at spaces does so."""

# sentencepiece writes U+FFFD for each byte that is in no character, Python one for several.
codecs.register_error("each-byte", lambda error: ("\ufffd", getattr(error, "start", 0) + 1))


@dataclass(frozen=True)
class ByteDecoder:
    """How a tokenizer spells bytes: `byte_level` as letters, `metaspace` with ▁ for a space, else as plain text.

    With `byte_fallback` a token `<0xNN>` is that byte. `strip` spaces are taken from the beginning of a text.
    """

    byte_level: bool = False
    metaspace: bool = False
    byte_fallback: bool = False
    strip: int = 0

    @property
    def errors(self) -> str:
        """How broken UTF-8 is shown, as a name of Python's codecs."""
        return "each-byte" if self.metaspace else "replace"

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        if self.byte_level:
            return bytes(CHAR_TO_BYTE[c] for c in token)
        if self.byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE, " ") if self.metaspace else token).encode()

    def strip_leading(self, token: bytes, strip: int) -> tuple[bytes, int]:
        """The next token of a text without the spaces that are still to be stripped, and how many are left."""
        if strip == FIRST_TOKEN:
            return token.replace(b" ", b""), 0 if token else FIRST_TOKEN
        rest = token[min(strip, len(token) - len(token.lstrip(b" "))) :]
        return rest, 0 if rest else strip - len(token)


def byte_decoder(inner: tokenizers.Tokenizer) -> ByteDecoder:
    """What the tokenizer's decoder does, in these terms."""
    steps = _steps(json.loads(inner.decoder.__getstate__())) if inner.decoder is not None else []
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


def _steps(decoder: dict[str, Any]) -> Sequence[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
