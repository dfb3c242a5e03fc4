"""Long texts in parts that end at line ends, where tokens end too if the tokenizer was trained here."""

from collections.abc import Iterator


def line_parts(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Parts of about so many characters that end at line ends; a line is never cut, however long it is."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
