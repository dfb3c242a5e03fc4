"""Between characters and ids."""

from dunes.text.stream import Stream
from dunes.text.tokenizer import END, KINDS, SPECIAL, Tokenizer

__all__ = ["END", "KINDS", "SPECIAL", "Stream", "Tokenizer"]
