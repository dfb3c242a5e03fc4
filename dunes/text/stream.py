"""Ids into text while they come."""

from codecs import getincrementaldecoder

from tokenizers.decoders import DecodeStream

from dunes.text.tokenizer import Tokenizer


class Stream:
    """Feed it ids; it returns the text that is complete, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.pieces = tokenizer, tokenizer.pieces() if tokenizer.byte_level else None
        self.bytes, self.other = getincrementaldecoder("utf-8")("replace"), DecodeStream(skip_special_tokens=True)

    def feed(self, token: int) -> str:
        """The text that this id completes; empty while a character is still missing bytes."""
        if self.pieces is not None:
            # The library's stream takes a U+FFFD that was written for half a character, and keeps it back.
            return self.bytes.decode(self.pieces[token])
        return self.other.step(self.tokenizer.inner, token) or ""
