"""Rules replace names in a suggestion by names near the cursor.

A half-typed name is completed to a name of this file or of an open file. A copied line gets the names of its new
surroundings. A name that the block already defines is not defined again. The rules use words, brackets and
indentation instead of a grammar, so they work for many languages. docs/log/completion.md ("Names") reports gains
and losses of each rule.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap, takewhile

from dunes.completion import Suggestion
from dunes.completion.search import CompleteOptions
from dunes.completion.text import first_line, line_start, without_overlap
from dunes.generate.copying import DEPTH_BYTES, TextSource
from dunes.text.lines import split_lines

LEAST = 3
"""Minimum number of typed characters for completing a half-typed name."""
SAME = 0.98
"""Probability of the only name that continues a half-typed word, if this name was already suggested."""
OTHER = 0.55
"""Probability of the only name that continues a half-typed word, if the name replaces a less probable word."""
REPEATED = 0.75, 0.4
"""Probabilities (first word, full rest) of a suggestion that repeats the line above with other names."""
RENAMED = 0.65, 0.2
"""Probabilities (first word, full rest) of a suggestion that is a copied line with other names."""
REACH = 20_000
"""Maximum number of characters above and below the cursor that are split into lines."""
SCOPE = 80
"""Maximum number of lines above the cursor that are searched for the header of its function."""
ALIKE = 6
"""Number of lines above the cursor that are compared with the lines above a copied line."""
LINE = 400
"""Maximum characters of a line that the rules read."""
_SEPARATOR = re.compile(r"\s*,\s*")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_SPACED = re.compile(rf"{_TOKEN.pattern}|\s+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|_+|.", re.DOTALL)
_CASES = (str, str.lower, str.upper, lambda w: w[:1].upper() + w[1:], lambda w: w[:1].lower() + w[1:])
_COMMENT = re.compile(r"\s*(?:\*|--|//|#(?!\s*define))|.*\s(?://|# )")
_STATEMENT = re.compile(
    r"\b(?:return|else|new|throw|raise|await|yield|case|go|defer|in|not|and|or|typeof|delete|import|package|use|using"
    r"|if|while|for|switch|match|with|try|catch|elif|do|assert|echo|print|select|goto|break|continue)\b"
)
_TYPED = re.compile(r"[\w.<>\[\]]+\??[ :]")
"""Pattern of the beginning of a parameter with its type."""
_DEFINED = re.compile(
    r"(?:(?:export|pub(?:\(\w+\))?|public|private|protected|static|async|default|abstract|final|override)\s+)*"
    r"(?:(?:func(?:\s*\([^)]*\))?|fn|def|function|class|struct|enum|interface|trait|type|const|let|var|val)\s+"
    r"(?:mut\s+)?\w+|\w+(?:, \w+)*(?=\s*:=)|(?:[A-Za-z_][\w:.<>\[\],]*[\s*&]+)+\w+(?=\s*(?:=[^=]|[;\[(])))"
)
"""Pattern of a line up to the name that the line defines: a name after a keyword, before := or after a type."""


@dataclass(frozen=True)
class Place:
    """A cursor between `before` and `after`, the texts of open files (newest first), and sources to copy from.

    `suggest(text)` returns the suggestions after inserting `text` at the cursor, best first. `limit` applies the
    request's limits to a suggestion that a rule has changed.
    """

    before: str
    after: str
    opened: Sequence[str]
    sources: Sequence[TextSource]
    suggest: Callable[[str], Sequence[Suggestion]]
    limit: Callable[[Suggestion], Suggestion] = lambda suggestion: suggestion

    def suggestions(self) -> list[Suggestion]:
        """The suggestions, best first; the rules of this module may change the first one."""
        best, *others = self.suggest("")
        rules = (repeated, renamed_copy, half_typed, without_header, not_again)
        for rule in rules if len(self.typed) < LINE else ():
            if (changed := rule(self, best)) is not None:
                text = without_overlap(changed.text, self.after, self.typed)
                best = self.limit(replace(changed, text=text))
        return [best, *(other for other in others if other.text != best.text)]

    def go_on(self, text: str, word: float) -> Suggestion:
        """Suggest `text` and the line's next words; if these would extend the last word of `text`, suggest `text`
        alone. `word` is the probability that the suggestion's first word is right."""
        more, *_ = self.suggest(text)
        if re.match(r"\w", text[-1:]) and re.match(r"\w", more.text):
            return Suggestion(text, word, 0.0, ends_line=False)
        return replace(more, text=text + more.text, word=word, line=word * more.line)

    @cached_property
    def lines(self) -> list[str]:
        """The lines before the cursor, within REACH characters; the last line ends at the cursor."""
        return split_lines(self.before[-REACH:])

    @cached_property
    def above(self) -> list[str]:
        """The last nonblank lines above the cursor, nearest first, without indentation."""
        return _last_lines(self.lines[:-1])

    @property
    def typed(self) -> str:
        """The line up to the cursor."""
        return self.lines[-1]

    @cached_property
    def scope(self) -> frozenset[str]:
        """The words, except attributes, in the function at the cursor, from its header to the cursor."""
        lines, size = [self.typed], _indent(self.typed)
        for line in self.lines[-2:-SCOPE:-1]:
            lines.append(line)
            if _indent(line) < size and "(" in line and not _STATEMENT.match(line.lstrip()):
                break
        return frozenset(re.findall(r"(?<![.>$\w])\$?\w+", "\n".join(lines)))

    def names(self, part: str) -> Mapping[str, None]:
        """The names that begin with `part`, in the file and in open files."""
        texts = self.before[: -len(part)], self.after, *self.opened
        return dict.fromkeys(name for text in texts for name in _names(text, part))

    def headers(self, name: str) -> Iterator[tuple[str, list[str]]]:
        """For each definition of the function `name`, yield the line up to this name, and a list of the
        parameters."""
        for text in (self.before, self.after, *self.opened):
            for match in re.finditer(rf"{name}\(([^()]*)\)", text):
                defined = _defined(text[text.rfind("\n", 0, match.start()) + 1 : match.end()])
                if re.search(rf"\b{name}$", defined):
                    yield defined, _SEPARATOR.split(match[1])

    def block(self) -> Iterator[str]:
        """Yield the other lines of the cursor's block that are indented like the cursor's line."""
        size, below = _indent(self.typed), split_lines(self.after[:REACH])[1:]
        for lines in (self.lines[-2::-1], below):
            inside = takewhile(lambda line: not line.strip() or _indent(line) >= size, lines)
            yield from (line for line in inside if _indent(line) == size)


def newest(texts: Mapping[str, str | None], name: str, options: CompleteOptions) -> list[str]:
    """The texts of open files except `name`, newest first, followed by the texts in `options.files`."""
    opened = [text for other, text in reversed([*texts.items()]) if text and other != name]
    return [*opened, *(text for _, text in options.files)]


def repeated(place: Place, best: Suggestion) -> Suggestion | None:
    """The rest of the line above with other names, if the typed line differs from the line above only in names.

    The half-typed name may differ, too, if the rest of the line contains this name again.
    """
    if best.line >= REPEATED[1] or first_line(best.text) != best.text:
        return None
    typed, above = place.typed.lstrip(), "".join(place.above[:1])
    part = re.split(r"\W", typed)[-1]
    words = _names(place.before[-REACH : -len(part)], part) if len(part) > 1 else []
    for more in ("", *(word[len(part) :] for word in words[-1:])):
        new = _TOKEN.findall(typed + more)
        old = _TOKEN.findall(above)[: len(new)]
        size = len(new) - (not more and old[-1:] != new[-1:])
        rest = _rest(typed + more, above, _renaming(old[:size], new[:size]))
        if rest and not (more and above.endswith(rest)):
            return Suggestion(more + rest, *REPEATED, source="copies")
    return None


def renamed_copy(place: Place, best: Suggestion) -> Suggestion | None:
    """A suggestion that is a copied line, with its names replaced by names near the cursor.

    The lines above the cursor are compared with the lines above the copied line. If the lines of a pair differ
    only in names, these names of the copied line are replaced by the names above the cursor. Names that occur in
    the function at the cursor are not replaced.
    """
    line = place.typed + first_line(best.text).rstrip()
    tokens, above = _TOKEN.findall(line), [*map(_TOKEN.findall, place.above)]
    if not best.text.strip() or not "".join(tokens[:1]).isidentifier():
        return None
    near = TextSource(place.before[: len(place.before) - len(place.typed)].encode(errors="replace"))
    for source in (near, *place.sources):
        for copied, *theirs in _copied_lines(source, line.strip().encode(errors="replace")):
            pairs = [pair for pair in zip(theirs, above, strict=False) if pair[0] != pair[1]]
            heads = [[*map(_head, pair)] for pair in pairs[:1]]
            renames = next(filter(None, starmap(_renaming, [*pairs, *heads])), {})
            names = {name: renames[name] for name in {*tokens} & {*renames} - place.scope}
            is_alike = [renames.get(a, a) for a in copied] == [renames.get(a, a) for a in tokens]
            rest = _rest(place.typed, place.typed + best.text, names) if is_alike else ""
            if rest and not {*tokens} & {*names.values()}:
                return replace(best, text=rest, word=RENAMED[0], line=RENAMED[1], source="copies")
    return None


def without_header(place: Place, best: Suggestion) -> Suggestion | None:
    """The suggestion with a copied function header turned into a call; its arguments are the parameters in
    scope."""
    line = place.typed + first_line(best.text)
    for call in re.finditer(r"(\w+)\((?=([^()]*))", line):
        given = _SEPARATOR.split(call[2])
        first = next((n for n, argument in enumerate(given) if _TYPED.match(argument)), len(given))
        is_header = first == len(given) or re.search(rf"\b{call[1]}$", _defined(line))
        for defined, parameters in () if is_header else place.headers(call[1]):
            if given[first] in parameters:
                pasted = parameters[parameters.index(given[first]) :]
                words = [re.findall(r"\$?\w+", re.split("[:=]", parameter)[0]) or [""] for parameter in pasted]
                names = [w[0] if defined.startswith("func") else w[-1] for w in words]
                known = [*takewhile(place.scope.__contains__, names)]
                end = ")" if len(known) == len(names) else ", " * bool(first + len(known))
                text = line[: call.start(2)] + ", ".join(given[:first] + known) + end
                rest = text[len(place.typed) :] if text.startswith(place.typed) else ""
                return place.go_on(rest, best.word) if rest else replace(best, text="", ends_line=False)
    return None


def half_typed(place: Place, best: Suggestion) -> Suggestion | None:
    """The rest of the half-typed word, if exactly one name continues the word and no other word is more
    probable."""
    part = re.split(r"\W", place.typed)[-1]
    if len(part) < LEAST or not part.isidentifier() or re.match(r"\w", place.after) or _COMMENT.match(place.typed):
        return None
    names = place.names(part)
    rest = "".join(names)[len(part) :]
    if len(names) != 1 or not rest:
        return None
    if re.split(r"\W", best.text)[0] == rest:
        return replace(best, word=max(best.word, SAME))
    return place.go_on(rest, OTHER) if best.word < OTHER else None


def not_again(place: Place, best: Suggestion) -> Suggestion | None:
    """The suggestion, cut before the name that it defines, if another line of the block already defines this
    name."""
    typed, defined = place.typed.lstrip(), _defined(place.typed + first_line(best.text))
    if len(defined) <= len(typed) or defined not in map(_defined, place.block()):
        return None
    return replace(best, text=re.sub(r"\s*\w+$", "", defined)[len(typed) :], ends_line=False)


def _copied_lines(source: TextSource, line: bytes) -> Iterator[list[list[str]]]:
    """For each occurrence of the longest match of the end of `line`, yield the tokens of the matched line and of
    the lines above it."""
    length, positions = source.longest(line[-DEPTH_BYTES:])
    for place in positions if 2 * length >= min(len(line), DEPTH_BYTES) else ():
        end = source.text.find(b"\n", place)
        text = source.text[max(0, place - ALIKE * LINE) : end if end >= 0 else None].rpartition(b"\0")[2]
        if lines := _last_lines(text.decode(errors="ignore").split("\n")):
            yield [*map(_TOKEN.findall, lines)]


def _last_lines(lines: Sequence[str]) -> list[str]:
    """The last nonblank lines, nearest first, without indentation."""
    return [line.strip() for line in lines[: -3 * ALIKE : -1] if line.strip()][: ALIKE + 1]


def _head(tokens: Sequence[str]) -> Sequence[str]:
    """The tokens up to the first `=`, `(` or `:`."""
    return tokens[: next((n for n, token in enumerate(tokens, 1) if token in "=(:"), 0)]


def _renaming(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """A map of old to new names if two lines differ only in names; empty if more than half of the tokens
    differ."""
    pairs = {(a, b) for a, b in zip(old, new, strict=False) if a != b}
    same = sum(a == b for a, b in zip(old, new, strict=False))
    is_alike = len(old) == len(new) > 1 and 2 * same >= len(old) and len(dict(pairs)) == len(pairs)
    return dict(pairs) if is_alike and all(word.isidentifier() for pair in pairs for word in pair) else {}


def _rest(typed: str, line: str, names: Mapping[str, str]) -> str:
    """The part of `line` after the typed text, with `names` replaced; empty if no name is replaced."""
    *before, part = _SPACED.findall(typed) or [""]
    old = _SPACED.findall(line)[len(before) :]
    new = [_rename(token, names) for token in old]
    text = "".join(new)
    return text[len(part) :] if new != old and text.startswith(part) else ""


def _rename(token: str, names: Mapping[str, str]) -> str:
    """The token, with old names replaced by new names. If an old and a new name differ only in a part, this part
    is replaced in any token."""
    if token in names:
        return names[token]
    parts = "\0".join(["", *_PART.findall(token), ""])
    for name in names.items():
        a, b = map(_PART.findall, name)
        for _ in range(2):
            while min(len(a), len(b)) > 1 and a[-1] == b[-1]:
                a, b = a[:-1], b[:-1]
            a, b = a[::-1], b[::-1]
        old, new = "".join(a), "".join(b)
        for case in _CASES if min(len(old), len(new)) > 1 else ():
            parts = parts.replace("\0".join(["", *_PART.findall(case(old)), ""]), f"\0{case(new)}\0", 1)
    return parts.replace("\0", "")


def _defined(line: str) -> str:
    """A line without indentation up to the name that it defines; empty if it defines no name."""
    match = _DEFINED.match(line.strip()[:LINE])
    return match[0] if match and not _STATEMENT.match(match[0]) else ""


def _names(text: str, part: str) -> list[str]:
    """The words that begin with `part` and are not in comments."""
    matches = re.finditer(rf"{part}\w*", text)  # with \b, the search would be many times slower
    above = ((name[0], text[max(0, name.start() - LINE) : name.start()]) for name in matches)
    return [
        name
        for name, before in above
        if not re.match(r"\w", before[-1:]) and not _COMMENT.match(before, line_start(before))
    ]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
