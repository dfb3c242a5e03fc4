"""Selection of the lines to complete: of files that the model has not seen, and unlike all training lines."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from dunes.completion.keystrokes import Line, file_lines
from dunes.data.document import NamedText
from dunes.data.duplicates import content_digest, text_digests
from dunes.text.lines import split_lines
from dunes.units import plural

SIMILAR = 0.8
"""Jaccard similarity of the token sets of two lines above which they are near-duplicates."""
FEWEST = 3
"""Minimum tokens of a near-duplicate; shorter lines such as `return None` may be completed."""
_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class ScoredFile:
    """A file, and its lines that are completed."""

    name: str
    text: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class ScoredFiles:
    """The files to score, and counts of what is left out: training files, near-duplicate lines, and files without
    other lines. `line_count` counts the nonblank lines of files that were not trained on."""

    files: Sequence[ScoredFile]
    trained_files: int
    line_count: int
    near_duplicates: int
    files_without_lines: int

    def report(self) -> str:
        """One line: the files and lines that are scored and left out."""
        lines = self.line_count - self.near_duplicates
        return (
            f"{plural(len(self.files), 'file')}, {plural(lines, 'line')}; left out: "
            f"{plural(self.trained_files, 'file')} that the model was trained on, "
            f"{plural(self.near_duplicates, 'line')} like one of the training, "
            f"{plural(self.files_without_lines, 'file')} without other lines"
        )


class LineIndex:
    """The lines of texts, indexed to find near-duplicates of a line.

    Token sets are compared only if their rarest tokens meet: similar sets share one among the first |set| -
    ceil(0.8 |set|) + 1 (prefix filtering, https://doi.org/10.1145/1242572.1242591).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._lines = {line.strip() for text in texts for line in split_lines(text)}
        words = map(_TOKEN.findall, self._lines)
        sets = {frozenset[str](line) for line in words if len(line) >= FEWEST}
        self._times = Counter(token for tokens in sets for token in tokens)
        self._sets: dict[str, list[frozenset[str]]] = {}
        for tokens in sets:
            for token in self._rarest(tokens):
                self._sets.setdefault(token, []).append(tokens)

    def has_similar(self, line: str) -> bool:
        """True if a line equals one of the texts' lines after stripping, or its token set is similar."""
        words = _TOKEN.findall(line)
        if len(words) < FEWEST:
            return False
        tokens = frozenset(words)
        return line.strip() in self._lines or any(
            len(tokens & other) > SIMILAR * len(tokens | other)
            for token in self._rarest(tokens)
            for other in self._sets.get(token, ())
        )

    def _rarest(self, tokens: frozenset[str]) -> list[str]:
        rarity = sorted(tokens, key=lambda token: (self._times[token], token))
        return rarity[: len(tokens) - ceil(SIMILAR * len(tokens)) + 1]


def scored_files(
    texts: Sequence[NamedText],
    training: Sequence[NamedText],
    all_lines: bool = False,
    seen: Collection[bytes] = (),
) -> ScoredFiles:
    """Select the files and lines to score for a model trained on the `training` files.

    Files with the text of a training file, or a digest in `seen`, are left out regardless of white space, and so
    are near-duplicates of training lines unless `all_lines`. Raises ValueError if nothing is left.
    """
    digests = text_digests(training) | {*seen}
    unseen = [(name, text) for name, text in texts if content_digest([text]) not in digests]
    index = LineIndex(() if all_lines else (text for _, text in training))
    files, line_count = [], 0
    for name, text in unseen:
        lines = file_lines(text)
        line_count += len(lines)
        files.append(ScoredFile(name, text, [line for line in lines if not index.has_similar(line.text)]))
    nonempty = [file for file in files if any(len(line.text) > 1 for line in file.lines)]
    count = sum(len(file.lines) for file in nonempty)
    counts = len(texts) - len(unseen), line_count, line_count - count, len(unseen) - len(nonempty)
    scored = ScoredFiles(nonempty, *counts)
    if not nonempty:
        raise ValueError(f"no line to complete ({scored.report()}); pass files that the model was not trained on")
    return scored
