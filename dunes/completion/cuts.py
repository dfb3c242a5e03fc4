"""Cursor positions for evaluating completion: seeded positions in the lines of a file.

The positions are a pure function of the seed, the file's name and its text, so that all completers get the same
requests, and a new file changes no position in another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import numpy as np

from dunes.text.lines import split_lines

_WORD = re.compile(r"[\r\n]*[^\w\r\n]*\w*")
"""A word as accepted by the editor plug-in copilot.vim: line ends, other characters, then the next identifier.
https://github.com/github/copilot.vim (AcceptWord)"""
_TOKEN = re.compile(r"[ \t]*(?:\w+|[^\w\s])")
"""An identifier or one other character, with the spaces before it."""
BRACKETS = {"(": ")", "[": "]", "{": "}"}
"""Brackets that an editor closes automatically."""
QUOTES = "\"'`"
"""Quotes that an editor closes automatically."""
LONGEST = 200
"""Longest line that is typed, in characters: nobody types longer ones, and each character is a request."""
_IDENTIFIER = re.compile(r"\w\w")
_LINE_END = re.compile(r"[\r\n]")


@dataclass(frozen=True)
class Line:
    """A line that is not blank: `text` without indentation and trailing white space; the offsets of its start and
    of the line's end in the file, in characters."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class CutPoint:
    """A cursor in a line of a file. `offset` and `end` (of the line) are in characters from the start of the file,
    `rest` is the text between them, without trailing white space and never empty. `behind` has the closing
    brackets that an editor inserted behind the cursor; `rest` then ends before them."""

    offset: int
    end: int
    rest: str
    kind: Literal["character", "line start", "closed"]
    mid_identifier: bool
    behind: str = ""


def file_lines(text: str) -> list[Line]:
    """The lines of a file that are not blank."""
    lines, start = [], 0
    for line in split_lines(text):
        if content := line.strip():
            body = line.rstrip("\r\n")
            lines.append(Line(start + len(line) - len(line.lstrip()), start + len(body), content))
        start += len(line)
    return lines


def cut_points(name: str, text: str, lines: Sequence[Line], seed: int = 0, count: int = 60) -> list[CutPoint]:
    """At most `count` cursors inside lines, and a third as many at line starts, each kind in the file's order. A
    cursor inside brackets that the line closes later occurs twice, also with the closing brackets behind it.

    Lines are drawn without replacement, then a character in each, so that long lines have no more cursors than
    short ones. A cursor has at least one character of the line before it (without indentation), and one after it.
    """
    random = _generator(name, text, seed)
    longer = [line for line in lines if len(line.text) > 1]
    sample = [longer[i] for i in np.sort(random.choice(len(longer), min(count, len(longer)), replace=False))]
    cuts = [_cut_point(text, line, int(random.integers(1, len(line.text))), "character") for line in sample]
    starts = np.sort(random.choice(len(lines), min(-(-count // 3), len(lines)), replace=False))
    with_brackets = [other for cut in cuts if (other := _inside_brackets(text, cut))]
    return cuts + [_cut_point(text, lines[i], 0, "line start") for i in starts] + with_brackets


def sample_lines(name: str, text: str, lines: Sequence[Line], seed: int = 0, count: int = 12) -> list[Line]:
    """At most `count` of the lines of at most 200 characters, in their order."""
    lines = [line for line in lines if len(line.text) <= LONGEST]
    indices = _generator(name, text, seed + 1).choice(len(lines), min(count, len(lines)), replace=False)
    return [lines[number] for number in np.sort(indices)]


def first_line(text: str) -> str:
    """The text up to its first line end."""
    return _LINE_END.split(text, maxsplit=1)[0]


def unmatched(text: str) -> tuple[str, int | None]:
    """Closing brackets for a text's open ones, innermost first, and the position of its first unmatched closing
    one."""
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
    """The line up to the end of its first identifier, or the whole line if it has none."""
    word = _WORD.match(text)
    return word[0] if word else ""


def _cut_point(text: str, line: Line, column: int, kind: Literal["character", "line start"]) -> CutPoint:
    offset = line.start + column
    inside = bool(_IDENTIFIER.fullmatch(text, offset - 1, offset + 1))
    return CutPoint(offset, line.end, line.text[column:], kind, inside)


def _inside_brackets(text: str, cut: CutPoint) -> CutPoint | None:
    """The cursor with the closing brackets of all open ones behind it, if the line closes the innermost later."""
    typed = split_lines(text[: cut.offset])[-1]
    behind, (_, place) = unmatched(typed)[0], unmatched(cut.rest)
    if not behind or not place or cut.rest[place] != behind[0] or not cut.rest[:place].strip():
        return None
    return replace(cut, rest=cut.rest[:place].rstrip(), kind="closed", behind=behind)


def _generator(name: str, text: str, seed: int) -> np.random.Generator:
    hashed = blake2b(f"{seed}\0{name}\0".encode(errors="surrogatepass"), digest_size=16)
    hashed.update(text.encode(errors="surrogatepass"))
    return np.random.default_rng(int.from_bytes(hashed.digest()))
