"""Completers without a neural network, which a model must beat: nothing, nearest copy, n-grams with a cache."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from dunes.generate.context_index import ContextIndex, Match
from dunes.generate.copying import TextSource
from dunes.runs.completion.cuts import first_line, first_word
from dunes.runs.completion.protocol import LineCompleter, Suggestion
from dunes.runs.completion.text import without_overlap

NamedText = tuple[str, str]
"""The name and the text of a file."""
LONGEST = 128
"""Bytes before the cursor of which a match is searched."""
ORDER, WEIGHT = 6, 0.5
"""The n-grams' order, and the weight of each order against the lower ones, and of the file against the corpus."""
TOKENS = 48
"""The most tokens that are written of a line."""
CANDIDATES = 32
"""The number of most frequent tokens of each order that are compared."""
_TOKEN = re.compile(r"\r?\n[ \t]*|[ \t]*(?:\w+|[^\w\s])|[ \t]+|\s")
_REST_OF_LINE = re.compile(rb"[^\0\r\n]*")


class Empty:
    """Suggests nothing."""

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """An empty suggestion."""
        return Suggestion("", 0.0, 0.0)


class CopyNearest:
    """Copies what followed the longest match of the text before the cursor, of at most 128 bytes.

    The match is searched in `far`, above the cursor in the file, and behind it where that text is given; of
    equally long ones the file's wins, and the last one in the same text. Both probabilities are a function of the
    match's length that only orders suggestions.
    """

    def __init__(self, far: TextSource) -> None:
        self._far = far

    @classmethod
    def of_files(cls, files: Sequence[NamedText]) -> "CopyNearest":
        """Copies from these files."""
        data = b"".join(text.encode(errors="replace") + b"\0" for _, text in files)
        return cls(TextSource(data, ContextIndex(np.frombuffer(data, np.uint8), depth=LONGEST)))

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line behind the match; empty if nothing matches."""
        above = before.encode(errors="replace")
        sources = TextSource(above), TextSource(after.encode(errors="replace")), self._far
        matches = [(source.longest(above[-LONGEST:]), source.text) for source in sources]
        (length, positions), text = max(matches, key=lambda each: each[0][0])
        line = _REST_OF_LINE.match(text, positions[0]) if length else None
        typed = before[max(before.rfind("\n"), before.rfind("\r")) + 1 :] if first_line(after).strip() else ""
        rest = without_overlap(line[0].decode(errors="ignore"), after, typed) if line else ""
        return Suggestion(rest, length / (length + 32), length / (length + 32))

    def match_length(self, before: str) -> int:
        """The number of characters before the cursor that stand in the far text too."""
        data = before[-LONGEST:].encode(errors="replace")
        length, _ = self._far.longest(data)
        return len(data[len(data) - length :].decode(errors="ignore"))


@dataclass(frozen=True)
class _Counts:
    """Tokens that followed a context, the most frequent first, and the number of times that any did."""

    times: Mapping[str, int]
    total: int


class NGram:
    """Token n-grams of order 6 with Jelinek-Mercer interpolation, of the training files and, with the same weight,
    of the file above the cursor; the line is written greedily, of at most 48 tokens.

    A token at the cursor may be the start of a longer one.
    """

    def __init__(self, files: Sequence[NamedText]) -> None:
        ids: dict[str, int] = {"\0": 0}
        tokens = (token for _, text in files for token in (*_TOKEN.findall(text), "\0"))
        self._items = np.fromiter((ids.setdefault(token, len(ids)) for token in tokens), np.int64)
        self._ids, self._tokens = ids, [*ids]
        self._index = ContextIndex(self._items, depth=ORDER - 1)
        self._counts = lru_cache(1 << 16)(self._count)

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The most probable tokens, one by one, up to the line's end."""
        start = before.rfind("\n") + 1
        start = before.rfind("\n", 0, max(0, start - 1)) + 1  # the cache must not change with each key
        file, line = _tokenized(before[:start]), _TOKEN.findall(before[start:])
        stub = line.pop() if line and "\n" not in line[-1] else ""
        text, word, probability = "", 1.0, 1.0
        for _ in range(TOKENS):
            token, p = self._next(file, line, stub)
            if not token and stub:  # no known token starts like this one
                line.append(stub)
                stub = ""
                token, p = self._next(file, line, stub)
            probability *= p
            if not token or "\n" in token or token == "\0":
                break
            text += token[len(stub) :]
            if first_word(text) == text:
                word = probability
            line.append(token)
            stub = ""
        return Suggestion(text, word, probability if text else 0.0)

    def _next(self, file: "_File", line: Sequence[str], stub: str) -> tuple[str, float]:
        """The most probable token that starts with the stub, and its probability; empty if there is none."""
        context = [*file.tokens[-ORDER:], *line][1 - ORDER :]
        orders = [self._orders(context), file.orders(line, context)]
        probs: dict[str, float] = {}
        allowed = 1.0
        for counts in orders:
            for token in self._candidates(counts, stub):
                if token not in probs:
                    probs[token] = sum(WEIGHT * _interpolated(token, each) for each in orders)
        if stub:
            allowed = sum(probs.values())
        if not probs:
            return "", 0.0
        best = max(probs, key=lambda token: probs[token])
        return best, probs[best] / max(allowed, 1e-9)

    def _orders(self, context: Sequence[str]) -> list[_Counts]:
        """The counts after the last token of a context, the last two, and so on."""
        known = [self._ids.get(token, len(self._ids)) for token in context]
        return [self._counts(places) for places in self._index.matches(known)]

    def _count(self, places: Match) -> _Counts:
        positions = self._index.positions(places)
        ids, times = np.unique(self._items[positions[positions < len(self._items)]], return_counts=True)
        order = np.argsort(-times, kind="stable")
        counted = zip(ids[order].tolist(), times[order].tolist(), strict=True)
        return _Counts({self._tokens[number]: count for number, count in counted}, int(times.sum()))

    def _candidates(self, orders: Iterable[_Counts], stub: str) -> Iterator[str]:
        for counts in orders:
            yield from islice((token for token in counts.times if token.startswith(stub)), CANDIDATES)


class _File:
    """The tokens of the lines above the cursor, and where each stands."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self._positions: dict[str, list[int]] = {}
        for position, token in enumerate(tokens):
            self._positions.setdefault(token, []).append(position)

    def orders(self, line: Sequence[str], context: Sequence[str]) -> list[_Counts]:
        """As `NGram._orders`, of the tokens above and those before the cursor in its line."""
        if not context:
            return []
        counts: list[dict[str, int]] = [{} for _ in range(ORDER - 1)]
        tokens = [*self.tokens[-ORDER:], *line]
        for text, ends in (
            (self.tokens, self._positions.get(context[-1], ())),
            (tokens, [i for i in range(len(tokens) - len(line), len(tokens)) if tokens[i] == context[-1]]),
        ):
            for end in ends:
                if end + 1 < len(text):
                    for order in counts[: _common_end(text, end, context)]:
                        order[text[end + 1]] = order.get(text[end + 1], 0) + 1
        return [_Counts(times, sum(times.values())) for times in counts if times]


@lru_cache(4)
def _tokenized(text: str) -> _File:
    return _File(_TOKEN.findall(text))


def _common_end(tokens: Sequence[str], end: int, context: Sequence[str]) -> int:
    """How many tokens up to position `end` equal the end of the context."""
    length = 0
    while length < min(len(context), end + 1) and tokens[end - length] == context[-1 - length]:
        length += 1
    return length


def _interpolated(token: str, orders: Iterable[_Counts]) -> float:
    """The probability of a token: that of each order, from the lowest, mixed with those below it."""
    probability = 0.0
    for counts in orders:
        probability += WEIGHT * (counts.times.get(token, 0) / counts.total - probability)
    return probability


BASELINES: Mapping[str, Callable[[Sequence[NamedText]], LineCompleter]] = {
    "empty": lambda files: Empty(),
    "copy nearest": CopyNearest.of_files,
    "n-gram with cache": NGram,
}
"""What makes each baseline from the training files."""
