"""Which file a text is, by its lines: many clients do not say."""

from collections import Counter
from collections.abc import Iterable, Mapping

from dunes.text.lines import split_lines

LINES, LENGTH = 400, 8
"""Lines of a text, the nearest to the cursor first, that are looked up; their least length without indentation."""
FEWEST, SHARE = 3, 0.5
"""Lines that only this file has, at least, and their share of all such lines of the text."""


class FileFinder:
    """The lines of some files, to find that of a text by lines that only one file has."""

    def __init__(self, files: Iterable[tuple[str, str]]) -> None:
        self._lines: dict[str, frozenset[int]] = {}
        self._numbers: dict[str, int] = {}
        self._by_number: list[str] = []
        # How many files have a line, and the sum of their numbers: with one file, that is its number.
        self._owners: dict[int, tuple[int, int]] = {}
        self.update(dict(files))

    @property
    def names(self) -> Iterable[str]:
        """The names of all files."""
        return self._lines.keys()

    def update(self, texts: Mapping[str, str | None]) -> None:
        """From now on the files have these texts; None for those that are gone."""
        for name, text in texts.items():
            number = self._number(name)
            for key in self._lines.pop(name, ()):
                count, total = self._owners[key]
                self._owners[key] = count - 1, total - number
                if count == 1:
                    del self._owners[key]
            if text:
                self._lines[name] = frozenset(_keys(split_lines(text)))
                for key in self._lines[name]:
                    count, total = self._owners.get(key, (0, 0))
                    self._owners[key] = count + 1, total + number

    def find(self, before: str, after: str) -> str:
        """The name of the file that these texts around a cursor are of; empty if it is none, or not sure."""
        above, below = split_lines(before[-(1 << 16) :])[-LINES:], split_lines(after[: 1 << 16])[:LINES]
        found = (self._owners.get(key, (0, 0)) for key in set(_keys((*above[:-1], *below[1:]))))
        owners = Counter(number for count, number in found if count == 1)
        if not owners:
            return ""
        number, count = owners.most_common(1)[0]
        return self._by_number[number] if count >= FEWEST and count >= SHARE * owners.total() else ""

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._by_number)
            self._by_number.append(name)
        return self._numbers[name]


def _keys(lines: Iterable[str]) -> Iterable[int]:
    return (hash(line) for line in map(str.strip, lines) if len(line) >= LENGTH)
