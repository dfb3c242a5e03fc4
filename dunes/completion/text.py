"""A file's text as ids, as training and completion see it: its path, then its lines."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import trained_text
from dunes.completion.cuts import QUOTES, first_line, unmatched
from dunes.data.fim import FILE
from dunes.generate.copying import is_word
from dunes.text import Tokenizer
from dunes.text.lines import split_lines, valid_text

NEAR, BELOW, LINE = 200_000, 20_000, 4096
"""Characters above and below the cursor that are looked at, and of a line that are encoded at once."""
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
"""Sentinels of fill-in-the-middle as Qwen and StarCoder spell them."""
CACHED_LINES = 1 << 16
"""Lines whose ids are remembered: after a keystroke, all but one are the same."""


class TokenizedText(NamedTuple):
    """Ids, and the index at which each line begins; the first `starts[0]` ids are the header."""

    ids: list[int]
    starts: list[int]


class FileTokenizer:
    """Texts of files as ids; `header` tells whether the model was trained on paths before the files."""

    def __init__(self, tokenizer: Tokenizer, header: bool) -> None:
        self.tokenizer, self.header = tokenizer, header
        self.pieces = tokenizer.token_bytes
        self.ends_word = torch.tensor([not is_word(piece[:1]) for piece in self.pieces])
        self._order = sorted(range(len(self.pieces)), key=self.pieces.__getitem__)
        self._sorted = [self.pieces[i] for i in self._order]
        self._allowed = lru_cache(256)(self._find_allowed)
        self.shorter = lru_cache(256)(self._find_shorter)
        self._lines_above = lru_cache(2)(self._tokenize_lines)  # after a keystroke they are the same
        self._line = lru_cache(CACHED_LINES)(lambda line: tuple(tokenizer.encode_continuation(line)))

    @property
    def end(self) -> int:
        """The id after a file."""
        return self.tokenizer.eos

    def line(self, text: str) -> tuple[int, ...]:
        """The ids of a line or of a part of one; of a very long one, as of several."""
        if len(text) <= LINE:
            return self._line(text)
        return tuple(chain.from_iterable(self._line(text[i : i + LINE]) for i in range(0, len(text), LINE)))

    def split_typed(self, ids: Sequence[int]) -> tuple[Sequence[int], bytes]:
        """The ids without those at the end that could be part of one longer token, and the bytes of these.

        Text that ends in several tokens may go on as one longer token. Characters that no token has stay.
        """
        known = next((n for n in range(len(ids), 0, -1) if not self.pieces[ids[n - 1]]), 0)
        for cut in range(max(known, len(ids) - 8), len(ids)):
            tail = b"".join(self.pieces[i] for i in ids[cut:])
            after = bisect_right(self._sorted, tail)
            if after < len(self._sorted) and self._sorted[after].startswith(tail):
                return ids[:cut], tail
        return ids, b""

    def allowed(self, typed: bytes) -> Tensor | None:
        """Which ids (V,), bool, may be next where the text has to go on with these bytes; None if all may.

        Those that begin with the bytes, and those that the bytes begin with: the line that is meant may be spelled
        in shorter tokens than one that begins with all of what is typed.
        """
        return self._allowed(typed) if typed else None

    def _find_allowed(self, typed: bytes) -> Tensor:
        allowed = torch.zeros(len(self.pieces), dtype=torch.bool)
        begins = lambda piece: piece[: len(typed)]
        first, last = bisect_left(self._sorted, typed, key=begins), bisect_right(self._sorted, typed, key=begins)
        allowed[[*self._order[first:last], *self.shorter(typed)]] = True
        return allowed

    def _find_shorter(self, typed: bytes) -> list[int]:
        """The ids that are a part of these bytes, from their beginning on."""
        parts = [typed[:n] for n in range(1, len(typed))]
        ranges = [(bisect_left(self._sorted, part), bisect_right(self._sorted, part)) for part in parts]
        return [id for first, last in ranges for id in self._order[first:last]]

    def plain(self, text: str) -> list[int]:
        """The ids of a text that is no beginning of a file."""
        if self.tokenizer.line_separable:
            return [i for line in split_lines(text) for i in self.line(line)]
        return self.tokenizer.encode_continuation(text)

    def start(self, name: str) -> list[int]:
        """The ids before the first line of a file: its path, or if the model knows none, a document's start."""
        if not self.header:
            return list(self.tokenizer.document_start)
        return [self.tokenizer.token_id(FILE), *(self.line(f"{name}\n") if name else ())]

    def tokenize(self, text: str, name: str = "") -> TokenizedText:
        """The ids of a text from its beginning, in lines; a part of a line at its end counts as one."""
        if self.tokenizer.line_separable:
            last = max(text.rfind("\n"), text.rfind("\r")) + 1
            above = self._lines_above(text[:last], name)
            return TokenizedText([*above.ids, *self.line(text[last:])], [*above.starts, len(above.ids)])
        ids = self.start(name)
        starts = [len(ids)]
        for id in self.tokenizer.encode(text):
            ids.append(id)
            if b"\n" in self.pieces[id]:
                starts.append(len(ids))
        return TokenizedText(ids, starts)

    def _tokenize_lines(self, text: str, name: str) -> TokenizedText:
        """The same of a text of whole lines, without the empty one at its end."""
        ids, starts = self.start(name), list[int]()
        for line in split_lines(text)[:-1]:
            starts.append(len(ids))
            ids += self.line(line)
        return TokenizedText(ids, starts)


class FimForm(NamedTuple):
    """The ids of the sentinels before prefix, suffix and middle, and whether a prompt ends with the prefix."""

    ids: tuple[int, int, int]
    suffix_first: bool


def fim_form(loaded: LoadedModel) -> FimForm | None:
    """How a model has learned to fill in the middle; None if it has not.

    A model that was trained here says so in its card. Of others, the sentinels in the tokenizer do.
    """
    trained, tokenizer = trained_text(loaded.card), loaded.require_tokenizer()
    if trained and not (trained.get("complete") and trained.get("fim_rate")):
        return None
    for names in FORMS:
        prefix, suffix, middle = map(tokenizer.inner.token_to_id, names)
        if prefix is not None and suffix is not None and middle is not None:
            return FimForm((prefix, suffix, middle), bool(trained))
    return None


def near_text(before: str) -> str:
    """The last part of the text above the cursor, from the beginning of a line where there is one."""
    if len(before) > NEAR:
        part = before[-NEAR:]
        before = part[part.find("\n", 0, LINE) + 1 :]
    return valid_text(before)


def without_overlap(suggestion: str, after: str, typed: str = "") -> str:
    """The suggestion without an end that stands behind the cursor; empty if all of it is what follows the line.

    `typed` is what the line has before the cursor: the line with it is what may follow. Where something stands
    behind the cursor in its line, only the first line is suggested, up to where it would close a bracket or a
    quote that it did not open and that what stands behind closes.
    """
    if (rest := first_line(after).rstrip()).strip():
        line = _before_closed(first_line(suggestion), rest, typed)
        sizes = range(min(len(line), len(rest)), 0, -1)
        return line[: len(line) - next((n for n in sizes if _overlaps(line, rest[:n], typed)), 0)]
    lines = [line.strip() for line in split_lines(typed + suggestion) if line.strip()]
    following = split_lines(after[len(first_line(after)) :].lstrip("\r\n"))
    return "" if lines == [line.strip() for line in following[: len(lines)]] else suggestion


def _before_closed(line: str, rest: str, typed: str) -> str:
    """The line up to a bracket or a quote that is open before the cursor, if the rest behind it closes that."""
    (_, ours), (_, theirs) = unmatched(line), unmatched(rest)
    if ours is not None and theirs is not None and line[ours] == rest[theirs]:
        line = line[:ours]
    quote = rest.lstrip()[:1]
    if quote and quote in QUOTES and typed.count(quote) % 2:
        line = line.partition(quote)[0]
    return line


def _overlaps(line: str, part: str, typed: str) -> bool:
    """Whether the line ends with this part; what the typed line opened is not taken to be closed by it."""
    if not line.endswith(part):
        return False
    before = line[: -len(part)]
    closes_quote = any(part.count(quote) % 2 and before.count(quote) % 2 for quote in QUOTES)
    closes_bracket = unmatched(part)[1] is not None and unmatched(before)[0] and unmatched(typed)[0]
    return not (closes_quote or closes_bracket)


def window(ids: Sequence[int], length: int) -> Sequence[int]:
    """The last ids that a model of this context length can attend to, from a place that seldom moves.

    When a text grows by one id, nearly always the window does, too, so that the cache of the model holds.
    """
    if len(ids) <= length:
        return ids
    step = max(1, length // 4)
    return ids[-(-(len(ids) - length) // step) * step :]
