"""The evaluation of line completion: tables, and a page of examples."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dunes.checkpoint.files.atomic import write_file
from dunes.data import Document, collect_corpus
from dunes.runs.completion.baselines import CopyNearest
from dunes.runs.completion.completer import load_completer
from dunes.runs.completion.metrics import interval
from dunes.runs.completion.score import (
    COPY,
    POLICIES,
    CompleterScore,
    CompletionOptions,
    Point,
    TrainedCompleter,
    is_inside,
    match_lengths,
    score_completer,
    score_copying,
)
from dunes.runs.completion.sources import ScoredFile, ScoredFiles, document_texts, scored_files
from dunes.runs.progress import Display
from dunes.tables import print_table
from dunes.text.lines import split_lines

EXAMPLES = 40
"""Cursors that the page shows: as many where the model was right as where it was wrong, if there are enough."""
ABOVE = 2
"""Lines above that it shows of each."""
CURSOR = "▏"
TITLE = "# Line completion of"


@dataclass(frozen=True)
class Table:
    """A table: its title, the names of its columns, and its rows, of which the first column has the names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self) -> None:
        """The table on standard output."""
        print_table(self.title, self.columns, self.rows)

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def evaluate_completion(
    folder: Path,
    sources: Sequence[str] = (),
    options: CompletionOptions | None = None,
    *,
    out: Path = Path("completion.md"),
    files: int | None = None,
    any_base: bool = False,
    display: Display | None = None,
    **corpus_options: Any,
) -> list[CompleterScore]:
    """Score the completion of a model and of copying alone, print tables, and write a page with examples.

    Without sources, on the files that the model's training left for scoring; on at most `files` of them. Files and
    lines that the model has seen are left out. `corpus_options` are those of `collect_corpus`. Raises ValueError
    for an invalid folder or setting, and if there is nothing to score.
    """
    options = options or CompletionOptions()
    _check(options, out, files)
    if (folder / "state" / "plan.json").exists() and not (folder / "config.json").exists():
        raise ValueError(f"{folder}: a run without a model yet; let it end, or go on with it by --resume")
    engine: TrainedCompleter = load_completer(folder, any_base=any_base)
    documents = _documents(sources, corpus_options) if sources else engine.test_documents()
    documents = sorted(documents, key=lambda document: (document.split_hash, document.name))
    training, seen = list(engine.training_files), engine.seen()
    try:
        texts = list(islice(document_texts(documents), files))
        scored = scored_files(texts, training, options.all_lines, seen or ())
    except ValueError as error:
        raise ValueError(f"{', '.join(sources) or folder}: {error}") from None
    name = folder.resolve().name
    with display or Display() as display:
        display.line(scored.report())
        if seen is None:
            indexed = "but for those in its index" if training else "so none of them is left out"
            display.line(f"note: the files that the model was trained on are not known, {indexed}")
        thresholds = {policy: engine.threshold(policy) for policy in POLICIES}
        scores = [score_completer(name, engine, scored.files, options, thresholds, display.time_left)]
        scores.append(score_copying(training, scored.files, options, display.time_left))
    lengths = match_lengths(CopyNearest.of_files(training), scored.files, scores[0].points)
    tables = [summary(scores), kinds(scores, lengths), keystrokes(scores)]
    for table in tables:
        table.print()
    write_file(out, page(scores[0], scored, tables, options.seed).encode(errors="replace"))
    return scores


def _check(options: CompletionOptions, out: Path, files: int | None) -> None:
    for flag, value in {"--cuts": options.cuts, "--lines": options.lines, "--limit": files}.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out: {out.parent} is not a folder; create it, or pass another file")
    if out.is_dir() or (out.exists() and not out.read_bytes().startswith(TITLE.encode())):
        raise ValueError(f"--out: {out} exists, and is no page of this command; pass another file")


def _documents(sources: Sequence[str], options: dict[str, Any]) -> list[Document]:
    corpus = collect_corpus(sources, **options)
    return corpus.valid + corpus.train


def summary(scores: Sequence[CompleterScore]) -> Table:
    """The main figures of each completer, one in a row."""
    copy = next((score for score in scores if score.name == COPY), None)
    columns = (
        "completer",
        "exact match %",
        f"minus {COPY}",
        "edit similarity %",
        "first word %",
        "prefix %",
        "keys saved by words %",
        "at 35 % acceptance",
        "shown/line",
        "bits/character",
        "cold p50/p95 ms",
        "warm p50/p95 ms",
    )
    rows = [
        (
            score.name,
            score.exact_match().percent(),
            score.difference(copy).percent("+") if copy not in (None, score) else "",
            *(f"{100 * interval(score.means(metric)).mean:.1f}" for metric in ("similarity", "word", "prefix")),
            _percent(score.saved("word")),
            _percent(score.saved("word", _threshold(score, "word"))),
            _number(score.typing("word", _threshold(score, "word")).shown_per_line),
            _number(score.bits_per_character, 3),
            _milliseconds(score.cold),
            _milliseconds(score.warm),
        )
        for score in scores
    ]
    return Table(
        "Rest of a line, from the text above the cursor: means over files, with 95 % intervals", columns, rows
    )


def kinds(scores: Sequence[CompleterScore], lengths: Sequence[int]) -> Table:
    """Exact match by the place of the cursor, and by how many of the 64 characters before it were trained on."""
    points = scores[0].points
    closed = {(p.file, p.cut.offset) for p in points if p.cut.kind == "closed"}
    matched = {(p.file, p.cut.offset): length for p, length in zip(points, lengths, strict=True)}

    def length(point: Point) -> int:
        return matched[point.file, point.cut.offset]

    groups: dict[str, Callable[[Point], bool]] = {
        "inside a line": is_inside,
        "inside an identifier": lambda p: is_inside(p) and p.cut.mid_identifier,
        "line start": lambda p: p.cut.kind == "line start",
        "inside of brackets": lambda p: is_inside(p) and (p.file, p.cut.offset) in closed,
        "which the editor has closed": lambda p: p.cut.kind == "closed",
        "match < 16": lambda p: is_inside(p) and length(p) < 16,
        "match 16-32": lambda p: is_inside(p) and 16 <= length(p) <= 32,
        "match > 32": lambda p: is_inside(p) and length(p) > 32,
    }
    counts = {name: sum(map(chosen, points)) for name, chosen in groups.items()}
    columns = ["completer", *(f"{name} ({count})" for name, count in counts.items())]
    rows = [
        [
            score.name,
            *(
                interval(score.means("exact", chosen)).percent() if counts[name] else "-"
                for name, chosen in groups.items()
            ),
        ]
        for score in scores
    ]
    title = "Exact match %, by cursor and by the longest match of the 64 characters before it in the training text"
    return Table(title, columns, rows)


def keystrokes(scores: Sequence[CompleterScore]) -> Table:
    """Keys saved with each policy, of all suggestions and of those from the threshold on."""
    shown = "saved %", "reading costs a key", "shown/line", "accepted %"
    columns = "completer", "a key accepts", *shown, "threshold", *(f"then {name}" for name in shown)
    rows = [
        [
            score.name,
            f"a {policy}",
            *_typed(score, policy, 0.0),
            _number(_threshold(score, policy), 3),
            *_typed(score, policy, _threshold(score, policy)),
        ]
        for score in scores
        for policy in POLICIES
    ]
    title = "Keys saved by a user who knows the line (an upper bound); thresholds fitted on other files"
    return Table(title, columns, rows)


def _typed(score: CompleterScore, policy: Any, threshold: float) -> list[str]:
    typed = score.typing(policy, threshold)
    return [
        _percent(score.saved(policy, threshold)),
        _percent(score.saved(policy, threshold, reading=True)),
        _number(typed.shown_per_line),
        _percent(typed.acceptance),
    ]


def _threshold(score: CompleterScore, policy: Any) -> float:
    return score.thresholds.get(policy, math.nan)


def _number(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _percent(share: float) -> str:
    return _number(100 * share)


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    middle, high = 1000 * np.percentile(seconds, [50, 95])
    return f"{middle:.2g}/{high:.2g}" if high < 10 else f"{middle:.0f}/{high:.0f}"


def page(score: CompleterScore, scored: ScoredFiles, tables: Sequence[Table], seed: int = 0) -> str:
    """The tables and examples in Markdown, half of them right and half wrong, from as many files as there are."""
    parts = [f"{TITLE} {score.name}", scored.report(), *(table.markdown() for table in tables)]
    for title, right in (("Right", 1.0), ("Wrong", 0.0)):
        points = [point for point in score.points if point.agreement.exact == right and is_inside(point)]
        parts.append(f"## {title}")
        parts += [_example(scored.files[p.file], p) for p in _spread(points, EXAMPLES // 2, seed)]
    return "\n\n".join(parts) + "\n"


def _spread(points: Sequence[Point], count: int, seed: int) -> list[Point]:
    """About one point of each file before the second of any."""
    drawn = Random(seed).sample(points, len(points))
    turns: dict[int, int] = {}
    order = []
    for number, point in enumerate(drawn):
        turns[point.file] = turns.get(point.file, 0) + 1
        order.append((turns[point.file], number))
    chosen = [drawn[number] for _, number in sorted(order)[:count]]
    return sorted(chosen, key=lambda point: (point.file, point.cut.offset))


def _example(file: ScoredFile, point: Point) -> str:
    before = split_lines(file.text[: point.cut.offset])
    lines = "".join(before[-1 - ABOVE :]).replace("\r\n", "\n")
    text = f"{lines}{CURSOR}\nsaid: {point.text}"
    if not point.agreement.exact:
        text += f"\nwas:  {point.cut.rest}"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    number = file.text.count("\n", 0, point.cut.offset) + 1
    return f"{file.name}:{number}\n\n{fence}\n{text}\n{fence}"
