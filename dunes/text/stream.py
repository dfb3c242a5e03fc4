"""Ids into text while they come."""

from codecs import getincrementaldecoder

from tokenizers.decoders import DecodeStream

from dunes.text.tokenizer import Tokenizer


class Stream:
    """Feed it ids; it returns the text that is complete, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.spelling = tokenizer, tokenizer.spelling
        self.pieces = tokenizer.pieces() if self.spelling.letters or self.spelling.spaces else None
        self.bytes = getincrementaldecoder("utf-8")(self.spelling.errors)
        self.lead, self.other = self.spelling.lead, DecodeStream(skip_special_tokens=True)

    def feed(self, token: int) -> str:
        """The text that this id completes; empty while a character is still missing bytes."""
        if self.pieces is None:
            return self.other.step(self.tokenizer.inner, token) or ""
        # The library's stream takes a U+FFFD that was written for half a character, and keeps it back.
        piece = self.pieces[token] if token < len(self.pieces) else b""
        piece, self.lead = self.spelling.without_lead(piece, self.lead)
        return self.bytes.decode(piece)
