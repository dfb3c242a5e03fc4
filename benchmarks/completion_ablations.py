"""Ablations of line completion: exact match with one component removed or replaced, paired by file.

    python benchmarks/completion_ablations.py RUN SOURCE... [--cuts 12] [--others RUN...]

All variants complete the same lines at the same cursors, from the text above alone unless stated. `--others` are
runs trained in other ways, with gates of their own.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dunes import measure
from dunes.completion import LineCompleter, Suggestion
from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.completion.engine import CompletionEngine
from dunes.completion.fit import interval
from dunes.completion.keystrokes import FileSuggestions, cut_points
from dunes.completion.search import CompleteOptions
from dunes.completion.text import FileTokenizer, first_line
from dunes.data import collect_corpus
from dunes.data.document import document_texts
from dunes.evaluate.completion import CompleterScore, Point, ScoredFile, scored_files
from dunes.generate.copying import LEAST, Candidates, Gate
from dunes.progress import Display, print_table

import torch
import tyro
from torch import Tensor

NEAR, FAR = 0, 5
"""The features that are log-probabilities by the file and by the other files."""


class FixedWeights(Gate):
    """Half model, a quarter each what is copied from the file and from others."""

    def change(self, candidates: Candidates, logprobs: Tensor) -> Tensor:
        count = int(torch.searchsorted(candidates.ids, len(logprobs)))
        mixed = logprobs.exp() / 2
        for column in (NEAR, FAR):
            mixed[candidates.ids[:count]] += (candidates.features[:count, column].exp() - LEAST) / 4
        return mixed.clamp(min=1e-12).log().log_softmax(-1)


class WholeTokens(FileTokenizer):
    """Takes the tokens of the typed line as they are."""

    def split_typed(self, ids: Sequence[int]) -> tuple[Sequence[int], bytes]:
        return ids, b""


class Wide:
    """An engine with so many beams."""

    def __init__(self, engine: CompletionEngine, width: int) -> None:
        self.engine, self.options = engine, CompleteOptions(width=width)

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """As the engine's."""
        return self.engine.complete(before, after, name, self.options)


class Nameless(FileTokenizer):
    """Begins a file without its path."""

    def start(self, name: str) -> list[int]:
        return super().start("")


def with_files(make: Callable[[], CompletionEngine], kind: type[FileTokenizer]) -> CompletionEngine:
    """An engine with another tokenizer of files."""
    engine = make()
    engine.files = kind(engine.loaded.require_tokenizer(), engine.files.header)
    return engine


def without_sentinels(make: Callable[[], CompletionEngine]) -> CompletionEngine:
    """An engine that copies from the text below, but does not show it to the model."""
    engine = make()
    engine._form = None
    return engine


def variants(run: FolderCompleter) -> dict[str, tuple[LineCompleter, bool]]:
    """Variants by name: a completer, and True if it gets the text below the cursor."""
    loaded, index, gate = run.loaded, run.index, run.gate
    header = run.files.header
    make = partial(CompletionEngine, loaded, index, gate, header)
    copy = CopyNearest.of_files(run.training_files)
    return {
        "all": (make(), False),
        "copy nearest alone": (copy, False),
        "model alone": (CompletionEngine(loaded, header=header), False),
        "fixed weights, no gate": (CompletionEngine(loaded, index, FixedWeights(), header), False),
        "nothing to copy from in training files": (CompletionEngine(loaded, None, gate, header), False),
        "no token healing": (with_files(make, WholeTokens), False),
        "no path": (with_files(make, Nameless), False),
        "one beam": (Wide(make(), 1), False),
        "eight beams": (Wide(make(), 8), False),
        "with the text below": (make(), True),
        "copied from the text below, the model without it": (without_sentinels(make), True),
        "copy nearest alone, with the text below": (copy, True),
    }


def score(
    name: str, completer: LineCompleter, files: Sequence[ScoredFile], cuts: int, below: bool
) -> CompleterScore:
    """Suggestions at cursors inside lines."""
    points = []
    for number, file in enumerate(files):
        suggestions = FileSuggestions(completer, file.name, file.text, below)
        for cut in cut_points(file.name, file.text, file.lines, 0, cuts):
            if cut.kind == "character":
                text = first_line(suggestions.ask(cut.end, cut.offset).text)
                points.append(Point(number, cut, text))
    return CompleterScore(name, points=points)


def main(run: Path, sources: tuple[str, ...], cuts: int = 12, others: tuple[Path, ...] = ()) -> None:
    """Measure.

    Args:
        run: A run that completes lines.
        sources: Files that it was not trained on.
        cuts: Cursors in each file at most.
        others: Other runs.
    """
    torch.set_num_threads(1)
    completer = FolderCompleter(run)
    completer.copies = False  # the model is measured, also where a run would only copy
    corpus = collect_corpus(sources)
    files = scored_files([*document_texts(corpus.valid + corpus.train)], completer.training_files, True).files
    compared = variants(completer) | {str(other): (FolderCompleter(other), False) for other in others}
    scores: list[CompleterScore] = []
    with Display() as display:
        for number, (name, (each, below)) in enumerate(compared.items()):
            display.time_left(name, number / len(compared))
            scores.append(score(name, each, files, cuts, below))
    rows = [
        (
            s.name,
            s.exact_match().percent(),
            s.difference(scores[0]).percent("+") if s is not scores[0] else "",
            f"{100 * interval(s.means('word')).mean:.1f}",
        )
        for s in scores
    ]
    title = f"{len(scores[0].points)} cursors inside lines of {len(files)} files, with 95 % intervals"
    print_table(title, ["completer", "exact match %", "minus all", "first word %"], rows)
    facts = {s.name: 100 * s.exact_match().mean for s in scores}
    print(json.dumps({"machine": measure.fingerprint(), "cursors": len(scores[0].points), "exact": facts}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
