"""Which file a text is, by its lines: many clients do not say."""

from collections import Counter
from collections.abc import Iterable, Mapping

from dunes.text.lines import split_lines

LINES, LENGTH = 400, 8
"""Lines of a text, the nearest to the cursor first, that are looked up; their least length without indentation."""
FEWEST, SHARE = 3, 0.5
"""Lines that only this file has, at least, and their share of all such lines of the text."""


class FileFinder:
    """The lines of some files, each of which only one file has."""

    def __init__(self, files: Iterable[tuple[str, str]]) -> None:
        self.names: set[str] = set()
        self._owners: dict[int, str | None] = {}
        for name, text in files:
            self._add(name, text)

    def update(self, texts: Mapping[str, str | None]) -> None:
        """Take in these texts of files. Lines that a file had before stay its own."""
        for name, text in texts.items():
            if text:
                self._add(name, text)

    def find(self, before: str, after: str) -> str:
        """The name of the file that these texts around a cursor are of; empty if it is none, or not sure."""
        above, below = split_lines(before[-(1 << 16) :])[-LINES:], split_lines(after[: 1 << 16])[:LINES]
        keys = {key for line in (*above[:-1], *below[1:]) if (key := _key(line)) is not None}
        owners = Counter(owner for key in keys if (owner := self._owners.get(key)))
        if not owners:
            return ""
        name, count = owners.most_common(1)[0]
        return name if count >= FEWEST and count >= SHARE * owners.total() else ""

    def _add(self, name: str, text: str) -> None:
        self.names.add(name)
        for line in split_lines(text):
            key = _key(line)
            if key is not None and self._owners.setdefault(key, name) != name:
                self._owners[key] = None


def _key(line: str) -> int | None:
    line = line.strip()
    return hash(line) if len(line) >= LENGTH else None
