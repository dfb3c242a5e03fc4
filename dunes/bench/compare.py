"""Find significant differences between two sets of measurements, A and B.

Laps of the same case are paired by round. The ratio of B's time to A's is estimated by the Hodges-Lehmann median
of the logarithms of the pairs' ratios. Its confidence interval is Wilcoxon's signed-rank interval, which assumes
no normal distribution and is robust to outliers (https://en.wikipedia.org/wiki/Hodges-Lehmann_estimator,
https://en.wikipedia.org/wiki/Wilcoxon_signed-rank_test).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

from dunes.bench.rows import SETTING, Row, group_rows

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Difference:
    """Ratio of B's seconds to A's seconds in one case; `interval` is its confidence interval.

    The interval is None if the rounds are too few. `drift` (at least 1) is the factor by which the machine's speed
    differs between A and B.
    """

    what: str
    ratio: float
    interval: tuple[float, float] | None
    pairs: int
    drift: float = 1.0

    @property
    def significant(self) -> bool:
        """True if the confidence interval, widened by the factor `drift` at both ends, excludes 1."""
        low, high = self.interval or (1.0, 1.0)
        return not low / self.drift <= 1.0 <= high * self.drift

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return "too few rounds"
        low, high = self.interval
        if not self.significant:
            return f"no significant difference (below {self.drift * max(1 / low, high) - 1:.1%} would be missed)"
        change = self.ratio - 1 if self.ratio > 1 else 1 / self.ratio - 1
        return f"B takes {change:.1%} longer" if self.ratio > 1 else f"B is {change:.1%} faster"


@dataclass(frozen=True)
class Comparison:
    """Comparison of A and B: `differences` in common cases, `unmatched` cases (in A or B only), `differing`
    columns."""

    differences: list[Difference]
    unmatched: list[str]
    differing: dict[str, tuple[Any, Any]]

    def record(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        results = [asdict(d) | {"significant": d.significant, "verdict": d.verdict} for d in self.differences]
        return {"differences": results, "unmatched": self.unmatched, "differing": self.differing}


def compare(a: Sequence[Row], b: Sequence[Row], confidence: float = CONFIDENCE) -> Comparison:
    """Compare the cases that were measured in both A and B.

    A column that is constant in A and constant in B does not distinguish cases. If the two constants differ
    (another model or number of threads), the column is listed in `differing`. Raises ValueError if no case was
    measured in both, and for an invalid confidence.
    """
    if not 0.5 <= confidence < 1:
        raise ValueError(f"--confidence is {confidence}; expected a number from 0.5 to below 1")
    fixed = [n for n in SETTING if all(len({str(r.get(n)) for r in side}) == 1 for side in (a, b))]
    columns = [n for n in SETTING if n not in fixed or n == "benchmark"]
    sides = [group_rows(side, columns) for side in (a, b)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        raise ValueError(
            f"no case was measured in both: A has {_label(columns, next(iter(sides[0])))}, "
            f"B has {_label(columns, next(iter(sides[1])))}"
        )
    ceilings, same = _ceilings(a, b), all(a[0].get(n) == b[0].get(n) for n in ("machine", "cpu"))
    drift = max((max(x / y, y / x) for x, y in ceilings.values() if same), default=1.0)
    measured = partial(_difference, confidence=confidence, drift=drift)
    results = [measured(_label(columns, key), sides[0][key], sides[1][key]) for key in common]

    unmatched = [_label(columns, key) for key in sides[0].keys() ^ sides[1].keys()]
    values = ((n, a[0].get(n), b[0].get(n)) for n in (*fixed, "machine", "cpu", "torch", "commit"))
    return Comparison(results, sorted(unmatched), {n: (x, y) for n, x, y in values if x != y} | ceilings)


def _label(columns: Sequence[str], key: Sequence[Any]) -> str:
    pairs = zip(columns, key, strict=True)
    return " ".join(str(v) if n in ("benchmark", "subject") else f"{n} {v}" for n, v in pairs)


def _ceilings(a: Sequence[Row], b: Sequence[Row]) -> dict[str, tuple[Any, Any]]:
    """The machine's median rates of matrix products and of memory reads, during A and during B."""
    results = {}
    for name in ("matmul", "read"):
        x, y = ([float(r[name]) for r in side if r.get(name)] for side in (a, b))
        if x and y:
            results[f"{name} rate"] = (median(x), median(y))
    return results


def _difference(label: str, a: Sequence[Row], b: Sequence[Row], confidence: float, drift: float) -> Difference:
    sides = [{int(row.get("round", i)): float(row["seconds"]) for i, row in enumerate(side)} for side in (a, b)]
    logs = [math.log(sides[1][n] / sides[0][n]) for n in sides[0] if n in sides[1]]
    if not logs:
        raise ValueError(f"{label}: no round was measured in both; measure again")
    middle, interval = hodges_lehmann(logs, confidence)
    ratios = interval and (math.exp(interval[0]), math.exp(interval[1]))
    return Difference(label, math.exp(middle), ratios, len(logs), drift)


def hodges_lehmann(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, tuple[float, float] | None]:
    """The Hodges-Lehmann median of the values, and its confidence interval (None for too few values)."""
    means = sorted((x + y) / 2 for i, x in enumerate(values) for y in values[i:])
    count = _critical(len(values), (1 - confidence) / 2)
    return median(means), None if count is None else (means[count], means[-1 - count])


def _critical(n: int, tail: float) -> int | None:
    """Index of the sorted pairwise means at which the interval for `n` values begins; None if `n` is too small.

    The index is the largest s with P(sum of positive ranks <= s) <= `tail` in Wilcoxon's signed-rank distribution.
    """
    counts = [1]
    for rank in range(1, n + 1):  # counts[s]: the number of the 2^n sign patterns whose positive ranks sum to s
        counts = [x + y for x, y in zip([0] * rank + counts, counts + [0] * rank, strict=True)]
    cut = sum(below <= tail * 2**n for below in accumulate(counts))
    return cut - 1 if cut else None
