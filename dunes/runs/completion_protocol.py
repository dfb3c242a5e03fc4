"""What completes lines, for an editor and for the evaluation alike."""

import re
from dataclasses import dataclass
from typing import Protocol

WORD = re.compile(r"\s*(?:\w+|[^\w\s])")
"""A word: a run of letters, digits and underscores, or one other character, with the white space before it."""


@dataclass(frozen=True)
class Suggestion:
    """The rest of a line; `word` and `line` are the probabilities (0 to 1) that its first word, and all of it, are
    right."""

    text: str
    word: float = 1.0
    line: float = 1.0


class Completer(Protocol):
    """Completes lines. A baseline may lack `bits`."""

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line after the text `before` the cursor, with the text behind it and the file's path."""
        ...

    def bits(self, text: str, name: str = "") -> float:
        """The information content of a file's text in bits, each part predicted from those above it."""
        ...


def first_word(text: str) -> str:
    """The first word of a text; empty if there is none."""
    match = WORD.match(text)
    return match[0] if match else ""
