"""What ids stand for, read off a tokenizer's decoder: bytes spelled as letters, or pieces with ▁ for a space."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from dunes.text.pairs import BYTE

SPACE = "▁"
WORD = -1
"""All spaces of the first id: what is taken from a text's beginning by the decoder that splits at spaces."""

# sentencepiece writes U+FFFD for each byte that is in no character, Python one for several.
codecs.register_error("each-byte", lambda error: ("\ufffd", getattr(error, "start", 0) + 1))


@dataclass(frozen=True)
class Spelling:
    """How a decoder spells: `letters` for bytes, `spaces` as ▁ and perhaps `<0xNN>`, else plain text.

    `lead` is how many spaces it takes from the beginning of a text.
    """

    letters: bool = False
    spaces: bool = False
    hexadecimal: bool = False
    lead: int = 0

    @property
    def errors(self) -> str:
        """How broken UTF-8 is shown, as a name of Python's codecs."""
        return "each-byte" if self.spaces else "replace"

    def piece(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        if self.letters:
            return bytes(BYTE[c] for c in token)
        if self.hexadecimal and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE, " ") if self.spaces else token).encode()

    def without_lead(self, piece: bytes, lead: int) -> tuple[bytes, int]:
        """The next piece of a text without the spaces that are yet to be taken, and how many still are."""
        if lead == WORD:
            return piece.replace(b" ", b""), 0 if piece else WORD
        rest = piece[min(lead, len(piece) - len(piece.lstrip(b" "))) :]
        return rest, 0 if rest else lead - len(piece)


def spelling(inner: tokenizers.Tokenizer) -> Spelling:
    """How the tokenizer's decoder spells."""
    steps = _steps(json.loads(inner.decoder.__getstate__())) if inner.decoder is not None else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling(letters=True)
    spaces = any(s.get("pattern") == {"String": SPACE} and s.get("content") == " " for s in steps)
    if not spaces and not any(s.get("replacement") == SPACE for s in steps):
        return Spelling()
    lead = sum(s["start"] for s in steps if s["type"] == "Strip" and s["content"] == " ")
    if any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps):
        lead = WORD
    return Spelling(spaces=True, hexadecimal="ByteFallback" in kinds, lead=lead)


def _steps(decoder: dict[str, Any]) -> Sequence[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
