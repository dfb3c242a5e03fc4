"""A file's text as ids, as training and completion see it: its path, then its lines."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dunes.text import Tokenizer
from dunes.text.lines import split_lines

FILE_SEPARATOR = "<|file_sep|>"
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
        self._line = lru_cache(CACHED_LINES)(lambda line: tuple(tokenizer.encode(line)))

    def start(self, name: str) -> list[int]:
        """The ids before the first line of a file: its path, where the model knows paths, else those of a document."""
        if not self.header:
            return list(self.tokenizer.document_start)
        path = f"{name}\n" if name else ""
        return [self.tokenizer.token_id(FILE_SEPARATOR), *(self._line(path) if path else ())]

    def tokenize(self, text: str, name: str = "") -> TokenizedText:
        """The ids of a text from its beginning, in lines; a part of a line at its end counts as one."""
        ids = self.start(name)
        if self.tokenizer.line_separable:
            starts = []
            for line in split_lines(text):
                starts.append(len(ids))
                ids += self._line(line)
            return TokenizedText(ids, starts)
        starts = [len(ids)]
        for id in self.tokenizer.encode(text):
            ids.append(id)
            if b"\n" in self.pieces[id]:
                starts.append(len(ids))
        return TokenizedText(ids, starts)


def window(ids: Sequence[int], length: int) -> Sequence[int]:
    """The last ids that a model of this context length can attend to, from a place that seldom moves.

    When a text grows by one id, nearly always the window does, too, so that the cache of the model holds.
    """
    if len(ids) <= length:
        return ids
    step = max(1, length // 4)
    return ids[-(-(len(ids) - length) // step) * step :]
