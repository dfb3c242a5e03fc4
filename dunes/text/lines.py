"""Split text into lines and parts: lines end at \\n, \\r\\n or \\r, and nowhere else.

This is the rule of the Language Server Protocol; `str.splitlines` also splits at form feeds, U+0085 and U+2028.
https://microsoft.github.io/language-server-protocol/specifications/lsp/3.17/specification/#textDocuments
"""

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from dunes.units import plural


def split_lines(text: str) -> list[str]:
    """The lines with their line ends. The last line has no line end; it may be empty."""
    lines = [*StringIO(text, newline="")]
    return lines if lines and lines[-1][-1] not in "\r\n" else [*lines, ""]


def decode_text(data: bytes, source: str) -> str:
    """The text of a UTF-8 file with its line ends, without a byte order mark.

    Raises ValueError that names the source and the byte if it is not UTF-8.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None


def line_parts(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Yield parts of about `size` characters that end after a \\n, so that no line and no token is split."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def valid_text(text: str) -> str:
    """The text with lone surrogates, which editors may send and no tokenizer accepts, replaced by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_around_cursor(place: str) -> tuple[Path, str, str]:
    """The file in FILE:LINE:COLUMN, and its text before and after this position.

    Line and column are counted from 1; each character is one column, even a tab. Raises ValueError for another
    format or a position outside the file, and OSError for a file that cannot be read.
    """
    parts = re.fullmatch(r"(.+):([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", place, re.DOTALL)
    if parts is None:
        raise ValueError(f"{place}: expected FILE:LINE:COLUMN, both numbers counted from 1")
    path, line, column = parts[1], int(parts[2]), int(parts[3])
    text = decode_text(Path(path).read_bytes(), path)
    lines = split_lines(text)
    if line > len(lines):
        raise ValueError(f"{place}: outside the file, which has {plural(len(lines), 'line')}")
    if column > (end := len(lines[line - 1].rstrip("\r\n")) + 1):
        raise ValueError(f"{place}: outside the line, which ends at column {end}")
    offset = sum(map(len, lines[: line - 1])) + column - 1
    return Path(path), text[:offset], text[offset:]
