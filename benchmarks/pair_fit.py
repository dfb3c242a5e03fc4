"""Coefficients for the better of two suggestions: of a run's own model, and of an open model beside it.

    python benchmarks/pair_fit.py OUT/PROJECT...

Each folder is one of `knows_more.py`, with the answers of its arms `copying`, `scratch` and `gated` at the same
cursors. For each project, coefficients fitted on the other projects are the prior of a fit on the project's own
cursors, in four parts of its files, as in a run. Printed are right lines, %, of the own and the open model, of the
line with the higher uncalibrated probability, by the coefficients of other projects alone, by both fits, and by
both without asking the open model where the own one is sure; paired differences from the open model with 95 %
intervals over files; the share of cursors at which the open model is not asked, by probability; and the table.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dunes.completion import Suggestion
from dunes.completion.fit import file_means, interval
from dunes.completion.index import MOST
from dunes.completion.pair import PRIOR, STRENGTH, SURES, Array, Cursor, Pair, fit_pair, fit_weights, right
from dunes.progress import print_table

import numpy as np
import tyro

ARMS = ("scratch", "gated", "copying")


def read_cursors(project: Path, first_file: int) -> list[Cursor]:
    """The cursors of a project; its files have numbers from `first_file` on."""
    size = min(MOST, sum(p.stat().st_size for p in (project / "train").rglob("*") if p.is_file()))
    rows = [json.loads((project / f"{arm}.json").read_text()) for arm in ARMS]
    files = sorted({row["file"] for row in rows[0]})
    cursors = []
    for own, opened, copied in zip(*rows, strict=True):
        assert len({(row["file"], row["offset"], row["rest"]) for row in (own, opened, copied)}) == 1
        said = [Suggestion(row["text"], row["word"], row["line"]) for row in (own, opened)]
        file = first_file + files.index(own["file"])
        cursors.append(Cursor(*said, copied["text"], own["rest"], file, size))
    return cursors


def lines(suggestions: Sequence[Suggestion], cursors: Sequence[Cursor]) -> Array:
    """1 for each right line, else 0."""
    return np.array(
        [right(said, cursor.rest)[0] for said, cursor in zip(suggestions, cursors, strict=True)], float
    )


def main(
    projects: tyro.conf.Positional[tuple[Path, ...]], strength: float = STRENGTH, prior_strength: float = 1.0
) -> None:
    """Fit coefficients on projects, each tried on the others.

    Args:
        projects: Folders of projects, at least two.
        strength: Penalty of a run's fit on differences from the coefficients of other projects.
        prior_strength: Penalty of the other projects' fit on differences from the table in the package.
    """
    parts = list[list[Cursor]]()
    for project in projects:
        parts.append(read_cursors(project, 1 + max((c.file for part in parts for c in part), default=-1)))
    columns = ("own", "open", "higher", "others' fit", "both fits", "with sure")
    by_column, asked = {name: list[Array]() for name in columns}, list[Array]()
    for number, part in enumerate(parts):
        others = [cursor for other in (*parts[:number], *parts[number + 1 :]) for cursor in other]
        prior = fit_weights(others, PRIOR, prior_strength)
        alone = Pair(part[0].size, prior, 2.0)
        crossed = [*zip(fit_pair(part, prior, strength)[1], part, strict=True)]
        by_column["own"].append(lines([c.own for c in part], part))
        by_column["open"].append(lines([c.opened for c in part], part))
        by_column["higher"].append(lines([max((c.own, c.opened), key=lambda s: s.line) for c in part], part))
        by_column["others' fit"].append(lines([alone.choose(c) for c in part], part))
        by_column["both fits"].append(lines([replace(pair, sure=2.0).choose(c) for pair, c in crossed], part))
        by_column["with sure"].append(lines([pair.choose(c) for pair, c in crossed], part))
        asked.append(np.array([pair.alone(c.own, c.copied).line for pair, c in crossed]))
    rows = [
        row(name, part, [by_column[c][number] for c in columns])
        for number, (name, part) in enumerate(zip([p.name for p in projects], parts, strict=True))
    ]
    everything, joined = [c for part in parts for c in part], [np.concatenate(by_column[c]) for c in columns]
    rows.append(row("all", everything, joined))
    differences = [f"{name} - open" for name in columns if name != "open"]
    print_table("Right lines, %", ["project", "cursors", *columns, *differences], rows)
    unsure_right, own_right, line = joined[4], joined[0], np.concatenate(asked)
    shares = [
        [
            f"{sure:.2f}",
            f"{100 * (line >= sure).mean():.1f}",
            percent(np.where(line >= sure, own_right, unsure_right)),
        ]
        for sure in (*SURES, 1.01)
    ]
    print_table("The open model is not asked", ["from", "% of cursors", "right lines, %"], shares)
    print(json.dumps(fit_weights(everything, PRIOR, prior_strength).round(3).tolist()))


def row(name: str, cursors: Sequence[Cursor], right_lines: Sequence[Array]) -> list[str]:
    """The cells of a table's row."""
    files = [cursor.file for cursor in cursors]
    means = [file_means(values.tolist(), files) for values in right_lines]
    differences = [interval(m - means[1]).percent("+") for number, m in enumerate(means) if number != 1]
    return [name, str(len(cursors)), *map(percent, right_lines), *differences]


def percent(values: Array) -> str:
    """The mean in percent."""
    return f"{100 * values.mean():.1f}"


if __name__ == "__main__":
    tyro.cli(main)
