"""Which of two suggestions is better: of a run's own model, or of an open one beside it."""

import json

import numpy as np
import pytest
import torch

from conftest import refuses
from dunes.completion import Suggestion
from dunes.completion.pair import (
    FEATURES,
    PRIOR,
    Cursor,
    Pair,
    features,
    fit_logistic,
    fit_pair,
    fit_weights,
    right,
    sigmoid,
)


def said(text, p, source="model"):
    return Suggestion(text, p, p, source=source)


def log_odds():
    """Coefficients for which the calibrated probabilities are those of the suggestions."""
    weights = np.zeros_like(PRIOR)
    for answer, (line, word) in enumerate(((1, 2), (1, 2), (3, 4))):
        weights[answer, 0, line] = weights[answer, 1, word] = 1
    return weights


@pytest.mark.parametrize("ours", [0.2, 0.9, 1.0, 0.0])
def test_the_better_is_shown_with_its_probability(ours):
    pair = Pair(1000, log_odds())
    best = pair.better(said("a", ours), said("b", 0.5, "open"), "")
    assert best.text == ("a" if ours > 0.5 else "b")
    assert best.source == ("model" if ours > 0.5 else "open")
    assert best.line == pytest.approx(max(min(max(ours, 9e-4), 1 - 9e-4), 0.5), abs=1e-4)


def test_features_before_the_open_model_is_asked_are_those_after_it():
    own, opened = said("a b", 0.3), said("a b", 0.7)
    before, after = features(own, None, "a b", 10**6), features(own, opened, "a b", 10**6)
    known = before != 0
    assert np.array_equal(before[known], after[known])
    named = dict(zip(FEATURES, after, strict=True))
    assert (named["equal"], named["own copied"], named["open copied"], named["size"]) == (1, 1, 1, 0)


def cursors(count=240, seed=0):
    """The own model is right where it says so, the open one is far too sure of itself."""
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        p, q = random.random(2)
        own = "yes = 1" if random.random() < p else "no"
        opened = "yes = 1" if random.random() < q / 4 else "nothing"
        rows.append(Cursor(said(own, p), said(opened, q, "open"), "", "yes = 1", number // 6, 1000))
    return rows


def test_a_fit_learns_which_of_both_is_too_sure():
    rows = cursors()
    pair, pairs = fit_pair(rows)
    crossed = [each.choose(c) for each, c in zip(pairs, rows, strict=True)]
    share = lambda suggestions: np.mean([right(s, c.rest)[0] for s, c in zip(suggestions, rows, strict=True)])
    raw = [max((c.own, c.opened), key=lambda s: s.line) for c in rows]
    assert share(crossed) > share(raw) + 0.03
    assert share(crossed) >= share([c.own for c in rows]) - 0.01
    means = [s.line for s in crossed]
    assert np.mean(means) == pytest.approx(share(crossed), abs=0.07)
    assert 0.5 <= pair.sure <= 0.95


def test_without_cursors_coefficients_are_the_shipped_ones():
    assert np.array_equal(fit_weights([]), PRIOR)
    assert fit_pair([])[0].sure == Pair(1, PRIOR).sure
    few = fit_weights(cursors(2))
    assert np.abs(few - PRIOR).max() < 1


@pytest.mark.parametrize(("strength", "scale"), [(10.0, 1.0), (1e-3, 1.0), (1.0, 50.0)])
def test_a_logistic_regression_ends_where_its_gradient_is_zero(strength, scale):
    random = np.random.default_rng(0)
    x, prior = scale * random.normal(size=(80, 4)), random.normal(size=4)
    y = (random.random(80) < sigmoid(x @ random.normal(size=4) / scale)).astype(float)
    w = fit_logistic(x, y, prior, strength)
    weights = torch.tensor(w, requires_grad=True)
    logits = torch.tensor(x) @ weights
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y), reduction="sum")
    loss = loss + strength / 2 * ((weights - torch.tensor(prior)) ** 2).sum()
    loss.backward()
    assert weights.grad.abs().max() < 1e-4 * scale


def test_separable_labels_have_finite_coefficients():
    x = np.ones((9, 1))
    assert np.isfinite(fit_logistic(x, np.ones(9), np.zeros(1), 0.1)).all()


def test_a_pair_is_read_as_it_was_written():
    pair, _ = fit_pair(cursors(90))
    again = Pair.read(json.loads(json.dumps(pair.record())), 1)
    assert (again.size, again.sure) == (1000, pair.sure)
    assert np.allclose(again.weights, pair.weights, atol=1e-4)
    refuses("features", Pair.read, pair.record() | {"features": ["other"]}, 1)
    refuses("finite", Pair.read, pair.record() | {"weights": np.full(PRIOR.shape, np.nan).tolist()}, 1)
