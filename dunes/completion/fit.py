"""Completion data that a training run writes: the index at its start, the gate and thresholds at its end.

Confidence intervals resample files, since cursors in one file are alike, and one large file must not dominate.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dunes import checkpoint, measure
from dunes.completion import LineCompleter
from dunes.completion.completer import CopyCompleter
from dunes.completion.copy_gate import Places, fit_gate, places_of, write_gate
from dunes.completion.engine import CompletionEngine, knows_paths
from dunes.completion.index import TextIndex, first_documents, index_texts, named_texts, write_index
from dunes.completion.keystrokes import FileSuggestions, TypedFile, file_lines, fit_threshold, sample_lines
from dunes.completion.text import FileTokenizer
from dunes.data import Corpus
from dunes.data.document import NamedText
from dunes.generate.copying import Gate
from dunes.progress import Display
from dunes.units import plural

BEFORE = 1.2
"""If the tails of the texts are for validation, a text is indexed up to this many tail lengths before its end."""
BEHIND = 0.9
"""If the tails of the texts are for validation, the gate is fitted on the last BEHIND tail lengths of a text."""
PLACES = (40.0, 500, 20_000)
"""Number of positions on which the gate is fitted: per second of the run, minimum and maximum."""
LINES = (0.05, 4, 120)
"""Number of lines that are typed to fit the thresholds: per second of the run, minimum and maximum."""
PLACE_SECONDS = 2e-3
"""Seconds to fit the gate, per position, at 4M parameters with one thread."""
LINE_SECONDS = 0.75
"""Seconds per typed line, at 4M parameters with one thread."""
PLACE_TOKENS, LINE_TOKENS = 5, 4_000
"""Forward passes that a place and a typed line cost, in tokens of validation: larger models take longer."""
SHARES = 0.08, 0.04
"""Maximum fractions of the run to fit the gate on places, and the thresholds on typed lines."""
BYTE_SECONDS = 1.5e-6
"""Seconds per indexed byte."""
LEAST = 8
"""Minimum number of typed lines to compare model and copying; with fewer lines, the model is never disabled."""
ACCEPTANCES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""A threshold is fitted for each of these fractions of shown suggestions that users should accept."""
RESAMPLES = 2_000
Text = TypeVar("Text")


@dataclass(frozen=True)
class CompletionFiles:
    """A run's texts for completion: `index` of its training files, the (name, text) pairs `gate` for fitting the
    gate, and the pairs `all_texts` of all files for the index at the end of the run."""

    index: TextIndex
    gate: Sequence[NamedText]
    all_texts: Sequence[NamedText]
    sources: Sequence[str]
    follow_links: bool


def prepare_completion(
    corpus: Corpus, tokenizer: FileTokenizer, display: Display, sources: Sequence[str], follow_links: bool
) -> CompletionFiles:
    """Index the training files, and read the texts on which the gate will be fitted.

    Raises ValueError if a file changed since it was collected.
    """
    documents, tail = first_documents(corpus.train), corpus.share if corpus.split == "tails" else 0.0
    full_texts = named_texts(documents)
    texts = named_texts(documents, 0, 1 - BEFORE * tail) if tail else full_texts
    validation = first_documents(corpus.valid) if corpus.valid else ()
    gate = named_texts(documents, 1 - BEHIND * tail) if tail else named_texts(validation)
    if len(texts) < len(corpus.train):
        omitted = plural(len(corpus.train) - len(texts), "file")
        display.line(f"note: {omitted} beyond the first 12 MB of training text cannot be copied from")
    all_texts = full_texts if tail else [*full_texts, *gate]
    return CompletionFiles(index_texts(texts, tokenizer), gate, all_texts, sources, follow_links)


def begin_completion(run: Path, files: CompletionFiles) -> str:
    """Write the index of a run, so that lines can be copied during training. Returns a line for the user."""
    write_index(run, files.index, files.sources, files.follow_links)
    folder = shlex.quote(str(run))
    return f"completes lines from now on, at first by copying: dunes complete {folder} FILE:LINE:COLUMN"


@dataclass(frozen=True)
class FitSize:
    """Numbers of places and of typed lines to fit on, and the estimated seconds."""

    places: int
    lines: int
    seconds: float

    @classmethod
    def of(cls, seconds: float, per_token: float = 0.0) -> "FitSize":
        """The size for a run of `seconds`, of a model that takes `per_token` seconds to evaluate a token.

        A slow model gets fewer places and lines, so that the fit takes a few percent of the run.
        """
        costs = PLACE_SECONDS + PLACE_TOKENS * per_token, LINE_SECONDS + LINE_TOKENS * per_token
        rules = zip((PLACES, LINES), SHARES, costs, strict=True)
        places, lines = (_scale((min(rule[0], share / cost), *rule[1:]), seconds) for rule, share, cost in rules)
        return cls(places, lines, costs[0] * places + costs[1] * lines)


def finish_completion(run: Path, files: CompletionFiles, size: FitSize) -> str:
    """Fit and write the gate and thresholds on texts unseen by model and index, then index these texts too.

    Returns a line for the user.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for single tokens, more threads only wait for each other
    try:
        return _finish(run, files, size)
    finally:
        torch.set_num_threads(threads)


def _finish(run: Path, files: CompletionFiles, size: FitSize) -> str:
    loaded = checkpoint.load_with_tokenizer(run, measure.device())
    engine = CompletionEngine(loaded, files.index, header=knows_paths(loaded))
    texts = [pair for pair in files.gate if pair[1].strip()]
    fitted, facts = fit_mixture(engine, texts, size.places)
    if fitted is None:
        return "completion: no text to fit the gate on, so lines are copied, without the model"
    engine.gate, gate = fitted
    unseen = _unseen_texts(texts)
    typed, copied = (typed_files(c, unseen, size.lines) for c in (engine, CopyCompleter(files.index)))
    model_shares, copy_shares = right_by_line(typed), right_by_line(copied)
    facts["copies"] = bool(len(model_shares) >= LEAST and interval(model_shares - copy_shares).high < 0)
    used = copied if facts["copies"] else typed
    # 2.0, above all probabilities, for an unreachable acceptance.
    facts["thresholds"] = {"word": [(share, min(fit_threshold(used, share), 2.0)) for share in ACCEPTANCES]}
    write_gate(run, gate, facts)
    write_index(run, index_texts(files.all_texts, engine.files), files.sources, files.follow_links)
    verdict = ""
    if facts["copies"]:
        right = [f"{100 * shares.mean():.0f} %" for shares in (model_shares, copy_shares)]
        verdict = (
            f"; it has {right[0]} of ends right and copying {right[1]}, so lines are copied, without the model: "
            f"train longer, or on more text ({plural(len(model_shares), 'line')})"
        )
    return (
        f"completion: {facts['loss']:.3f} nats/token by the model, {facts['mixed_loss']:.3f} with copies "
        f"({plural(len(texts), 'file')}){verdict}; measure it: dunes eval {shlex.quote(str(run))} --completion"
    )


def right_by_line(typed: Sequence[TypedFile]) -> NDArray[np.float64]:
    """For each typed line, the share of its cursors at which the suggestion equals the rest of the line."""
    shares = [
        [suggestions.in_line(line, c).text.rstrip() == line.text[c:] for c in range(len(line.text))]
        for suggestions, lines in typed
        for line in lines
    ]
    return np.array([np.mean(right) for right in shares])


def closing_seconds(files: CompletionFiles, size: FitSize) -> float:
    """Estimated seconds that `finish_completion` takes."""
    return size.seconds + BYTE_SECONDS * sum(len(text) for _, text in files.all_texts)


def _scale(rule: tuple[float, int, int], seconds: float) -> int:
    rate, least, most = rule
    return int(min(most, max(least, rate * seconds)))


def fit_mixture(
    engine: CompletionEngine, texts: Sequence[NamedText], most: int
) -> tuple[tuple[Gate, Gate] | None, dict[str, Any]]:
    """Fit two gates for the engine's model and index. Returns both (None if the texts have no token) and facts.

    The first gate is fitted without every third text, so that thresholds fitted on these texts are not
    overconfident. The second gate is fitted on all texts, for use. The facts have the loss in nats/token on every
    third text, without a gate and with the first one.
    """
    tokenized = [engine.files.tokenize(text, name) for name, text in texts]
    seen = [text for number, text in enumerate(tokenized) if number % 3] or tokenized
    places = places_of(engine.loaded, seen, engine.sources, most * 2 // 3)
    unseen = places_of(engine.loaded, _unseen_texts(tokenized), engine.sources, most // 3)
    if places is None or unseen is None:
        return None, {}
    gates = fit_gate(places), fit_gate(Places(*map(torch.cat, zip(places, unseen, strict=True))))
    alone, mixed = -unseen.target_logprob.mean(), unseen.loss(gates[0]).mean()
    facts = {"places": len(places.target) + len(unseen.target), "loss": float(alone), "mixed_loss": float(mixed)}
    return gates, facts


def _unseen_texts(texts: Sequence[Text]) -> Sequence[Text]:
    """Every third text; the first gate is not fitted on these."""
    return texts[::3]


def typed_files(completer: LineCompleter, texts: Sequence[NamedText], lines: int) -> list[TypedFile]:
    """About `lines` lines of these files, with the completer's suggestions; at most `lines` files are used."""
    texts = texts[:lines]
    lines_per_file = math.ceil(lines / max(1, len(texts)))
    samples = [sample_lines(name, text, file_lines(text), count=lines_per_file) for name, text in texts]
    return [(FileSuggestions(completer, *pair), sample) for pair, sample in zip(texts, samples, strict=True)]


@dataclass(frozen=True)
class Interval:
    """A mean over files with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def percent(self, sign: str = "") -> str:
        """The mean and the interval in percent, as in 21.5 [18.5, 24.8]; with "+" as `sign`, signs are written."""
        return f"{100 * self.mean:{sign}.1f} [{100 * self.low:{sign}.1f}, {100 * self.high:{sign}.1f}]"


def file_means(values: Sequence[float], files: Sequence[int]) -> np.ndarray:
    """Mean of the values of each file, float (F,); `files` has the file index of each value."""
    _, owners = np.unique(np.asarray(files, int), return_inverse=True)
    means: np.ndarray = np.bincount(owners, np.asarray(values, float)) / np.bincount(owners)
    return means


def interval(means: np.ndarray, seed: int = 0) -> Interval:
    """The mean over the file means (F,), with a bootstrap interval that resamples files.

    For paired differences, pass the differences (F,). Raises ValueError without files.
    """
    if not len(means):
        raise ValueError("no file to take a mean over; pass sources with at least one line that is not left out")
    rows = np.random.default_rng(seed).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[rows].mean(1), [2.5, 97.5])
    return Interval(float(means.mean()), float(low), float(high))
