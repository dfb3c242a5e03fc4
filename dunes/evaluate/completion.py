"""Evaluate line completion: a table that compares a model with a baseline that only copies.

Only files outside the model's training text are scored, without the lines that resemble a training line.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dunes.completion import LineCompleter
from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.completion.fit import Interval, file_means, interval
from dunes.completion.keystrokes import (
    CutPoint,
    FileSuggestions,
    Line,
    Typing,
    cut_points,
    file_lines,
    mean_saved,
    sample_lines,
    type_file,
)
from dunes.completion.text import first_line, first_word
from dunes.context import prefix_errors
from dunes.data import collect_corpus
from dunes.data.document import NamedText, document_texts
from dunes.data.duplicates import content_digest
from dunes.progress import Display, each, phase, print_table, shown_by
from dunes.text.lines import split_lines
from dunes.units import plural

SIMILAR = 0.8
"""Jaccard similarity of token sets above which two lines are near-duplicates."""
FEWEST = 3
"""Minimum number of tokens of a near-duplicate; shorter lines such as `return None` are always scored."""
_TOKEN = re.compile(r"\w+|[^\w\s]")

COPY = "copy nearest"
"""Name of the baseline."""
COPYING = 0.03
"""Estimated fraction of the evaluation's time that the preparation takes; scoring the baseline takes as long."""

COLUMNS = (
    "completer", "exact match %", f"minus {COPY}", "first word %", "brackets open %", "closed by the editor %",
    "keys saved by words %", "at 35 % acceptance", "shown/line", "accepted %", "bits/character", "cold p50/p95 ms",
    "warm p50/p95 ms",
)  # fmt: skip


@dataclass(frozen=True)
class ScoredFile:
    """A file, and its lines to complete."""

    name: str
    text: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class ScoredFiles:
    """The files to score. `trained_files` counts omitted training files, `near_duplicates` counts omitted lines,
    and `files_without_lines` counts files omitted because no other line is left. `line_count` counts the nonblank
    lines of files outside the training text."""

    files: Sequence[ScoredFile]
    trained_files: int
    line_count: int
    near_duplicates: int
    files_without_lines: int

    def report(self) -> str:
        """One line with the numbers of scored and omitted files and lines."""
        lines = self.line_count - self.near_duplicates
        return (
            f"{plural(len(self.files), 'file')}, {plural(lines, 'line')}; left out: "
            f"{plural(self.trained_files, 'file')} that the model was trained on, "
            f"{plural(self.near_duplicates, 'line')} like a training line, "
            f"{plural(self.files_without_lines, 'file')} without other lines"
        )


class LineIndex:
    """The lines of texts, indexed to find near-duplicates of a line.

    Two token sets are compared only if they share one of their rarest tokens, since similar sets share one of
    their `|set| - ceil(0.8 |set|) + 1` rarest tokens (prefix filtering, https://doi.org/10.1145/1242572.1242591).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._lines = {line.strip() for text in texts for line in split_lines(text)}
        words = map(_TOKEN.findall, self._lines)
        sets = {frozenset[str](line) for line in words if len(line) >= FEWEST}
        self._times = Counter(token for tokens in sets for token in tokens)
        self._sets: dict[str, list[frozenset[str]]] = {}
        for tokens in sets:
            for token in self._rarest(tokens):
                self._sets.setdefault(token, []).append(tokens)

    def has_similar(self, line: str) -> bool:
        """True if the line has at least FEWEST tokens, and a line of the texts is equal or has a similar token
        set."""
        words = _TOKEN.findall(line)
        if len(words) < FEWEST:
            return False
        tokens = frozenset(words)
        return line.strip() in self._lines or any(
            len(tokens & other) > SIMILAR * len(tokens | other)
            for token in self._rarest(tokens)
            for other in self._sets.get(token, ())
        )

    def _rarest(self, tokens: frozenset[str]) -> list[str]:
        rarity = sorted(tokens, key=lambda token: (self._times[token], token))
        return rarity[: len(tokens) - math.ceil(SIMILAR * len(tokens)) + 1]


def scored_files(
    texts: Sequence[NamedText],
    training: Sequence[NamedText],
    all_lines: bool = False,
    seen: Collection[bytes] = (),
) -> ScoredFiles:
    """Select the files and lines to score for a model trained on the `training` files.

    A file is left out if its text equals the text of a training file except for white space, or if its digest is
    in `seen`. Near-duplicates of training lines are left out, too, unless `all_lines`. Raises ValueError if no
    line is left.
    """
    digests = {content_digest([text]) for _, text in training} | {*seen}
    unseen = [(name, text) for name, text in texts if content_digest([text]) not in digests]
    index = LineIndex(() if all_lines else (text for _, text in each(training)))
    files, line_count = [], 0
    for name, text in unseen:
        lines = file_lines(text)
        line_count += len(lines)
        files.append(ScoredFile(name, text, [line for line in lines if not index.has_similar(line.text)]))
    nonempty = [file for file in files if any(len(line.text) > 1 for line in file.lines)]
    count = sum(len(file.lines) for file in nonempty)
    counts = len(texts) - len(unseen), line_count, line_count - count, len(unseen) - len(nonempty)
    scored = ScoredFiles(nonempty, *counts)
    if not nonempty:
        raise ValueError(f"no line to complete ({scored.report()}); pass files that the model was not trained on")
    return scored


@dataclass(frozen=True)
class CompletionOptions:
    """Maximum cursors and typed lines per file; `all_lines` also scores near-duplicates of training lines."""

    cuts: int = 60
    lines: int = 12
    seed: int = 0
    all_lines: bool = False


@dataclass(frozen=True)
class Point:
    """The suggested text at a cursor of file number `file`. `exact` is 1.0 if the text is right except for
    trailing white space, otherwise 0.0. `word` is 1.0 if the first word is right, otherwise 0.0."""

    file: int
    cut: CutPoint
    text: str

    @property
    def exact(self) -> float:
        """1.0 if the first line is right except for trailing white space, otherwise 0.0."""
        return float(first_line(self.text).rstrip() == self.cut.rest.rstrip())

    @property
    def word(self) -> float:
        """1.0 if the first word is right, otherwise 0.0."""
        return float(first_word(first_line(self.text).rstrip()) == first_word(self.cut.rest.rstrip()))


def is_inside(point: Point) -> bool:
    """True for a cursor inside a line."""
    return point.cut.kind == "character"


@dataclass
class CompleterScore:
    """The score of a completer. `points` contains the suggestion at each cursor. `typed` maps each simulated
    threshold (0.0 and, if above 0, `threshold`) to the totals of each file. Suggestions whose first word has a
    lower probability are not shown. `cold` and `warm` are latencies in seconds; `bits_per_character` is NaN if the
    completer has no probabilities."""

    name: str
    threshold: float = math.nan
    points: list[Point] = field(default_factory=list)
    typed: dict[float, list[Typing]] = field(default_factory=dict)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    bits_per_character: float = math.nan

    def means(self, metric: Literal["exact", "word"], selects: Callable[[Point], bool] = is_inside) -> np.ndarray:
        """Mean of a metric per file (F,), over the cursors for which `selects` is True (default: inside lines)."""
        points = [p for p in self.points if selects(p)]
        return file_means([getattr(p, metric) for p in points], [p.file for p in points])

    def exact_match(self) -> Interval:
        """Share of cursors inside lines with an entirely correct suggestion."""
        return interval(self.means("exact"))

    def difference(self, other: "CompleterScore") -> Interval:
        """The exact match minus the other completer's exact match, paired by file."""
        return interval(self.means("exact") - other.means("exact"))

    def typing(self, threshold: float = 0.0) -> Typing:
        """Totals over all lines typed with this threshold."""
        return sum(self.typed.get(threshold, ()), Typing())

    def saved(self, threshold: float = 0.0) -> float:
        """Fraction of keystrokes saved at this threshold, averaged over files; NaN if not measured."""
        return mean_saved(self.typed.get(threshold, ()))


def score_completer(
    name: str,
    completer: LineCompleter,
    files: Sequence[ScoredFile],
    options: CompletionOptions = CompletionOptions(),
    threshold: float = math.nan,
) -> CompleterScore:
    """The completer's score on these files; the progress shows the name of each file."""
    score = CompleterScore(name, threshold)
    for number, file in enumerate(files):
        suggestions = FileSuggestions(completer, file.name, file.text)
        cuts = cut_points(file.name, file.text, file.lines, options.seed, options.cuts)
        lines = sample_lines(file.name, file.text, file.lines, options.seed, options.lines)
        with phase(f"{name}: {file.name}", number / len(files), (number + 1) / len(files)):
            for cut in each(cuts, end=0.5):
                text = first_line(suggestions.ask(cut.end, cut.offset, behind=cut.behind).text)
                score.points.append(Point(number, cut, text))
            for limit in (0.0, threshold) if threshold > 0 else (0.0,):
                typed = type_file((suggestions, each(lines, 0.5)), limit)
                score.typed.setdefault(limit, []).append(typed)
        score.cold += suggestions.cold
        score.warm += suggestions.warm
    if (bits := getattr(completer, "bits", None)) is not None:
        total = sum(bits(file.text, file.name) for file in files)
        score.bits_per_character = total / sum(len(file.text) for file in files)
    return score


def evaluate_completion(
    folder: Path,
    sources: Sequence[str] = (),
    options: CompletionOptions | None = None,
    *,
    files: int | None = None,
    any_base: bool = False,
    display: Display | None = None,
    **corpus_options: Any,
) -> list[CompleterScore]:
    """Score line completion by a model and by a baseline that only copies, and print a table.

    Without sources, the test split recorded in the model's card is scored. At most `files` files are read. Files
    and lines that the model has seen are left out. `corpus_options` are arguments of `collect_corpus`. Raises
    ValueError for an invalid folder or setting, and if there is nothing to score.
    """
    options = options or CompletionOptions()
    for flag, value in {"--cuts": options.cuts, "--lines": options.lines, "--limit": files}.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")
    engine = FolderCompleter(folder, any_base)
    corpus = collect_corpus(sources, **corpus_options) if sources else None
    documents = corpus.valid + corpus.train if corpus else engine.test_documents()
    documents = sorted(documents, key=lambda document: (document.split_hash, document.name))
    training, seen_digests = list(engine.training_files), engine.seen_digests()
    name = folder.resolve().name
    with display or Display() as display, shown_by(display.time_left):
        comparing = phase("comparing with the lines of the training text", end=0.5 * COPYING)
        with prefix_errors(", ".join(sources) or folder), comparing:
            texts = list(islice(document_texts(documents), files))
            scored = scored_files(texts, training, options.all_lines, seen_digests or ())
        with phase("indexing the training text", 0.5 * COPYING, COPYING):
            copy = CopyNearest.of_files(training)
        display.line(scored.report())
        if seen_digests is None:
            indexed = "except the files in its index" if training else "so none of them is left out"
            display.line(f"note: the files that the model was trained on are not known, {indexed}")
        with shown_by(scale=lambda done: COPYING * (1 + done)):
            copied = score_completer(COPY, copy, scored.files, options)
        with shown_by(scale=lambda done: 2 * COPYING + (1 - 2 * COPYING) * done):
            scores = [score_completer(name, engine, scored.files, options, engine.threshold()), copied]
    print_table(
        "Rest of a line, from the text above the cursor: means over files, with 95 % intervals",
        COLUMNS,
        [row(score, scores[1]) for score in scores],
    )
    return scores


def row(score: CompleterScore, copy: CompleterScore) -> list[str]:
    """The table row of a completer, with its difference from the baseline.

    Cursors inside brackets that the line closes later are scored twice: without and with the closing brackets
    behind the cursor.
    """
    with_brackets = {(p.file, p.cut.offset) for p in score.points if p.cut.kind == "closed"}
    without_brackets = score.means("exact", lambda p: is_inside(p) and (p.file, p.cut.offset) in with_brackets)
    typed_above = score.typing(score.threshold)
    typed = typed_above if typed_above.lines else score.typing()
    means = score.means("word"), without_brackets, score.means("exact", lambda p: p.cut.kind == "closed")
    return [
        score.name,
        score.exact_match().percent(),
        score.difference(copy).percent("+") if score is not copy else "",
        *(_percent(float(part.mean()) if len(part) else math.nan) for part in means),
        _percent(score.saved()),
        _percent(score.saved(score.threshold)),
        _number(typed.shown_per_line),
        _percent(typed.acceptance),
        _number(score.bits_per_character, 3),
        _milliseconds(score.cold),
        _milliseconds(score.warm),
    ]


def _number(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _percent(share: float) -> str:
    return _number(100 * share)


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    middle, high = 1000 * np.percentile(seconds, [50, 95])
    return f"{middle:.2g}/{high:.2g}" if high < 10 else f"{middle:.0f}/{high:.0f}"
