"""Suggest the rest of a line that repeats the line above with another name.

    first = padded(first, 3)
    second = padded(▏second, 3)

Both lines are compared token by token up to the cursor. If they differ in a single word, the rest of the
line above is copied with this word replaced. Inside other words, only the differing part of the word is
replaced (for `first_cost` and `second_cost`, `first`).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from dunes.text.lines import split_lines

LINES = 4096
"""Number of characters before the cursor in which the line above is searched."""
REACH = 20_000
"""Number of characters before the cursor in which a partly typed word is looked up."""
LEAST = 2
"""Minimum characters of a partly typed word."""
LONGEST = 400
"""Maximum characters of a line."""
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|_+|.")
_CASES = (str, str.lower, str.upper, lambda w: w[:1].upper() + w[1:], lambda w: w[:1].lower() + w[1:])


class _Name(NamedTuple):
    """A word `new` that replaces the word `old`. `parts` has (old, new) spellings of the part in which they
    differ, to be replaced inside other words."""

    old: str
    new: str
    parts: Sequence[tuple[Sequence[str], str]]


def renamed_rest(before: str) -> str:
    """The rest of the last line, if it repeats the line above with another name; otherwise empty."""
    *lines, typed = split_lines(before[-LINES:] + "|")
    above, typed = next((line.strip() for line in reversed(lines) if line.strip()), ""), typed[:-1].lstrip()
    if max(len(above), len(typed)) > LONGEST:
        return ""
    return _repeat(_TOKEN.findall(typed), _TOKEN.findall(above), before[-REACH:])


def _repeat(typed: Sequence[str], above: Sequence[str], text: str) -> str:
    """The rest of the line above, with its name replaced as in the typed line; empty if no name is replaced."""
    if not 1 < len(typed) <= len(above):
        return ""
    pairs, part = [*zip(typed, above, strict=False)], typed[-1]
    differ = {pair for pair in pairs[:-1] if pair[0] != pair[1] and not (pair[0] + pair[1]).isspace()}
    has_common = any(a == b and not a.isspace() for a, b in pairs)  # a name and a space repeat nothing
    if len(differ) > 1 or not has_common or not all(_is_word(word) for pair in differ for word in pair):
        return ""
    end, rest = above[len(typed) - 1], above[len(typed) :]
    if differ:
        name = _name(*differ.pop())
        new = [_rename(token, name) for token in (end, *rest)]
    elif not end.startswith(part) and (word := _complete_word(part, end, text)):
        end, name = word, _name(word, end)  # it is meant only if the rest repeats it
        new = [word, *(_rename(token, name) for token in rest)]
    else:
        return ""
    is_other = new[0].startswith(part) and new != [end, *rest]
    return "".join([new[0][len(part) :], *new[1:]]) if is_other else ""


def _complete_word(part: str, old: str, text: str) -> str:
    """The last word of the text that starts with `part`; empty without such a word, or if `part` is too short."""
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
    old_part, new_part = "".join(a), "".join(b)
    cases = _CASES if min(len(old_part), len(new_part)) > 1 else ()
    return _Name(old, new, [(_PART.findall(case(old_part)), case(new_part)) for case in cases])


def _rename(token: str, name: _Name) -> str:
    """The token with the old name replaced by the new one, or with the differing part of the name replaced."""
    if token == name.old:
        return name.new
    parts = _PART.findall(token)
    for old, new in name.parts:
        for place in range(len(parts) - len(old) + 1):
            if parts[place : place + len(old)] == old:
                return "".join([*parts[:place], new, *parts[place + len(old) :]])
    return token


def _is_word(token: str) -> bool:
    return token[:1].isalnum() or token[:1] == "_"
