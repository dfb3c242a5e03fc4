"""Decode ids to text incrementally."""

from codecs import getincrementaldecoder

from tokenizers import decoders

from dunes.text.tokenizer import Tokenizer


class DecodeStream:
    """Decodes one id at a time and returns complete characters only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.byte_decoder = tokenizer, tokenizer.byte_decoder
        by_bytes = self.byte_decoder.byte_level or self.byte_decoder.metaspace
        self.token_bytes = tokenizer.token_bytes if by_bytes else None
        self.utf8 = getincrementaldecoder("utf-8")(self.byte_decoder.errors)
        self.strip, self.other = self.byte_decoder.strip, decoders.DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        if self.token_bytes is None:
            return self.other.step(self.tokenizer.inner, token) or ""
        # The library's stream mistakes a real U+FFFD for an incomplete character, and withholds it.
        data = self.token_bytes[token] if token < len(self.token_bytes) else b""
        data, self.strip = self.byte_decoder.strip_leading(data, self.strip)
        return self.utf8.decode(data)
