"""Fill-in-the-middle: rearrange windows of tokens so that a model learns to insert text before a suffix.

Windows are rearranged after documents are joined ("context level"), as in https://arxiv.org/abs/2207.14255.
The sentinels are spelled and placed as in Qwen2.5-Coder, https://arxiv.org/abs/2409.12186:

    prefix, suffix, middle:  <|fim_prefix|> P <|fim_suffix|> S <|fim_middle|> M <|endoftext|>
    suffix, prefix, middle:  <|fim_prefix|> <|fim_suffix|> S <|fim_middle|> P M <|endoftext|>

In the second order, prefix and middle are encoded together as one text. Each character that a user types then only
extends the key-value cache of suffix and prefix. In the first order, the suffix follows the typed character, so
the suffix has to be evaluated again.
"""

# Shapes: N ids of a window.

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dunes.text import Tokenizer
from dunes.text.tokenizer import END

FILE = "<|file_sep|>"
LEAST = 16
"""Minimum number of tokens of a text that is rearranged."""
SPAN_LINES = 4
"""Maximum number of lines that a middle spans."""
TRIES = 8
"""Maximum number of tries to cut a window's text into prefix, middle and suffix."""


class Sentinels(NamedTuple):
    """Ids of the tokens before prefix, suffix and middle, after the middle, and before a file."""

    prefix: int
    suffix: int
    middle: int
    end: int
    file: int


NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", END, FILE)


def missing_sentinels(tokenizer: Tokenizer) -> list[str]:
    """The sentinels that a tokenizer lacks or treats as plain text."""
    ids = {name: tokenizer.inner.token_to_id(name) for name in NAMES}
    return [name for name, i in ids.items() if i is None or tokenizer.token_bytes[i]]


def sentinels(tokenizer: Tokenizer) -> Sentinels:
    """The ids of the sentinels. Raises ValueError that names the sentinels that the tokenizer lacks."""
    if missing := missing_sentinels(tokenizer):
        raise ValueError(
            f"{tokenizer.config_path.parent}: completion needs the special tokens {', '.join(missing)}, which "
            "this tokenizer lacks; use --no-complete, or a tokenizer trained here"
        )
    return Sentinels(*map(tokenizer.token_id, NAMES))


@dataclass(frozen=True)
class FillInMiddle:
    """Rearranges a window of ids (N,) with probability `rate`, equally often in either order; returns ids (N,).

    In a window, only the longest text from one document is rearranged, without its file header; other ids keep
    their places. Cuts are between characters. Half of the middles extend from a random character to the end of its
    line; the other half spans up to SPAN_LINES lines. The end of the suffix is cut off to keep the window's
    length. A window is unchanged if its text has fewer than LEAST tokens, or if prefix, middle and sentinels
    exceed its length for each of TRIES random cuts.

    Raises ValueError for a tokenizer without the sentinels.
    """

    tokenizer: Tokenizer
    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"the rate of fill-in-the-middle is {self.rate}; expected 0 to 1")
        assert self.sentinels  # raises for a tokenizer without sentinels

    @cached_property
    def sentinels(self) -> Sentinels:
        """The ids of the tokenizer's sentinels. Raises ValueError for a tokenizer without them."""
        return sentinels(self.tokenizer)

    def __call__(self, ids: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        if random.random() >= self.rate:
            return ids
        start, stop = self._longest_text(ids)
        if stop - start < LEAST:
            return ids
        text = _decode([self.tokenizer.token_bytes[i] for i in ids[start:stop]])
        stop += stop < len(ids) and ids[stop] == self.sentinels.end
        arranged = self._arrange(text, stop - start, random)
        return ids if arranged is None else np.concatenate([ids[:start], arranged, ids[stop:]])

    def is_target(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """A mask that is True for ids to predict: all but the three sentinels that only an editor writes.

        A model that never has these sentinels as targets does not sample them in plain text.
        """
        return ~np.isin(ids, self.sentinels[:3])

    @cached_property
    def _is_text(self) -> NDArray[np.bool_]:
        return np.array([bool(piece) for piece in self.tokenizer.token_bytes])

    def _longest_text(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Start and stop of the longest run of text ids, after any file header or incomplete character."""
        edges = np.flatnonzero(np.diff(self._is_text[ids], prepend=False, append=False))
        texts = [(self._text_start(ids, start, stop), stop) for start, stop in edges.reshape(-1, 2).tolist()]
        return max(texts, key=lambda text: text[1] - text[0], default=(0, 0))

    def _text_start(self, ids: NDArray[np.int64], start: int, stop: int) -> int:
        if start and ids[start - 1] == self.sentinels.file:
            return next((i + 1 for i in range(start, stop) if b"\n" in self.tokenizer.token_bytes[ids[i]]), stop)
        return next((i for i in range(start, stop) if self.tokenizer.token_bytes[ids[i]][0] & 0xC0 != 0x80), stop)

    def _arrange(self, text: str, size: int, random: np.random.Generator) -> list[int] | None:
        """Cut the text in three and encode the parts as `size` ids; None if none of TRIES cuts fits."""
        ends_line, prefix_first = (random.random(2) < 0.5).tolist()
        for _ in range(TRIES if text else 0):
            start, end = draw_middle(text, ends_line, random)
            if ids := self._join((text[:start], text[start:end], text[end:]), prefix_first, size):
                return ids
        return None

    def _join(self, parts: tuple[str, str, str], prefix_first: bool, size: int) -> list[int] | None:
        """Encode parts and sentinels as `size` ids; the suffix is cut to fit. None if that is impossible."""
        encode, marks = self.tokenizer.encode_continuation, self.sentinels
        prefix, middle, suffix = parts
        first, last = (encode(prefix), encode(middle)) if prefix_first else ([], encode(prefix + middle))
        suffix_ids, room = encode(suffix), size - 4 - len(first) - len(last)
        if not 0 <= room <= len(suffix_ids):
            return None
        return [marks.prefix, *first, marks.suffix, *suffix_ids[:room], marks.middle, *last, marks.end]


def draw_middle(text: str, ends_line: bool, random: np.random.Generator) -> tuple[int, int]:
    """Draw the start and stop of a middle in a text of at least one character, never between \\r and \\n.

    With `ends_line`, the middle is the rest of a line without the line end; otherwise, it spans up to SPAN_LINES
    lines.
    """
    start = _before_line_end(text, int(random.integers(len(text))))
    lines = 1 if ends_line else int(random.integers(1, 1 + SPAN_LINES))
    limit = _line_end(text, start, lines)
    if ends_line or limit == start:
        return start, limit
    return start, max(start, _before_line_end(text, int(random.integers(start, limit)) + 1))


_LINE_END = re.compile(r"\r\n|[\r\n]")


def _line_end(text: str, start: int, lines: int) -> int:
    """Offset of line end number `lines` after `start`, or the length of a text with fewer line ends."""
    ends = (match.start() for match in _LINE_END.finditer(text, start))
    return next((end for number, end in enumerate(ends, 1) if number == lines), len(text))


def _before_line_end(text: str, index: int) -> int:
    """The index, moved to the \\r if it is between \\r and \\n."""
    return index - (0 < index < len(text) and text[index - 1 : index + 1] == "\r\n")


def find_headers(tokenizer: Tokenizer) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
    """A function of ids (B, N) that returns a mask of file headers, each from <|file_sep|> to the next line end.

    For a tokenizer without <|file_sep|>, the mask is False everywhere.
    """
    file = tokenizer.inner.token_to_id(FILE)
    has_line_end = np.array([b"\n" in piece for piece in tokenizer.token_bytes])

    def headers(ids: NDArray[Any]) -> NDArray[np.bool_]:
        if file is None:
            return np.zeros(ids.shape, np.bool_)
        places = np.arange(ids.shape[1])
        begin = np.maximum.accumulate(np.where(ids == file, places, -1), 1)
        end = np.maximum.accumulate(np.where(has_line_end[ids], places, -1), 1)
        end_before = np.pad(end[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        return begin > end_before

    return headers


def _decode(pieces: Sequence[bytes]) -> str:
    """The text of these tokens, without an incomplete character at its start or end."""
    return b"".join(pieces).decode(errors="ignore")
