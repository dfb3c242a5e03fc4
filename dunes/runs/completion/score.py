"""Scoring completers on the same lines: agreement at cursors, keys saved, bits/character, latency."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol, get_args

import numpy as np

from dunes.data import Document
from dunes.runs.completion.baselines import CopyNearest
from dunes.runs.completion.cuts import CutPoint, cut_points, first_line, sample_lines
from dunes.runs.completion.keystrokes import (
    FileSuggestions,
    Policy,
    TypedFile,
    Typing,
    fit_threshold,
    type_file,
)
from dunes.runs.completion.metrics import Agreement, Interval, agreement, file_means, interval
from dunes.runs.completion.protocol import Completer, LineCompleter, NamedText
from dunes.runs.completion.sources import ScoredFile, scored_files

POLICIES: tuple[Policy, ...] = get_args(Policy)
COPY = "copy nearest"
"""The baseline that a model is compared with."""
GATE = 16
"""Training files on which the thresholds of copying are fitted, which it does not copy from then."""
MATCHED = 64
"""Characters before a cursor that are searched in the training text, to tell copying from generalising."""
Metric = Literal["exact", "similarity", "word", "prefix"]


@dataclass(frozen=True)
class CompletionOptions:
    """At most `cuts` cursors and `lines` typed lines a file. With `below`, completers also get the text from the
    next line on; with `all_lines`, lines like one of the training are scored too."""

    cuts: int = 60
    lines: int = 12
    seed: int = 0
    below: bool = False
    all_lines: bool = False


class TrainedCompleter(Completer, Protocol):
    """A model that completes, with the files that it was trained on and the thresholds fitted in training."""

    @property
    def training_files(self) -> Sequence[NamedText]:
        """The names and texts of the files that it was trained on."""
        ...

    def seen(self) -> set[bytes] | None:
        """The digests of all texts that its training read; None if they cannot be known."""
        ...

    def threshold(self, policy: Policy) -> float:
        """The probability from which on suggestions are shown."""
        ...

    def test_documents(self) -> list[Document]:
        """The files that its training left for scoring."""
        ...


@dataclass(frozen=True)
class Point:
    """What was suggested at a cursor, and how much of it was right. `file` is the file's number."""

    file: int
    cut: CutPoint
    text: str
    agreement: Agreement


@dataclass
class CompleterScore:
    """The score of a completer: at each cursor, and of each file typed with a policy and a threshold (0: all is
    shown). `cold` and `warm` are latencies in seconds; `bits_per_character` is NaN without probabilities."""

    name: str
    thresholds: Mapping[Policy, float]
    points: list[Point] = field(default_factory=list)
    typed: dict[tuple[Policy, float], list[Typing]] = field(default_factory=dict)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    bits_per_character: float = math.nan

    def means(self, metric: Metric, chosen: Callable[[Point], bool] | None = None) -> np.ndarray:
        """The means of a metric in each file (F,) over its cursors inside lines, or over the chosen ones."""
        points = [p for p in self.points if (chosen or is_inside)(p)]
        return file_means([getattr(p.agreement, metric) for p in points], [p.file for p in points])

    def exact_match(self) -> Interval:
        """The share of cursors inside lines at which all of the suggestion is right."""
        return interval(self.means("exact"))

    def difference(self, other: "CompleterScore") -> Interval:
        """The exact match minus that of another completer, paired by file."""
        return interval(self.means("exact") - other.means("exact"))

    def typing(self, policy: Policy, threshold: float = 0.0) -> Typing:
        """All lines typed with a policy and a threshold."""
        return sum(self.typed.get((policy, threshold), ()), Typing())

    def saved(self, policy: Policy, threshold: float = 0.0, reading: bool = False) -> float:
        """The mean over files of the share of keys saved; NaN without a threshold. With `reading`, each new
        suggestion costs a key."""
        typed = self.typed.get((policy, threshold), ())
        shares = [file.saved_reading if reading else file.saved for file in typed if file.characters]
        return float(np.mean(shares)) if shares else math.nan


def is_inside(point: Point) -> bool:
    """Whether a cursor is inside a line."""
    return point.cut.kind == "character"


def score_completer(
    name: str,
    completer: LineCompleter,
    files: Sequence[ScoredFile],
    options: CompletionOptions = CompletionOptions(),
    thresholds: Mapping[Policy, float] | None = None,
    show: Callable[[str, float], object] = lambda text, done: None,
) -> CompleterScore:
    """The score on some files; `show` gets a text and the fraction done."""
    score = CompleterScore(name, thresholds or {})
    for number, file in enumerate(files):
        show(f"{name}: {file.name}", number / len(files))
        suggestions = FileSuggestions(completer, file.name, file.text, options.below)
        for cut in cut_points(file.name, file.text, file.lines, options.seed, options.cuts):
            text = first_line(suggestions.ask(cut.end, cut.offset, behind=cut.behind).text)
            score.points.append(Point(number, cut, text, agreement(text, cut.rest)))
        typed = suggestions, sample_lines(file.name, file.text, file.lines, options.seed, options.lines)
        for policy in POLICIES:
            for threshold in {0.0, score.thresholds.get(policy, 0.0)}:
                score.typed.setdefault((policy, threshold), []).append(type_file(typed, policy, threshold))
        score.cold += suggestions.cold
        score.warm += suggestions.warm
    if (bits := getattr(completer, "bits", None)) is not None:
        total = sum(bits(file.text, file.name) for file in files)
        score.bits_per_character = total / sum(len(file.text) for file in files)
    return score


def gate_thresholds(
    make: Callable[[Sequence[NamedText]], LineCompleter],
    training: Sequence[NamedText],
    options: CompletionOptions = CompletionOptions(),
) -> dict[Policy, float]:
    """The thresholds of what is made from training files, fitted on some of these files that it is made without.

    They are fitted on all kinds of lines, as those of a model are in its training. Empty if no line of them can be
    scored.
    """
    order = sorted(training, key=lambda file: blake2b(file[0].encode(errors="surrogatepass")).digest())
    gate = order[: min(GATE, len(order) // 2)]
    rest = order[len(gate) :]
    try:
        files = scored_files(gate, rest, all_lines=True).files
    except ValueError:
        return {}
    completer = make(rest)
    typed: list[TypedFile] = [
        (
            FileSuggestions(completer, file.name, file.text, options.below),
            sample_lines(file.name, file.text, file.lines, options.seed, options.lines),
        )
        for file in files
    ]
    return {policy: fit_threshold(typed, policy) for policy in POLICIES}


def score_copying(
    training: Sequence[NamedText],
    files: Sequence[ScoredFile],
    options: CompletionOptions = CompletionOptions(),
    show: Callable[[str, float], object] = lambda text, done: None,
) -> CompleterScore:
    """The score of copying alone from the training files."""
    show(f"{COPY}: fitting its threshold", 0.0)
    thresholds = gate_thresholds(CopyNearest.of_files, training, options)
    return score_completer(COPY, CopyNearest.of_files(training), files, options, thresholds, show)


def match_lengths(copy: CopyNearest, files: Sequence[ScoredFile], points: Sequence[Point]) -> list[int]:
    """How many of the 64 characters before each cursor stand in the training text."""
    return [copy.match_length(files[p.file].text[max(0, p.cut.offset - MATCHED) : p.cut.offset]) for p in points]
