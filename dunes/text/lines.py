"""Lines as editors count them, and long texts in parts: lines end at \\n, \\r\\n or \\r, and nowhere else.

The Language Server Protocol has the same; `str.splitlines` also ends lines at form feeds, U+0085 and U+2028.
https://microsoft.github.io/language-server-protocol/specifications/lsp/3.17/specification/#textDocuments
"""

import re
from collections.abc import Iterator

_START = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


def split_lines(text: str) -> list[str]:
    """The lines with their ends; the last one has none, and is empty after a line end and in an empty text."""
    return _START.split(text)


def decode_text(data: bytes, source: str) -> str:
    """The text of a UTF-8 file with its line ends as they are, without a byte order mark, which no editor shows.

    Raises ValueError that names the source and the byte for what is not UTF-8.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None


def line_parts(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Parts of about so many characters that end at \\n, where tokens end too; a line is never cut."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
