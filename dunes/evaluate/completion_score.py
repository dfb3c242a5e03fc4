"""Score completers on the same lines: agreement at cursors, keys saved, bits/character, latency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dunes.completion import LineCompleter
from dunes.completion.fit import Interval, file_means, interval
from dunes.completion.keystrokes import (
    CutPoint,
    FileSuggestions,
    Typing,
    cut_points,
    mean_saved,
    sample_lines,
    type_file,
)
from dunes.completion.text import first_line, first_word
from dunes.evaluate.scored_lines import ScoredFile
from dunes.progress import report

COPY = "copy nearest"
"""Name of the baseline that a model is compared with."""
Metric = Literal["exact", "word"]


@dataclass(frozen=True)
class CompletionOptions:
    """At most `cuts` cursors and `lines` typed lines per file; `all_lines` includes lines seen in training."""

    cuts: int = 60
    lines: int = 12
    seed: int = 0
    all_lines: bool = False


@dataclass(frozen=True)
class Point:
    """The suggested text at a cursor of file number `file`. `exact` is 1.0 if it is right except for trailing
    white space, `word` if its first word is right, else 0.0."""

    file: int
    cut: CutPoint
    text: str

    @property
    def exact(self) -> float:
        return float(first_line(self.text).rstrip() == self.cut.rest.rstrip())

    @property
    def word(self) -> float:
        return float(first_word(first_line(self.text).rstrip()) == first_word(self.cut.rest.rstrip()))


@dataclass
class CompleterScore:
    """The score of a completer: at each cursor, and of each file typed with all suggestions and with suggestions
    above its threshold (NaN: none). `cold` and `warm` are latencies in seconds; `bits_per_character` is NaN
    without probabilities."""

    name: str
    threshold: float = math.nan
    points: list[Point] = field(default_factory=list)
    typed: dict[float, list[Typing]] = field(default_factory=dict)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    bits_per_character: float = math.nan

    def means(self, metric: Metric, selects: Callable[[Point], bool] | None = None) -> np.ndarray:
        """Mean of a metric in each file (F,), over cursors inside lines, or over those that `selects` accepts."""
        points = [p for p in self.points if (selects or is_inside)(p)]
        return file_means([getattr(p, metric) for p in points], [p.file for p in points])

    def exact_match(self) -> Interval:
        """Share of cursors inside lines at which the entire suggestion is right."""
        return interval(self.means("exact"))

    def difference(self, other: "CompleterScore") -> Interval:
        """The exact match minus the other completer's, paired by file."""
        return interval(self.means("exact") - other.means("exact"))

    def typing(self, threshold: float = 0.0) -> Typing:
        """Totals of all lines typed with a threshold."""
        return sum(self.typed.get(threshold, ()), Typing())

    def saved(self, threshold: float = 0.0) -> float:
        """Mean over files of the share of keys saved; NaN without a threshold."""
        return mean_saved(self.typed.get(threshold, ()))


def is_inside(point: Point) -> bool:
    """True for a cursor inside a line."""
    return point.cut.kind == "character"


def score_completer(
    name: str,
    completer: LineCompleter,
    files: Sequence[ScoredFile],
    options: CompletionOptions = CompletionOptions(),
    threshold: float = math.nan,
) -> CompleterScore:
    """The score on these files, whose names are shown."""
    score = CompleterScore(name, threshold)
    for number, file in enumerate(files):
        report(f"{name}: {file.name}", number / len(files))
        suggestions = FileSuggestions(completer, file.name, file.text)
        for cut in cut_points(file.name, file.text, file.lines, options.seed, options.cuts):
            text = first_line(suggestions.ask(cut.end, cut.offset, behind=cut.behind).text)
            score.points.append(Point(number, cut, text))
        typed = suggestions, sample_lines(file.name, file.text, file.lines, options.seed, options.lines)
        for limit in (0.0, threshold) if threshold > 0 else (0.0,):
            score.typed.setdefault(limit, []).append(type_file(typed, limit))
        score.cold += suggestions.cold
        score.warm += suggestions.warm
    if (bits := getattr(completer, "bits", None)) is not None:
        total = sum(bits(file.text, file.name) for file in files)
        score.bits_per_character = total / sum(len(file.text) for file in files)
    return score
