"""Text to ids and back: tokenizers, chat templates, lines, incremental decoding.

Start with `Tokenizer` and `DecodeStream`; `templates.get_template` for chats, `lines.split_lines` for files.
"""

from dunes.text.tokenizer import END, KINDS, SPECIAL, DecodeStream, Tokenizer

__all__ = ["END", "KINDS", "SPECIAL", "DecodeStream", "Tokenizer"]
