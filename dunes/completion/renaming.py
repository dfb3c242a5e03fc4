"""The rest of a line that repeats the one above it with another name.

    first = padded(first, 3)
    second = padded(▏second, 3)

Both are compared token by token up to the cursor. Where nothing but one word differs, the rest is that of the line
above, in which this word is replaced, or the part of it that differs (of `first_cost` and `second_cost`, `first`).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from dunes.text.lines import split_lines

LINES, REACH, LEAST = 4096, 20_000, 2
"""Characters in which the line above is, in which a word is looked up that is begun, and of that word at least."""
LONGEST = 400
"""Characters of a line, at most."""
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|_+|.")
_CASES = (str, str.lower, str.upper, lambda w: w[:1].upper() + w[1:], lambda w: w[:1].lower() + w[1:])


class _Name(NamedTuple):
    """A word that stands in place of another, and how the parts of both that differ are spelled in other words."""

    old: str
    new: str
    parts: Sequence[tuple[Sequence[str], str]]


def renamed_rest(before: str) -> str:
    """What the last line goes on with, if it repeats the one above with another name; else empty."""
    *lines, typed = split_lines(before[-LINES:] + "|")
    above, typed = next((line.strip() for line in reversed(lines) if line.strip()), ""), typed[:-1].lstrip()
    if max(len(above), len(typed)) > LONGEST:
        return ""
    return _repeated(_TOKEN.findall(typed), _TOKEN.findall(above), before[-REACH:])


def _repeated(here: Sequence[str], there: Sequence[str], text: str) -> str:
    """The rest of `there` with the name that `here` has in place of another; empty if there is none."""
    if not 1 < len(here) <= len(there):
        return ""
    pairs, part = [*zip(here, there, strict=False)], here[-1]
    differ = {pair for pair in pairs[:-1] if pair[0] != pair[1] and not (pair[0] + pair[1]).isspace()}
    shared = any(a == b and not a.isspace() for a, b in pairs)  # a name and a space repeat nothing
    if len(differ) > 1 or not shared or not all(_is_word(word) for pair in differ for word in pair):
        return ""
    end, rest = there[len(here) - 1], there[len(here) :]
    if differ:
        name = _name(*differ.pop())
        new = [_renamed(token, name) for token in (end, *rest)]
    elif not end.startswith(part) and (word := _begun(part, end, text)):
        end, name = word, _name(word, end)  # only if the rest has it again, it is what is meant
        new = [word, *(_renamed(token, name) for token in rest)]
    else:
        return ""
    is_other = new[0].startswith(part) and new != [end, *rest]
    return "".join([new[0][len(part) :], *new[1:]]) if is_other else ""


def _begun(part: str, old: str, text: str) -> str:
    """The last word of the text that goes on after this part of one; empty if it is none, or too short."""
    if len(part) < LEAST or not _is_word(part) or not _is_word(old):
        return ""
    *_, last = "", *(match[0] for match in re.finditer(rf"\b{part}\w+", text[: -len(part)]))
    return last


def _name(new: str, old: str) -> _Name:
    a, b = _PART.findall(old), _PART.findall(new)
    while min(len(a), len(b)) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while min(len(a), len(b)) > 1 and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    gone, come = "".join(a), "".join(b)
    spelled = [(_PART.findall(case(gone)), case(come)) for case in _CASES] if min(len(gone), len(come)) > 1 else []
    return _Name(old, new, spelled)


def _renamed(token: str, name: _Name) -> str:
    """The token with the name in place of the other, or with the part of it that differs."""
    if token == name.old:
        return name.new
    parts = _PART.findall(token)
    for gone, come in name.parts:
        for place in range(len(parts) - len(gone) + 1):
            if parts[place : place + len(gone)] == gone:
                return "".join([*parts[:place], come, *parts[place + len(gone) :]])
    return token


def _is_word(token: str) -> bool:
    return token[:1].isalnum() or token[:1] == "_"
