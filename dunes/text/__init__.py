"""Tokenizers and chat templates."""

from dunes.text.decode_stream import DecodeStream
from dunes.text.tokenizer import END, KINDS, SPECIAL, Tokenizer

__all__ = ["END", "KINDS", "SPECIAL", "DecodeStream", "Tokenizer"]
