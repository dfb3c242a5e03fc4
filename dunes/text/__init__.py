"""Tokenizers and chat templates."""

from dunes.text.tokenizer import END, KINDS, SPECIAL, DecodeStream, Tokenizer

__all__ = ["END", "KINDS", "SPECIAL", "DecodeStream", "Tokenizer"]
