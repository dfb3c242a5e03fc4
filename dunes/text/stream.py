"""Ids into text while they come."""

from tokenizers.decoders import DecodeStream

from dunes.text.tokenizer import Tokenizer


class Stream:
    """Feed it ids; it returns the text that is complete, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner, self.tokenizer = DecodeStream(skip_special_tokens=True), tokenizer

    def feed(self, token: int) -> str:
        """The text that this id completes; empty while a character is still missing bytes."""
        return self.inner.step(self.tokenizer.inner, token) or ""
