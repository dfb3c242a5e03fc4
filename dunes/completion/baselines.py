"""Copying alone: the baseline that a model must beat, and what completes lines where there is none."""

import re
from collections.abc import Sequence

import numpy as np

from dunes.completion.cuts import first_line
from dunes.completion.protocol import Suggestion
from dunes.completion.text import without_overlap
from dunes.data.document import NamedText
from dunes.generate.context_index import ContextIndex
from dunes.generate.copying import TextSource

LONGEST = 128
"""Bytes before the cursor of which a match is searched."""
_REST_OF_LINE = re.compile(rb"[^\0\r\n]*")


class CopyNearest:
    """Copies what followed the longest match of the text before the cursor, of at most 128 bytes.

    The match is searched in `far`, above the cursor in the file, and behind it where that text is given; of
    equally long ones the file's wins, and the last one in the same text. Both probabilities are a function of the
    match's length that only orders suggestions.
    """

    def __init__(self, far: Sequence[TextSource]) -> None:
        self._far = far

    @classmethod
    def of_files(cls, files: Sequence[NamedText]) -> "CopyNearest":
        """Copies from these files."""
        data = b"".join(text.encode(errors="replace") + b"\0" for _, text in files)
        return cls([TextSource(data, ContextIndex(np.frombuffer(data, np.uint8), depth=LONGEST))])

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line behind the match; empty if nothing matches."""
        above = before.encode(errors="replace")
        sources = TextSource(above), TextSource(after.encode(errors="replace")), *self._far
        matches = [(source.longest(above[-LONGEST:]), source.text) for source in sources]
        (length, positions), text = max(matches, key=lambda each: each[0][0])
        line = _REST_OF_LINE.match(text, positions[0]) if length else None
        typed = before[max(before.rfind("\n"), before.rfind("\r")) + 1 :] if first_line(after).strip() else ""
        rest = without_overlap(line[0].decode(errors="ignore"), after, typed) if line else ""
        return Suggestion(rest, length / (length + 32), length / (length + 32))
