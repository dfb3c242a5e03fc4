"""The better of two suggestions: of a run's own model, and of an open model beside it.

Logistic regressions on the suggestions of both and on the copied line give the probabilities that a line, or its
first word, is right. They are fitted on a run's held-out cursors, and drawn to coefficients that were fitted on
other projects (`benchmarks/pair_fit.py`). If the own suggestion is sure, the open model is not asked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dunes.completion import Suggestion
from dunes.completion.text import first_line, first_word

FEATURES = (
    *("constant", "own line", "own word", "open line", "open word", "equal"),
    *("own copied", "open copied", "own length", "open length", "size"),
)
"""Log-odds of lines and first words, whether texts are equal, and logs of lengths and of the size of the text."""
OF_OWN = [0, 1, 2, 6, 8, 10]
"""Features that are known before the open model is asked."""
ANSWERS = "alone", "own", "open"
"""Suggestions that have a probability: the own one before the open model is asked, and both afterwards."""
PRIOR = np.array([
    [[-0.328, 0.683, -0.005, 0.0, 0.0, 0.0, 0.379, 0.0, -0.032, 0.0, 0.438],
     [-0.503, 0.064, 0.773, 0.0, 0.0, 0.0, -0.175, 0.0, 0.445, 0.0, 0.119]],
    [[-1.172, 0.41, -0.01, 0.574, 0.037, 1.5, 0.051, -0.045, -0.191, 0.21, 0.261],
     [-1.329, -0.137, 0.677, 0.037, 0.668, 1.205, -0.374, -0.412, 0.224, 0.009, 0.006]],
    [[-0.127, 0.165, -0.012, 0.855, -0.061, 0.132, 0.216, 0.419, -0.27, 0.441, 0.281],
     [-0.376, -0.127, 0.185, 0.224, 0.933, -0.552, -0.739, 0.722, 0.051, 0.537, 0.337]],
])  # fmt: skip
"""Coefficients of each answer's line and word (3, 2, FEATURES), of 432 cursors in files of three projects
(docs/log/completion.md, "An open model beside the own")."""
STRENGTH = 10.0
"""Penalty on squared differences from PRIOR, in nats per half of a squared difference."""
SURE = 0.8
"""Probability from which on the own line is shown without the open one, if cursors are too few to fit it."""
SURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LOST = 0.005
"""Maximum share of lines that the fitted one of SURES may lose against asking the open model everywhere."""
ENOUGH = 60
"""Minimum number of cursors to choose among SURES, or to do without the open model."""
FOLDS = 4
"""Number of parts of the files; each has the probabilities of a fit on the others."""
CLIPPED = 7.0
"""Maximum log-odds of a suggestion's probability, in both directions."""
Array = NDArray[np.float64]


class Cursor(NamedTuple):
    """The suggestions of both models and of copying at a cursor in file number `file`, the `rest` of its line, and
    the bytes of the run's text."""

    own: Suggestion
    opened: Suggestion
    copied: str
    rest: str
    file: int
    size: int


@dataclass(frozen=True, eq=False)
class Pair:
    """Calibrates both models' suggestions in a run on `size` bytes of text; `weights` are (3, 2, FEATURES).

    The open model need not be asked if the own line's probability is at least `sure`.
    """

    size: int
    weights: Array
    sure: float = SURE

    @classmethod
    def read(cls, record: Mapping[str, Any], size: int) -> "Pair":
        """The pair in a `record`, or the prior one. Raises ValueError for a damaged record."""
        if "weights" not in record:
            return cls(size, PRIOR)
        if [*record.get("features", ())] != [*FEATURES]:
            raise ValueError("coefficients of other features")
        weights = np.array(record["weights"], float).reshape(PRIOR.shape)
        if not (np.isfinite(weights).all() and math.isfinite(record["sure"])):
            raise ValueError("coefficients that are not finite")
        return cls(int(record["size"]), weights, float(record["sure"]))

    def record(self) -> dict[str, Any]:
        """The JSON object for `read`."""
        weights = self.weights.round(5).tolist()
        return {"features": FEATURES, "weights": weights, "sure": self.sure, "size": self.size}

    def alone(self, own: Suggestion, copied: str) -> Suggestion:
        """The own suggestion with the probabilities that it has before the open model is asked."""
        return self._calibrated("alone", own, features(own, None, copied, self.size))

    def better(self, own: Suggestion, opened: Suggestion, copied: str) -> Suggestion:
        """The suggestion whose line is more probable, with calibrated probabilities."""
        x = features(own, opened, copied, self.size)
        pair = self._calibrated("own", own, x), self._calibrated("open", opened, x)
        return max(pair, key=lambda suggestion: suggestion.line)

    def choose(self, cursor: Cursor) -> Suggestion:
        """The suggestion at a cursor, without that of the open model if the own one is sure."""
        alone = self.alone(cursor.own, cursor.copied)
        return alone if alone.line >= self.sure else self.better(cursor.own, cursor.opened, cursor.copied)

    def _calibrated(self, answer: str, suggestion: Suggestion, x: Array) -> Suggestion:
        line, word = (float(p) for p in sigmoid(self.weights[ANSWERS.index(answer)] @ x))
        return replace(suggestion, line=line, word=max(line, word))


def features(own: Suggestion, opened: Suggestion | None, copied: str, size: int) -> Array:
    """The values of FEATURES; without the open suggestion, those that depend on it are 0."""
    x = np.zeros(len(FEATURES))
    line, copy = _line(own.text), _line(copied)
    x[OF_OWN] = (1, *_odds(own), line == copy, math.log1p(len(line)), math.log(max(1, size) / 1e6))
    if opened is not None:
        other = _line(opened.text)
        x[3:6] = (*_odds(opened), line == other)
        x[[7, 9]] = other == copy, math.log1p(len(other))
    return x


def _odds(suggestion: Suggestion) -> list[float]:
    pairs = ((max(p, 1e-9), max(1 - p, 1e-9)) for p in (suggestion.line, suggestion.word))
    return [min(CLIPPED, max(-CLIPPED, math.log(p / q))) for p, q in pairs]


def _line(text: str) -> str:
    return first_line(text).rstrip()


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    y: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return y


def fit_logistic(x: Array, y: Array, prior: Array, strength: float = STRENGTH) -> Array:
    """The coefficients (F,) with the lowest penalised loss for features x (N, F) and labels y (N,).

    The loss is -log-likelihood + strength / 2 * |coefficients - prior|^2, which Newton's method with shorter steps
    where a full one goes too far minimises.
    """

    def loss(w: Array) -> float:
        return float(np.logaddexp(0, (1 - 2 * y) * (x @ w)).sum() + strength / 2 * ((w - prior) ** 2).sum())

    w = prior.copy()
    for _ in range(50):
        p = sigmoid(x @ w)
        gradient = x.T @ (p - y) + strength * (w - prior)
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x + strength * np.eye(len(w)), gradient)
        while (before := loss(w)) < loss(w - step) and np.abs(step).max() > 1e-9:
            step = step / 2
        w = w - step if loss(w - step) <= before else w
        if np.abs(step).max() < 1e-7:
            break
    return w


def fit_weights(cursors: Sequence[Cursor], prior: Array = PRIOR, strength: float = STRENGTH) -> Array:
    """The coefficients (3, 2, FEATURES) for these cursors; without any, those of `prior`."""
    weights = prior.copy()
    for number, answer in enumerate(ANSWERS if cursors else ()):
        x = np.array([features(c.own, None if answer == "alone" else c.opened, c.copied, c.size) for c in cursors])
        y = np.array([right(c.opened if answer == "open" else c.own, c.rest) for c in cursors], float)
        weights[number] = [fit_logistic(x, y[:, part], prior[number, part], strength) for part in (0, 1)]
    return weights


def right(suggestion: Suggestion, rest: str) -> tuple[bool, bool]:
    """True if the line is right, and if its first word is."""
    line = _line(suggestion.text)
    return line == rest, bool(line) and first_word(line) == first_word(rest)


def fit_pair(
    cursors: Sequence[Cursor], prior: Array = PRIOR, strength: float = STRENGTH
) -> tuple[Pair, list[Pair]]:
    """The pair fitted on all cursors of a run, and for each cursor one that was fitted on other files."""
    files, size = sorted({cursor.file for cursor in cursors}), max((c.size for c in cursors), default=0)
    fold_of = {file: number % FOLDS for number, file in enumerate(files)}
    parts = [[c for c in cursors if fold_of[c.file] != fold] for fold in range(FOLDS)]
    *crossed, pair = (Pair(size, fit_weights(part, prior, strength)) for part in (*parts, cursors))
    sure = fit_sure([(crossed[fold_of[cursor.file]], cursor) for cursor in cursors])
    return replace(pair, sure=sure), [replace(crossed[fold_of[c.file]], sure=sure) for c in cursors]


def fit_sure(cursors: Sequence[tuple[Pair, Cursor]]) -> float:
    """The lowest of SURES that loses few lines against asking the open model everywhere."""
    if len(cursors) < ENOUGH:
        return SURE
    sure = np.array([pair.alone(c.own, c.copied).line for pair, c in cursors])
    best = [right(pair.better(c.own, c.opened, c.copied), c.rest)[0] for pair, c in cursors]
    lost = np.array(best, float) - [right(c.own, c.rest)[0] for _, c in cursors]
    return min((s for s in SURES if lost[sure >= s].sum() <= LOST * len(cursors)), default=1.0)
