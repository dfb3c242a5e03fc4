"""Simulated typing: choose cursors in a file's lines, and count the keys saved if a suggestion is requested after
every key.

Cursors and lines depend only on the seed, the file's name and its text. All completers thus get the same requests,
and a new file changes no cursor in other files. The simulated user knows the line, and accepts the first word of a
suggestion as soon as this saves a key. The number of keys saved is therefore an upper bound. Indentation costs no
keys, and Enter is not counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import Literal

import numpy as np

from dunes.completion import LineCompleter, Suggestion
from dunes.completion.text import first_line, first_word, unmatched
from dunes.text.lines import split_lines

ACCEPTANCE = 0.35
"""Share of shown suggestions accepted by users of JetBrains' completion: https://arxiv.org/abs/2405.08704."""
LONGEST = 200
"""Maximum characters of a typed line, since nobody types longer lines and each character costs a request."""


@dataclass(frozen=True)
class Line:
    """A line that is not blank. `text` is the line without indentation and trailing white space. `start` is the
    offset of `text` in the file, `end` the offset of the line's end, in characters."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class CutPoint:
    """A cursor in a line of a file. Its `offset` and the line's `end` are in characters from the start of the
    file. `rest`, which is never empty, is the text from the cursor to `end` without trailing white space. `behind`
    contains the closing brackets that an editor inserted behind the cursor; if there are any, `rest` ends before
    them."""

    offset: int
    end: int
    rest: str
    kind: Literal["character", "line start", "closed"]
    behind: str = ""


def file_lines(text: str) -> list[Line]:
    """The lines of a file that are not blank."""
    lines, start = [], 0
    for line in split_lines(text):
        if content := line.strip():
            body = line.rstrip("\r\n")
            lines.append(Line(start + len(line) - len(line.lstrip()), start + len(body), content))
        start += len(line)
    return lines


def cut_points(name: str, text: str, lines: Sequence[Line], seed: int = 0, count: int = 60) -> list[CutPoint]:
    """At most `count` cursors inside lines, and a third as many at line starts; both are in the file's order. A
    cursor inside brackets that the line closes later is returned a second time, as if an editor had inserted the
    closing brackets behind the cursor.

    Lines are drawn without replacement, and one cursor is drawn in each of these lines, so that long lines have no
    more cursors than short ones. A cursor inside a line is after the first and before the last character of the
    line without indentation.
    """
    random = _generator(name, text, seed)
    longer = [line for line in lines if len(line.text) > 1]
    sample = [longer[i] for i in np.sort(random.choice(len(longer), min(count, len(longer)), replace=False))]
    cuts = [_cut_point(line, int(random.integers(1, len(line.text))), "character") for line in sample]
    starts = np.sort(random.choice(len(lines), min(-(-count // 3), len(lines)), replace=False))
    with_brackets = [other for cut in cuts if (other := _inside_brackets(text, cut))]
    return cuts + [_cut_point(lines[i], 0, "line start") for i in starts] + with_brackets


def sample_lines(name: str, text: str, lines: Sequence[Line], seed: int = 0, count: int = 12) -> list[Line]:
    """A sample of at most `count` lines of up to LONGEST characters, in the file's order."""
    lines = [line for line in lines if len(line.text) <= LONGEST]
    indices = _generator(name, text, seed + 1).choice(len(lines), min(count, len(lines)), replace=False)
    return [lines[number] for number in np.sort(indices)]


@dataclass(frozen=True)
class Typing:
    """Totals over typed lines: characters, keys pressed, suggestions shown, and suggestions of which a word was
    accepted. Successive suggestions of the same completed line count once."""

    characters: int = 0
    keys: int = 0
    shown: int = 0
    accepted: int = 0
    lines: int = 0

    def __add__(self, other: "Typing") -> "Typing":
        return Typing(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def saved(self) -> float:
        """Share of keys saved, compared with one key per character; NaN without characters."""
        return 1 - self.keys / self.characters if self.characters else math.nan

    @property
    def acceptance(self) -> float:
        """Share of shown suggestions that were accepted; NaN without suggestions."""
        return self.accepted / self.shown if self.shown else math.nan

    @property
    def shown_per_line(self) -> float:
        """Mean number of suggestions shown per line; NaN without lines."""
        return self.shown / self.lines if self.lines else math.nan


class FileSuggestions:
    """The suggestions of a completer in a file; the completer is called once per position.

    `cold` contains the seconds of the first request, `warm` the seconds of later requests inside a line. If
    `below` is true, the completer also gets the text from the next line on.
    """

    def __init__(self, completer: LineCompleter, name: str, text: str, below: bool = False) -> None:
        self.name, self.text = name, text
        self.cold: list[float] = []
        self.warm: list[float] = []
        self._completer, self._below = completer, below
        self._suggestions: dict[tuple[int, str], Suggestion] = {}

    def ask(self, end: int, offset: int, warm: bool = False, behind: str = "") -> Suggestion:
        """The suggestion at `offset` in a line that ends at `end`; both are in characters from the file's start.

        The completer gets `behind` as the text behind the cursor, in place of the rest of the line.
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


TypedFile = tuple[FileSuggestions, Iterable[Line]]
"""A file's suggestions, and the lines to type in it."""


def type_line(content: str, suggest: Callable[[int], Suggestion], threshold: float = 0.0) -> Typing:
    """Simulate typing a line; a suggestion is shown if the probability of its first word is at least `threshold`.

    `content` is the line without indentation. One key accepts the first word of a suggestion.
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
    """Simulate typing the lines of a file."""
    suggestions, lines = file
    typed = (type_line(line.text, partial(suggestions.in_line, line), threshold) for line in lines)
    return sum(typed, Typing())


def column_in_word(before: str, rest: str) -> int:
    """Number of characters between the start of the word at the cursor and the cursor.

    The cursor is between `before` and the `rest` of its line. A word is the unit that `first_word` returns and a
    user accepts.
    """
    typed, start = split_lines(before)[-1].lstrip(), 0
    while (end := start + max(1, len(first_word((typed + rest)[start:])))) <= len(typed):
        start = end
    return len(typed) - start


def fit_threshold(answers: Sequence[tuple[CutPoint, int, Suggestion]], acceptance: float = ACCEPTANCE) -> float:
    """The lowest threshold at which users accept at least the share `acceptance` of shown suggestions; 2.0 if
    there is no such threshold.

    `answers` contains, for each cursor, the cursor, its `column_in_word` and the suggestion. A sampled cursor can
    be at any character of a word, but a user accepts a word only once. A correct suggestion therefore has weight
    1/n, where n estimates the number of cursors in the word with a correct suggestion. Each suggested character
    but the last adds 1 to n, and each character before the cursor adds 1/2. A correct suggestion of only the last
    character of a partly typed word is ignored, since it saves no key. (docs/log/completion.md, "Thresholds from
    cursors".)
    """
    rows = list[tuple[float, float, float]]()
    for cut, column, suggestion in answers:
        word = first_word(first_line(suggestion.text).rstrip())
        right = cut.rest.startswith(word)
        if word and not (right and len(word) == 1 and column):
            accepted = right and len(word) > 1
            weight = 1 / (len(word) - 1 + column / 2) if accepted else 1.0
            rows.append((suggestion.word, weight, weight * accepted))
    probabilities, shown, taken = np.array(sorted(rows, reverse=True), float).reshape(-1, 3).T
    good = np.cumsum(taken) >= acceptance * np.cumsum(shown)
    return float(min(probabilities[good & np.append(np.diff(probabilities) < 0, True)], default=2.0))


def mean_saved(typed: Iterable[Typing]) -> float:
    """Fraction of keystrokes saved, averaged over files; NaN if no file has typed characters."""
    shares = [file.saved for file in typed if file.characters]
    return sum(shares) / len(shares) if shares else math.nan


def _cut_point(line: Line, column: int, kind: Literal["character", "line start"]) -> CutPoint:
    return CutPoint(line.start + column, line.end, line.text[column:], kind)


def _inside_brackets(text: str, cut: CutPoint) -> CutPoint | None:
    """The cursor as in an editor that has closed all open brackets: the closing brackets follow the cursor, and
    the rest ends before the innermost one. None if the rest of the line does not close this bracket."""
    typed = split_lines(text[: cut.offset])[-1]
    behind, (_, place) = unmatched(typed)[0], unmatched(cut.rest)
    if not behind or not place or cut.rest[place] != behind[0] or not cut.rest[:place].strip():
        return None
    return replace(cut, rest=cut.rest[:place].rstrip(), kind="closed", behind=behind)


def _generator(name: str, text: str, seed: int) -> np.random.Generator:
    hashed = blake2b(f"{seed}\0{name}\0".encode(errors="surrogatepass"), digest_size=16)
    hashed.update(text.encode(errors="surrogatepass"))
    return np.random.default_rng(int.from_bytes(hashed.digest()))
