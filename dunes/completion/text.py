"""Encode a file as ids, for training and completion: its path, then its lines."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dunes.checkpoint import LoadedModel
from dunes.checkpoint.trained_text import trained_text
from dunes.data.fim import FILE
from dunes.generate.copying import is_word
from dunes.generate.sampling import log_probs
from dunes.text import Tokenizer
from dunes.text.lines import split_lines, valid_text

NEAR = 200_000
"""Maximum number of characters above the cursor that are used."""
BELOW = 20_000
"""Maximum number of characters below the cursor that are used."""
LINE = 4096
"""A line of more characters is encoded in pieces of this length."""
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
"""Fill-in-the-middle sentinels of Qwen and of StarCoder."""
_WORD = re.compile(r"[\r\n]*[^\w\r\n]*\w*")
"""A word as accepted by the editor plug-in copilot.vim: line ends, other characters, then the next identifier.
https://github.com/github/copilot.vim (AcceptWord)"""
_TOKEN = re.compile(r"[ \t]*(?:\w+|[^\w\s])")
"""An identifier or one other character, with the spaces before it."""
BRACKETS = {"(": ")", "[": "]", "{": "}"}
"""Brackets that an editor closes automatically."""
QUOTES = "\"'`"
"""Quotes that an editor closes automatically."""
_LINE_END = re.compile(r"[\r\n]")
BOUNDARIES = (
    (r"(?<=[!-~])(?=[\r\n])", rb"[!-~][\r\n]"),
    (r"(?<=\n)(?=[ \t]*[!-~])", rb"\n(?:[ \t]+\Z|[ \t]*[!-~])"),
)
"""Pairs of patterns for tokenizers that have tokens across line ends. The first pattern of a pair matches the
places at which a text is split: before line ends that follow a printable character (GPT-2), or after the last line
end (LLaMA 3). The second pattern matches a token across such a split."""
_PROBE = "".join(
    f"{end}{join}{start}"
    for end in ("x", "1", ");", '"', "'s", "é", "字", "\u3000", " ", "\t")
    for join in ("\n", "\r\n", "\r", "\n\n", "\n  \n", "\n\t", "\n    ", " \n", "\n\n        ")
    for start in ("x", "1", "'s", "(x", "#", "é", "字", "}", "\u3000x")
)
"""A test text that combines line ends with many kinds of characters before and after."""
HEALED = 8
"""At most this many ids of line ends and spaces before the cursor are generated again."""
CACHED_LINES = 1 << 16
"""Number of lines, or other parts of texts, whose ids are cached; a keystroke changes only one part."""
RECENT = 12
"""Number of cached results of `FileTokenizer.recent`. Each file takes four cache entries: the lines above the
cursor, the sources to copy from, the index without this file, and an index of the request's files."""


class TokenizedText(NamedTuple):
    """Ids, and the index at which each line starts; the first `starts[0]` ids are the header.

    `ids[last:]` are the ids of the last line, and possibly of text above it. No token crosses the boundary before
    these ids.
    """

    ids: list[int]
    starts: list[int]
    last: int


class FileTokenizer:
    """Encodes the texts of files; `header` is True if a file's path preceded its text in training.

    The ids of lines are cached. The function `recent(make, *arguments)` returns `make(*arguments)` and caches the
    result, since most of a file is the same after a keystroke.
    """

    def __init__(self, tokenizer: Tokenizer, header: bool) -> None:
        self.tokenizer, self.header = tokenizer, header
        self.pieces = tokenizer.token_bytes
        self.in_word = torch.tensor([is_word(piece[:1]) for piece in self.pieces], dtype=torch.bool)
        self._order = sorted(range(len(self.pieces)), key=self.pieces.__getitem__)
        self._sorted = [self.pieces[i] for i in self._order]
        self.allowed = lru_cache(256)(self._find_allowed)
        self.shorter = lru_cache(256)(self._find_shorter)
        self.recent = lru_cache(RECENT)(lambda make, *arguments: make(*arguments))
        self._line = lru_cache(CACHED_LINES)(lambda line: tuple(tokenizer.encode_continuation(line)))
        self._longest = max(map(len, self.pieces), default=0)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities (V,) of the tokenizer's ids, from a model's logits; on the CPU, like the gate."""
        return log_probs(logits[: len(self.pieces)].cpu())

    def line(self, text: str) -> tuple[int, ...]:
        """The ids of a line or part of a line; a very long line is encoded in pieces."""
        if len(text) <= LINE:
            return self._line(text)
        return tuple(chain.from_iterable(self._line(text[i : i + LINE]) for i in range(0, len(text), LINE)))

    def split_typed(self, ids: Sequence[int]) -> tuple[Sequence[int], bytes]:
        """Split ids into ids to keep, and the bytes of the last ids, which a longer token could replace.

        After more typing, the last tokens may become one longer token. Ids without bytes, such as sentinels, are
        never replaced.
        """
        split, tail = len(ids), b""
        for cut in range(len(ids) - 1, -1, -1):
            piece = self.pieces[ids[cut]]
            if not piece or len(tail) + len(piece) >= self._longest:
                break
            tail = piece + tail
            after = bisect_right(self._sorted, tail)
            if after < len(self._sorted) and self._sorted[after].startswith(tail):
                split = cut
        if not self.tokenizer.line_separable and not b"".join(self.pieces[i] for i in ids[split:]).strip():
            # Line ends and spaces form one word for the tokenizer, but the last space may belong to the next word.
            least = min(split, max(0, len(ids) - HEALED))
            split = next((n for n in range(split, least, -1) if not self.pieces[ids[n - 1]].isspace()), least)
        return ids[:split], b"".join(self.pieces[i] for i in ids[split:])

    def _find_allowed(self, typed: bytes) -> Tensor | None:
        """Mask (V,), bool, of ids that may come next if the text must continue with `typed`; None if `typed` is
        empty. An id is allowed if its bytes start with `typed`, or are a prefix of `typed` (a shorter token).
        """
        if not typed:
            return None
        allowed = torch.zeros(len(self.pieces), dtype=torch.bool)
        begins = lambda piece: piece[: len(typed)]
        first, last = bisect_left(self._sorted, typed, key=begins), bisect_right(self._sorted, typed, key=begins)
        allowed[[*self._order[first:last], *self.shorter(typed)]] = True
        return allowed

    def _find_shorter(self, typed: bytes) -> list[int]:
        """Ids whose bytes are a proper prefix of these bytes."""
        parts = [typed[:n] for n in range(1, len(typed))]
        ranges = [(bisect_left(self._sorted, part), bisect_right(self._sorted, part)) for part in parts]
        return [id for first, last in ranges for id in self._order[first:last]]

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that is not at the start of a file."""
        return [i for part in self._parts(text) for i in self._encode_part(part)]

    def start(self, name: str) -> list[int]:
        """The ids before the first line of a file: its path, or the ids that start every document if training had
        no paths."""
        if not self.header:
            return list(self.tokenizer.document_start)
        return [self.tokenizer.token_id(FILE), *(self.line(f"{name}\n") if name else ())]

    def tokenize(self, text: str, name: str = "") -> TokenizedText:
        """The ids of a text from its start, and the starts of its lines, including an unfinished last line."""
        line = line_start(text)
        above, part = self.recent(self._tokenize_parts, text[:line], name)
        ids, starts = [*above.ids], [*above.starts]
        *parts, last = self._parts(text[line - len(part) :])
        for part in parts:
            self._append(ids, starts, part)
        size = len(ids)
        self._append(ids, starts, last)
        return TokenizedText(ids, starts, size)

    def _tokenize_parts(self, text: str, name: str) -> tuple[TokenizedText, str]:
        """Tokenize all parts of a text of complete lines except the last part, which is returned as text."""
        ids, *parts = self.start(name), *self._parts(text)
        starts = [] if self.tokenizer.line_separable else [len(ids)]
        for part in parts[:-1]:
            self._append(ids, starts, part)
        return TokenizedText(ids, starts, len(ids)), parts[-1]

    def _append(self, ids: list[int], starts: list[int], part: str) -> None:
        """Append the ids of a part of a text, and the starts of its lines."""
        if self.tokenizer.line_separable:
            starts.append(len(ids))
            ids += self.line(part)
            return
        is_first = starts == [len(ids)]
        for id in self.tokenizer.encode(part) if is_first else self._encode_part(part):
            ids.append(id)
            if b"\n" in self.pieces[id]:
                starts.append(len(ids))

    def _parts(self, text: str) -> list[str]:
        """Split a text into parts, at least one, whose ids concatenate to the ids of the text."""
        if self.tokenizer.line_separable:
            return split_lines(text)
        return self._boundary.split(text) if self._boundary else [text]

    def _encode_part(self, part: str) -> Sequence[int]:
        if self.tokenizer.line_separable:
            return self.line(part)
        return self._line(part) if len(part) <= LINE else self.tokenizer.encode_continuation(part)

    @cached_property
    def _boundary(self) -> re.Pattern[str] | None:
        """The first pattern in BOUNDARIES that splits texts without changing their ids; None if there is none."""
        for boundary, across in BOUNDARIES:
            if not any(map(re.compile(across).search, self.pieces)):
                first, *parts = re.split(boundary, _PROBE)
                ids = [*self.tokenizer.encode(first), *chain.from_iterable(map(self._line, parts))]
                if ids == self.tokenizer.encode(_PROBE):
                    return re.compile(boundary)
        return None


class FimForm(NamedTuple):
    """The sentinel ids before prefix, suffix and middle. If `suffix_first`, a prompt ends with the prefix."""

    ids: tuple[int, int, int]
    suffix_first: bool


def fim_form(loaded: LoadedModel) -> FimForm | None:
    """The fill-in-the-middle format of a model; None if the model was not trained to fill in the middle.

    The card of a model trained with dunes records the format; for other models, the format depends on the
    tokenizer's sentinels.
    """
    trained, tokenizer = trained_text(loaded.card), loaded.require_tokenizer()
    if "none" in trained.get("trainable", ()):
        trained = {}
    if trained and not (trained.get("complete") and trained.get("fim_rate")):
        return None
    for names in FORMS:
        prefix, suffix, middle = map(tokenizer.inner.token_to_id, names)
        if prefix is not None and suffix is not None and middle is not None:
            return FimForm((prefix, suffix, middle), bool(trained))
    return None


def near_text(before: str) -> str:
    """The text before the cursor, cut to about its last NEAR characters, from the start of a line if possible.

    The cut moves only each time the text has grown by `NEAR // 4` characters.
    """
    if len(before) > NEAR:
        step = NEAR // 4
        part = before[-(-(len(before) - NEAR) // step) * step :]
        before = part[part.find("\n", 0, LINE) + 1 :]
    return valid_text(before)


def without_overlap(suggestion: str, after: str, typed: str = "") -> str:
    """The suggestion without the part that already follows the cursor; empty if the suggestion repeats the next
    lines.

    `typed` is the part of the line before the cursor; it precedes the suggestion in the comparison with the next
    lines. If the line continues behind the cursor, the suggestion is cut to a single line. This line ends before a
    closing bracket or quote that already follows the cursor.
    """
    if (rest := first_line(after).rstrip()).strip():
        line = _before_closing(first_line(suggestion), rest, typed)
        sizes = range(min(len(line), len(rest)), 0, -1)
        return line[: len(line) - next((n for n in sizes if _overlaps(line, rest[:n], typed)), 0)]
    lines = [line.strip() for line in split_lines(typed + suggestion) if line.strip()]
    following = split_lines(after[len(first_line(after)) :].lstrip("\r\n"))
    return "" if lines == [line.strip() for line in following[: len(lines)]] else suggestion


def _before_closing(line: str, rest: str, typed: str) -> str:
    """The line, cut before a closing bracket or quote that `rest` already contains."""
    (_, line_place), (_, rest_place) = unmatched(line), unmatched(rest)
    if line_place is not None and rest_place is not None and line[line_place] == rest[rest_place]:
        line = line[:line_place]
    quote = rest.lstrip()[:1]
    if quote and quote in QUOTES and typed.count(quote) % 2:
        line = line.partition(quote)[0]
    return line


def _overlaps(line: str, part: str, typed: str) -> bool:
    """True if the line ends with `part`. False if `part` closes a quote that the line opens, or closes a bracket
    that the line opens while `typed` has open brackets."""
    if not line.endswith(part):
        return False
    before = line[: -len(part)]
    closes_quote = any(part.count(quote) % 2 and before.count(quote) % 2 for quote in QUOTES)
    closes_bracket = unmatched(part)[1] is not None and unmatched(before)[0] and unmatched(typed)[0]
    return not (closes_quote or closes_bracket)


def window(ids: Sequence[int], length: int, moves: int = 4) -> Sequence[int]:
    """The last ids, at most `length`, of a text. The index of the first of them is a multiple of `length //
    moves`.

    When a text grows by one id, its window nearly always grows by the same id, so that the KV cache stays valid.
    On average, each new id causes `moves - 1` ids to be evaluated again.
    """
    if len(ids) <= length:
        return ids
    step = max(1, length // moves)
    return ids[-(-(len(ids) - length) // step) * step :]


def line_start(text: str) -> int:
    """The index at which the last line of a text starts."""
    return max(text.rfind("\n"), text.rfind("\r")) + 1


def first_line(text: str) -> str:
    """The text up to its first line end."""
    return _LINE_END.split(text, maxsplit=1)[0]


def unmatched(text: str) -> tuple[str, int | None]:
    """Two values: the closing brackets missing at the end of a text, innermost first, and None. For a text with an
    unmatched closing bracket, returns an empty string and the position of the first such bracket."""
    closing = ""
    for place, character in enumerate(text):
        if character in BRACKETS:
            closing = BRACKETS[character] + closing
        elif character in BRACKETS.values():
            if not closing:
                return "", place
            closing = closing[1:]
    return closing, None


def whole_words(text: str) -> str:
    """The text without its last identifier or character, which may be incomplete."""
    *_, last = 0, *(token.start() for token in _TOKEN.finditer(text))
    return text[:last]


def first_word(text: str) -> str:
    """The line up to the end of its first identifier, or the entire line if it has no identifier."""
    word = _WORD.match(text)
    return word[0] if word else ""
