"""Keys saved by completion: lines are typed with a suggestion after every key.

The simulated user is greedy and knows the line: the first word of a suggestion is accepted as soon as it saves a
key. Keys saved are thus an upper bound. Indentation is free, and Enter is not counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from dunes.completion.cuts import Line, first_line, first_word
from dunes.completion.protocol import LineCompleter, Suggestion

ACCEPTANCE = 0.35
"""Share of shown suggestions accepted by users of JetBrains' completion: https://arxiv.org/abs/2405.08704."""
GRID = 33
"""Number of thresholds that are tried."""


@dataclass(frozen=True)
class Typing:
    """Totals over typed lines: characters, keys pressed, and different suggestions shown and (partly) accepted."""

    characters: int = 0
    keys: int = 0
    shown: int = 0
    accepted: int = 0
    lines: int = 0

    def __add__(self, other: "Typing") -> "Typing":
        return Typing(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def saved(self) -> float:
        """Share of keys saved; NaN without characters."""
        return 1 - self.keys / self.characters if self.characters else math.nan

    @property
    def acceptance(self) -> float:
        """Share of shown suggestions that is accepted; NaN if none was shown."""
        return self.accepted / self.shown if self.shown else math.nan

    @property
    def shown_per_line(self) -> float:
        """Different suggestions shown on a line."""
        return self.shown / self.lines if self.lines else math.nan


class FileSuggestions:
    """The suggestions of a completer in a file; each is requested once.

    `cold` has the seconds of the first request, `warm` of requests one key after the previous one on the same
    line. With `below`, the completer gets the text from the next line on, otherwise no text after the cursor.
    """

    def __init__(self, completer: LineCompleter, name: str, text: str, below: bool = False) -> None:
        self.name, self.text = name, text
        self.cold: list[float] = []
        self.warm: list[float] = []
        self._completer, self._below = completer, below
        self._suggestions: dict[tuple[int, str], Suggestion] = {}

    def ask(self, end: int, offset: int, warm: bool = False, behind: str = "") -> Suggestion:
        """The suggestion at an offset of a line that ends at `end`, both in characters of the file.

        `behind` is the text behind the cursor, in place of the rest of the line.
        """
        if (offset, behind) not in self._suggestions:
            after = behind + (self.text[end:] if self._below else "")
            start = perf_counter()
            self._suggestions[offset, behind] = self._completer.complete(self.text[:offset], after, self.name)
            seconds = perf_counter() - start
            if warm:
                self.warm.append(seconds)
            elif not self.cold:
                self.cold.append(seconds)
        return self._suggestions[offset, behind]

    def in_line(self, line: Line, column: int) -> Suggestion:
        """The suggestion after `column` characters of a line."""
        return self.ask(line.end, line.start + column, warm=column > 0)


TypedFile = tuple[FileSuggestions, Sequence[Line]]
"""A file's suggestions, and the lines to type in it."""


def type_line(content: str, suggest: Callable[[int], Suggestion], threshold: float = 0.0) -> Typing:
    """Type a line with suggestions after each column, shown from a probability of `threshold` on.

    `content` is without indentation. One key accepts the first word of a suggestion.
    """
    column = keys = shown = accepted = 0
    displayed, is_accepted = "", False
    while column < len(content):
        suggestion = suggest(column)
        text = first_line(suggestion.text).rstrip() if suggestion.word >= threshold else ""
        if (completed := content[:column] + text if text else "") != displayed:
            displayed, is_accepted = completed, False
            shown += bool(text)
        word = first_word(text)
        saving = len(word) if content.startswith(word, column) else 0
        accepted += saving > 1 and not is_accepted
        is_accepted |= saving > 1
        column, keys = column + max(saving, 1), keys + 1
    return Typing(len(content), keys, shown, accepted, 1)


def type_file(file: TypedFile, threshold: float = 0.0) -> Typing:
    """Type the lines of a file with suggestions."""
    suggestions, lines = file
    typed = (type_line(line.text, partial(suggestions.in_line, line), threshold) for line in lines)
    return sum(typed, Typing())


def fit_threshold(files: Sequence[TypedFile], acceptance: float = ACCEPTANCE) -> float:
    """The threshold that saves most keys while at least this share is accepted; infinite if none does.

    The files must be unseen by the completer, and not be evaluated on.
    """
    probabilities = [
        s.in_line(line, c).word for s, lines in files for line in lines for c in range(len(line.text))
    ]
    if not probabilities:
        return math.inf
    most_saved, best_threshold = 0.0, math.inf
    for threshold in np.unique(np.quantile(probabilities, np.linspace(0, 1, GRID))):
        typed = [type_file(file, float(threshold)) for file in files]
        saved = mean_saved(typed)
        if sum(typed, Typing()).acceptance >= acceptance and saved > most_saved:
            most_saved, best_threshold = saved, float(threshold)
    return best_threshold


def mean_saved(typed: Iterable[Typing]) -> float:
    """Mean over files of the share of keys saved; NaN without typed files."""
    shares = [file.saved for file in typed if file.characters]
    return sum(shares) / len(shares) if shares else math.nan
