"""Means and intervals over files.

Files are the clusters of the bootstrap: cursors in one file are alike, and one large file must not decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000


@dataclass(frozen=True)
class Interval:
    """A mean over files, and its 95 % interval."""

    mean: float
    low: float
    high: float

    def percent(self, sign: str = "") -> str:
        """The mean and the interval in percent, as in 21.5 [18.5, 24.8]; `sign` "+" writes signs."""
        return f"{100 * self.mean:{sign}.1f} [{100 * self.low:{sign}.1f}, {100 * self.high:{sign}.1f}]"


def file_means(values: Sequence[float], files: Sequence[int]) -> np.ndarray:
    """The mean of the values of each file (F,); `files` has the file's number for each value."""
    _, owners = np.unique(np.asarray(files, int), return_inverse=True)
    means: np.ndarray = np.bincount(owners, np.asarray(values, float)) / np.bincount(owners)
    return means


def interval(means: np.ndarray, seed: int = 0) -> Interval:
    """The mean over files of their means (F,), with the interval of a bootstrap that resamples files.

    Of paired differences, pass the differences (F,). Raises ValueError without files.
    """
    if not len(means):
        raise ValueError("no file to take a mean over; pass sources with at least one line that is not left out")
    drawn = np.random.default_rng(seed).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[drawn].mean(1), [2.5, 97.5])
    return Interval(float(means.mean()), float(low), float(high))
