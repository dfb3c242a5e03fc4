"""The evaluation of line completion: a table of a model and of copying alone."""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.data import collect_corpus
from dunes.data.duplicates import document_texts
from dunes.evaluate.completion_score import COPY, CompleterScore, CompletionOptions, is_inside, score_completer
from dunes.evaluate.scored_lines import scored_files
from dunes.progress import Display, print_table, shown_by

COLUMNS = (
    "completer", "exact match %", f"minus {COPY}", "first word %", "brackets open %", "closed by the editor %",
    "keys saved by words %", "at 35 % acceptance", "shown/line", "accepted %", "bits/character", "cold p50/p95 ms",
    "warm p50/p95 ms",
)  # fmt: skip


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
    """Score the completion of a model and of copying alone, and print a table.

    Without sources, the test files of the model's training are scored, at most `files` of them. Files and lines
    that the model has seen are left out. `corpus_options` are arguments of `collect_corpus`. Raises ValueError for
    an invalid folder or setting, and if there is nothing to score.
    """
    options = options or CompletionOptions()
    for flag, value in {"--cuts": options.cuts, "--lines": options.lines, "--limit": files}.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")
    if (folder / "state" / "plan.json").exists() and not (folder / "config.json").exists():
        raise ValueError(f"{folder}: a run without a model yet; let it end, or go on with it by --resume")
    engine = FolderCompleter(folder, any_base=any_base)
    corpus = collect_corpus(sources, **corpus_options) if sources else None
    documents = corpus.valid + corpus.train if corpus else engine.test_documents()
    documents = sorted(documents, key=lambda document: (document.split_hash, document.name))
    training, seen_digests = list(engine.training_files), engine.seen_digests()
    try:
        texts = list(islice(document_texts(documents), files))
        scored = scored_files(texts, training, options.all_lines, seen_digests or ())
    except ValueError as error:
        raise ValueError(f"{', '.join(sources) or folder}: {error}") from None
    name, copy = folder.resolve().name, CopyNearest.of_files(training)
    with display or Display() as display, shown_by(display.time_left):
        display.line(scored.report())
        if seen_digests is None:
            indexed = "but for those in its index" if training else "so none of them is left out"
            display.line(f"note: the files that the model was trained on are not known, {indexed}")
        scores = [
            score_completer(name, engine, scored.files, options, engine.threshold()),
            score_completer(COPY, copy, scored.files, options),
        ]
    print_table(
        "Rest of a line, from the text above the cursor: means over files, with 95 % intervals",
        COLUMNS,
        [row(score, scores[1]) for score in scores],
    )
    return scores


def row(score: CompleterScore, copy: CompleterScore) -> list[str]:
    """The figures of a completer beside copying alone.

    Cursors in brackets that the line closes later are scored with and without these brackets behind the cursor.
    """
    with_brackets = {(p.file, p.cut.offset) for p in score.points if p.cut.kind == "closed"}
    without_brackets = score.means("exact", lambda p: is_inside(p) and (p.file, p.cut.offset) in with_brackets)
    typed, typed_above = score.typing(), score.typing(score.threshold)
    means = score.means("word"), without_brackets, score.means("exact", lambda p: p.cut.kind == "closed")
    return [
        score.name,
        score.exact_match().percent(),
        score.difference(copy).percent("+") if score is not copy else "",
        *(_percent(float(part.mean()) if len(part) else math.nan) for part in means),
        _percent(score.saved()),
        _percent(score.saved(score.threshold)),
        _number((typed_above if typed_above.lines else typed).shown_per_line),
        _percent((typed_above if typed_above.lines else typed).acceptance),
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
