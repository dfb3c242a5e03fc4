"""Completion data that a training run writes: first the index, at the end the gate and thresholds.

Confidence intervals treat files, not cursors, as samples, since cursors in one file are similar and large files
would dominate.
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dunes import measure
from dunes.checkpoint import Architecture, LoadedModel
from dunes.completion import LineCompleter, Suggestion
from dunes.completion.completer import CopyCompleter
from dunes.completion.copy_gate import Places, best_factor, fit_gate, places_of, within, write_gate
from dunes.completion.engine import CompletionEngine, knows_paths
from dunes.completion.index import FOLDER, TextIndex, first_documents, index_texts, named_texts, write_index
from dunes.completion.keystrokes import CutPoint, column_in_word, cut_points, file_lines, fit_threshold
from dunes.completion.text import FileTokenizer, first_line
from dunes.data import Corpus
from dunes.data.document import NamedText
from dunes.flags import Copies
from dunes.generate.copying import Gate
from dunes.progress import Display, each, part, phase
from dunes.units import plural

BEFORE = 1.2
"""If the last n bytes of each text are used for validation, the index omits the last BEFORE * n bytes."""
BEHIND = 0.9
"""If the last n bytes of each text are used for validation, the gate is fitted on the last BEHIND * n bytes."""
PLACES = (25.0, 500, 20_000)
"""Positions on which the gate is fitted: number per second of the run's duration, minimum and maximum."""
CURSORS = (1.0, 64, 1_000)
"""Cursors at which model and copying are compared: number per second of the run's duration, minimum and
maximum."""
SECONDS = 1.2e-3, 1.5e-2
"""Seconds per gate position and per cursor on one thread, without the model's forwards (see TOKENS)."""
FIT_SECONDS = 1.5e-3
"""Seconds per position for fitting the gate."""
TOKENS = 10, 250
"""The model's forwards per gate position and per cursor take as long as the validation of this many tokens."""
SHARES = 0.09, 0.06
"""Maximum fractions of the run's time for gate positions and for cursors."""
ALONE = 0.15, 0.35
"""Like SHARES, for a run that trains no weights."""
FITTED = 0.2
"""At least this fraction of the time for gate positions is reserved for fitting the gate."""
BYTE_SECONDS = 1.5e-6
"""Seconds per indexed byte."""
LEAST = 4
"""Each compared file with enough lines has at least this many cursors, which limits the number of files."""
FEWEST = 3
"""With fewer files than this, the comparison of model and copying never disables the model."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's t at 97.5 % for 1, 2, ... degrees of freedom; more degrees use the last value."""
ACCEPTANCES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""A threshold is fitted for each of these acceptance rates (accepted / shown suggestions)."""
RESAMPLES = 2_000
Text = TypeVar("Text")


@dataclass(frozen=True)
class CompletionFiles:
    """A run's texts for completion. `index` contains the training files. `gate` has the (name, text) pairs on
    which the gate is fitted. `all_texts` has the pairs of all files, to be indexed at the end of the run."""

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


def begin_completion(run: Path, files: CompletionFiles, architecture: Architecture) -> str:
    """Write the index of a run, so that lines can be copied during training. Returns a message for the user."""
    write_index(run, files.index, files.sources, files.follow_links)
    folder = shlex.quote(str(run)) + architecture.trust_option
    return f"completes lines from now on, at first by copying: dunes complete {folder} FILE:LINE:COLUMN"


@dataclass(frozen=True)
class FitSize:
    """Numbers of positions for fitting the gate (`places`) and of cursors for fitting thresholds (`cursors`).
    `limits` are the seconds after which the evaluation of positions and of cursors stops. `seconds` are the
    estimated durations for positions (including the fit of the gate) and for cursors."""

    places: int
    cursors: int
    limits: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: float, per_token: float = 0.0, shares: tuple[float, float] = SHARES) -> "FitSize":
        """The size for a run that takes `seconds`. On one thread, validation takes `per_token` seconds per token.

        Gate positions and cursors take at most the fractions `shares` of the run's time. Without `per_token`, time
        is not limited, so the fit depends only on the numbers of positions and cursors.
        """
        places, cursors = (int(min(most, max(least, rate * seconds))) for rate, least, most in (PLACES, CURSORS))
        most = tuple(share * seconds if per_token else math.inf for share in shares)
        place, cursor = (fixed + tokens * per_token for fixed, tokens in zip(SECONDS, TOKENS, strict=True))
        estimates = places * (place + FIT_SECONDS), cursors * cursor
        collecting = min(1 - FITTED, place / (place + FIT_SECONDS))
        return cls(places, cursors, (collecting * most[0], most[1]), tuple(map(min, estimates, most)))


@measure.one_thread()  # further threads mostly wait when single tokens are evaluated
def finish_completion(
    run: Path,
    files: CompletionFiles,
    size: FitSize,
    loaded: LoadedModel,
    copies: Copies = "auto",
    save: Callable[[], object] = lambda: None,
) -> str:
    """Fit gate and thresholds on texts that neither the model nor the index has seen, add these texts to the
    index, and write index, gate and thresholds.

    `loaded` is the model that completion will load. `copies` is the value of `dunes train --copies`. `save` saves
    the model; it is called between deleting the old gate and writing the new one. Meanwhile, lines are copied.
    Returns a message for the user.
    """
    engine = CompletionEngine(loaded, files.index, header=knows_paths(loaded))
    copier, texts = CopyCompleter(files.index), [pair for pair in files.gate if pair[1].strip()]
    gated, asked = np.cumsum(size.seconds) / closing_seconds(files, size)
    with phase("fitting the completion gate", 0.0, gated):
        fitted, facts = fit_mixture(engine, texts, size.places, size.limits[0])
    if fitted is None:
        (run / FOLDER / "gate.json").unlink(missing_ok=True)
        save()
        return "completion: no text to fit the gate on, so lines are copied, without the model"
    engine.gate, gate = fitted
    with phase("comparing the model with copying", gated, asked):
        completers = (copier,) if copies == "only" else (engine, copier)
        answers = ask_cursors(completers, _unseen_texts(texts), size.cursors, size.limits[1])
    facts["copies"], facts["verdict"] = choose_copies(copies, paired_shares(answers) if copies != "only" else [])
    used = [(answer.cut, answer.column, answer.suggestions[-facts["copies"]]) for answer in answers]
    facts["thresholds"] = {"word": [(share, fit_threshold(used, share)) for share in ACCEPTANCES]}
    facts["prompt_tokens"] = engine.prompt_tokens
    with phase("indexing the text", asked):
        index = index_texts(files.all_texts, engine.files)
        (run / FOLDER / "gate.json").unlink(missing_ok=True)
        save()
        write_index(run, index, files.sources, files.follow_links)
        write_gate(run, gate, facts)
    folder, is_copying = shlex.quote(str(run)), copies == "auto" and facts["copies"]
    again = f"; to use it: dunes train --out {folder} --resume --copies never --override copies" * is_copying
    return (
        f"completion: {facts['loss']:.3f} nats/token by the model, {facts['mixed_loss']:.3f} with copies "
        f"({plural(len(texts), 'file')}); {facts['verdict']}{again}; "
        f"measure it: dunes eval {folder}{loaded.architecture.trust_option} --completion"
    )


class Answer(NamedTuple):
    """The suggestions of all completers at the cursor `cut` in file number `file`. The cursor is `column`
    characters after the start of a word."""

    file: int
    cut: CutPoint
    column: int
    suggestions: Sequence[Suggestion]


def ask_cursors(
    completers: Sequence[LineCompleter], texts: Sequence[NamedText], count: int, seconds: float = math.inf
) -> list[Answer]:
    """The suggestions at about `count` cursors inside lines of these files; the fewer files, the more cursors per
    file.

    After `seconds`, no further cursor is evaluated. Files are visited in rounds, with up to LEAST cursors per file
    and round.
    """
    texts = texts[: max(1, count // LEAST)]
    per_file = math.ceil(count / max(1, len(texts)))
    rounds = math.ceil(per_file / LEAST)
    cuts = [cut_points(name, text, file_lines(text), count=per_file) for name, text in texts]
    cuts = [[cut for cut in of_file if cut.kind == "character"] for of_file in cuts]
    cursors = [(file, cut) for n in range(rounds) for file in range(len(texts)) for cut in cuts[file][n::rounds]]
    answers = []
    for file, cut in within(seconds, each(cursors)):
        name, before = texts[file][0], texts[file][1][: cut.offset]
        suggestions = [completer.complete(before, "", name) for completer in completers]
        answers.append(Answer(file, cut, column_in_word(before, cut.rest), suggestions))
    return answers


class FileShares(NamedTuple):
    """Shares of correct suggestions by `model` and by `copying` at the same cursors of a file. A line has at most
    one cursor."""

    model: float
    copying: float
    cursors: int


def paired_shares(answers: Sequence[Answer]) -> list[FileShares]:
    """Shares of correct suggestions of two completers, by file."""
    right = [[first_line(s.text).rstrip() == answer.cut.rest for s in answer.suggestions] for answer in answers]
    files = [answer.file for answer in answers]
    means = (file_means(side, files).tolist() for side in zip(*right, strict=True))
    counts = Counter(files)
    return [*map(FileShares, *means, (counts[file] for file in sorted(counts)))] if files else []


def model_minus_copying(files: Sequence[FileShares]) -> "Interval":
    """Difference between the shares of correct suggestions, averaged over files, with Student's 95 % interval.

    All files have the same weight, however many cursors they have. The variance is the larger of two estimates,
    from the differences between files and from the cursors inside files, since a few files may agree by chance.
    With fewer than FEWEST files, the interval is [-1, 1].
    """
    model, copying, cursors = np.array(files, float).T
    mean = float((model - copying).mean())
    if len(files) < FEWEST:
        return Interval(mean, -1.0, 1.0)
    smooth = [(side * cursors + 0.5) / (cursors + 1) for side in (model, copying)]  # avoids zero variances
    inside = np.mean(sum(p * (1 - p) for p in smooth) / cursors)
    deviation = math.sqrt(max((model - copying).var(ddof=1), inside) / len(files))
    half = STUDENT[min(len(files) - 1, len(STUDENT)) - 1] * deviation
    return Interval(mean, max(-1.0, mean - half), min(1.0, mean + half))


def choose_copies(copies: Copies, files: Sequence[FileShares]) -> tuple[bool, str]:
    """True if lines are to be copied without the model, and the reason, for the user. `copies` is the value of
    `dunes train --copies`."""
    if copies == "only":
        return True, "--copies only: lines are copied, without the model"
    if not files:
        return False, "no line was found to compare the model with copying"
    difference, (model, copying, _) = model_minus_copying(files), np.array(files, float).mean(0)
    text = (
        f"{model:.0%} of line ends right, {copying:.0%} by copying alone (difference {difference.percent('+')}, "
        f"{plural(sum(f.cursors for f in files), 'cursor')} in {plural(len(files), 'file')})"
    )
    if difference.high >= 0:
        return False, text
    if copies == "never":
        return False, f"{text}; the model is used anyway, because of --copies never"
    return True, f"{text}, so lines are copied, without the model"


def closing_seconds(files: CompletionFiles, size: FitSize) -> float:
    """Estimated seconds that `finish_completion` takes."""
    return sum(size.seconds) + BYTE_SECONDS * sum(len(text) for _, text in files.all_texts)


def fit_mixture(
    engine: CompletionEngine, texts: Sequence[NamedText], most: int, seconds: float = math.inf
) -> tuple[tuple[Gate, Gate] | None, dict[str, Any]]:
    """Fit two gates for the engine's model and index. Returns both gates (None for texts without tokens) and
    facts.

    Every third text is left out when the first gate is fitted, so that thresholds fitted on these unseen texts are
    not overconfident. The second gate, which is used for completion, is fitted on all texts. The outputs of both
    gates, which change log-probabilities, are multiplied by the factor that is best for the first gate on the
    unseen texts. Without this factor, a gate fitted on few or dissimilar texts makes unseen text less probable.
    The facts contain this factor, and the loss in nats/token on the unseen texts, without a gate and with the
    first gate. At most `most` positions are collected, and none after `seconds`.
    """
    tokenized = [engine.files.tokenize(text, name) for name, text in texts]
    seen = [text for number, text in enumerate(tokenized) if number % 3] or tokenized
    with part(0.0, 0.5):
        places = places_of(engine.loaded, seen, engine.sources, most * 2 // 3, seconds * 2 / 3)
    with part(0.5, 0.75):
        unseen = places_of(engine.loaded, _unseen_texts(tokenized), engine.sources, most // 3, seconds / 3)
    if places is None or unseen is None:
        return None, {}
    with part(0.75, 0.85):
        first = fit_gate(places)
    with part(0.85, 1.0):
        gates = first, fit_gate(Places(*map(torch.cat, zip(places, unseen, strict=True))))
    factor = best_factor(first, unseen)
    for gate in gates:
        gate.scale(factor)
    alone, mixed = -unseen.target_logprob.mean(), unseen.loss(first).mean()
    facts = {"places": len(places.target) + len(unseen.target), "loss": float(alone), "mixed_loss": float(mixed)}
    return gates, facts | {"factor": factor}


def _unseen_texts(texts: Sequence[Text]) -> Sequence[Text]:
    """Every third text, on which the first gate is not fitted."""
    return texts[::3]


@dataclass(frozen=True)
class Interval:
    """A mean over files with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def percent(self, sign: str = "") -> str:
        """The mean and the interval in percent, as in 21.5 [18.5, 24.8]; if `sign` is "+", positive numbers get a
        sign."""
        return f"{100 * self.mean:{sign}.1f} [{100 * self.low:{sign}.1f}, {100 * self.high:{sign}.1f}]"


def file_means(values: Sequence[float], files: Sequence[int]) -> np.ndarray:
    """Mean of the values of each file, float (F,); `files` contains the file index of each value."""
    _, owners = np.unique(np.asarray(files, int), return_inverse=True)
    means: np.ndarray = np.bincount(owners, np.asarray(values, float)) / np.bincount(owners)
    return means


def interval(means: np.ndarray, seed: int = 0) -> Interval:
    """The mean over the file means (F,), with a bootstrap interval that resamples files.

    To compare two completers, `means` can be the differences of their file means. Raises ValueError without files.
    """
    if not len(means):
        raise ValueError("no file has a line to score; pass sources with at least one line that is not left out")
    rows = np.random.default_rng(seed).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[rows].mean(1), [2.5, 97.5])
    return Interval(float(means.mean()), float(low), float(high))
