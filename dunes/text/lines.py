"""Split text into lines and parts: lines end at \\n, \\r\\n or \\r, and nowhere else.

That is the rule of the Language Server Protocol; `str.splitlines` also splits at form feeds, U+0085 and U+2028.
https://microsoft.github.io/language-server-protocol/specifications/lsp/3.17/specification/#textDocuments
"""

import re
from collections.abc import Iterator

_START = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


def split_lines(text: str) -> list[str]:
    """The lines with their ends; the last one has none, and is empty after a line end and in an empty text."""
    return _START.split(text)


def decode_text(data: bytes, source: str) -> str:
    """The text of a UTF-8 file with its line ends, without a byte order mark.

    Raises ValueError that names the source and the byte if it is not UTF-8.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None


def line_parts(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Parts of about `size` characters that end at \\n, where tokens end too; lines are never split."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def valid_text(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which an editor may send, and no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
