"""The rest of a line that repeats the one above it with another name.

    first = padded(first, 3)
    second = padded(▏second, 3)

Both are compared token by token up to the cursor. Where nothing but one word differs, the rest is that of the line
above, in which this word is replaced, or the part of it that differs (of `first_cost` and `second_cost`, `first`).
"""

import re
from collections.abc import Sequence

from dunes.text.lines import split_lines

LINES, REACH, LEAST = 4096, 20_000, 2
"""Characters in which the line above is, in which a word is looked up that is begun, and of that word at least."""
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|_+|.")
_CASES = (str, str.lower, str.capitalize, str.upper)


def renamed_rest(before: str) -> str:
    """What the last line goes on with, if it repeats the one above with another name; else empty."""
    *lines, typed = split_lines(before[-LINES:] + "|")
    above = next((line for line in reversed(lines) if line.strip()), "")
    return _repeated(_TOKEN.findall(typed[:-1].lstrip()), _TOKEN.findall(above.strip()), before[-REACH:])


def _repeated(here: Sequence[str], there: Sequence[str], text: str) -> str:
    """The rest of `there` with the name that `here` has in place of another; empty if there is none."""
    if not 1 < len(here) <= len(there) or (names := _names(there, here[:-1])) is None:
        return ""
    old, part, rest = there[len(here) - 1], here[-1], there[len(here) :]
    end = _renamed(old, names)
    if not end.startswith(part) and not names and (word := _begun(part, old, text)):
        names, end, old = {old: word}, word, word  # only if the rest has it again, it is what is meant
    new = [_renamed(token, names) for token in rest]
    is_other = end.startswith(part) and [end, *new] != [old, *rest]
    return "".join([end[len(part) :], *new]) if is_other else ""


def _names(there: Sequence[str], here: Sequence[str]) -> dict[str, str] | None:
    """The word that differs, and what stands for it; None if more than one does, or something else."""
    pairs = {(a, b) for a, b in zip(there, here, strict=False) if a != b and not (a.isspace() and b.isspace())}
    is_name = len(pairs) <= 1 and all(map(_is_word, *pairs)) if pairs else True
    return dict(pairs) if is_name else None


def _begun(part: str, old: str, text: str) -> str:
    """The last word of the text that goes on after this part of one; empty if it is none, or too short."""
    if len(part) < LEAST or not _is_word(part) or not _is_word(old):
        return ""
    *_, last = "", *(match[0] for match in re.finditer(rf"\b{part}\w+", text[: -len(part)]))
    return last


def _renamed(token: str, names: dict[str, str]) -> str:
    """The token with a name in place of another, or with the part of it that differs."""
    for old, new in names.items():
        if token == old:
            return new
        (gone, come), parts = _difference(old, new), _PART.findall(token)
        for case in _CASES:
            size = len(_PART.findall(case(gone)))
            for place in range(len(parts) - size + 1):
                if min(len(gone), len(come)) > 1 and "".join(parts[place : place + size]) == case(gone):
                    return "".join([*parts[:place], case(come), *parts[place + size :]])
    return token


def _difference(old: str, new: str) -> tuple[str, str]:
    """The parts of two words that differ, without those that they begin and end with."""
    a, b = _PART.findall(old), _PART.findall(new)
    while min(len(a), len(b)) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while min(len(a), len(b)) > 1 and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return "".join(a), "".join(b)


def _is_word(token: str) -> bool:
    return token[:1].isalnum() or token[:1] == "_"
