"""Give a suggestion the names of its place: of the file and of open files, with any model or none.

A half-typed name is completed to one of these files. A call does not go on with the header of a definition, a
copied line gets the names that its new surroundings have in place of the old ones, and what a block defines is not
defined again. The rules read words, brackets and indentation, and no grammar, so they hold for many languages.
docs/log/completion.md, "Names", has what each won and lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from dunes.completion import Suggestion
from dunes.completion.search import CompleteOptions
from dunes.completion.text import first_line, without_overlap
from dunes.generate.copying import DEPTH_BYTES, TextSource
from dunes.text.lines import split_lines

LEAST = 3
"""Minimum characters of a half-typed name."""
REACH = 20_000
"""Number of characters before and after the cursor in which lines are read."""
SCOPE = 80
"""Maximum lines of a function above the cursor."""
ALIKE = 6
"""Number of lines above the cursor, and above a copied line, that are compared."""
ARGUMENTS = 600
"""Maximum characters of the parameters of a function."""
LINE = 400
"""Maximum characters of a line that is compared."""
SAME, OTHER = 0.98, 0.75
"""Probabilities that a name is right if it is the only one that continues a half-typed word, and a suggestion has
the same name, or another word."""
UNSURE = 0.6
"""If the first word of a suggestion has at least this probability, it stays."""
_LAST_WORD = re.compile(r"\w*$")

_TOKEN = re.compile(r"\w+|[^\w\s]")
_STATEMENT = re.compile(
    r"\b(?:return|else|new|throw|raise|await|yield|case|go|defer|in|not|and|or|typeof|delete|import|package|use|using"
    r"|if|while|for|switch|match|with|try|catch|elif|do|assert|echo|print|select|goto|break|continue)\b"
)
_FUNCTION = re.compile(r"\b(?:func|fn|def|function|fun|sub)\b")
_TYPE = r"[A-Za-z_][\w:.<>\[\],*&]*"
_OF_TYPE = re.compile(rf"\s*(?:{_TYPE}[\s*&]+)+")
"""The text before a name that a language without a word for functions defines."""
_PARAMETER = re.compile(r"[\w.&*]+\??\s*:\s*\S|[\w.\[\]<>:]+(?:\s+[*&]*|[*&]+)\$?\w")
"""A parameter with its type."""
_DEFINED = re.compile(
    r"\s*(?:(?:export|pub(?:\(\w+\))?|public|private|protected|static|async|default|abstract|final|override)\s+)*"
    r"(?:func\s*\([^)]*\)|func|fn|def|function|fun|class|struct|enum|interface|trait|type|const|let|var|val)\s+(?:mut\s+)?\w+"
    rf"|\s*\w+(?:, \w+)*\s*:=|{_OF_TYPE.pattern}\w+\s*(?:=(?!=)|;|\[)"
)
"""A line up to the name that it defines."""


@dataclass(frozen=True)
class Place:
    """A cursor between two texts, the texts of open files, newest first, and all other files to copy from.

    `suggest(text)` returns suggestions for the cursor behind a text that is inserted there, best first; a changed
    suggestion is cut by `limit`.
    """

    before: str
    after: str
    opened: Sequence[str]
    sources: Sequence[TextSource]
    suggest: Callable[[str], Sequence[Suggestion]]
    limit: Callable[[Suggestion], Suggestion] = lambda suggestion: suggestion

    def suggestions(self) -> list[Suggestion]:
        """The suggestions, of which the first has the names of this place."""
        best, *others = self.suggest("")
        for rule in (half_typed, without_header, renamed_copy, not_again):
            if (other := rule(self, best)) is not None:
                best = self.limit(other)
        return [best, *(other for other in others if other.text != best.text)]

    def go_on(self, text: str, word: float) -> Suggestion:
        """A suggestion that starts with a text whose first word has this probability."""
        text = without_overlap(text, self.after, self.typed)
        more = self.suggest(text)[0]
        return replace(more, text=text + more.text, word=word, line=word * more.line)

    @cached_property
    def lines(self) -> list[str]:
        """The last lines before the cursor; the last of them ends there."""
        return split_lines(self.before[-REACH:])

    @property
    def typed(self) -> str:
        """The line up to the cursor."""
        return self.lines[-1]

    @cached_property
    def scope(self) -> frozenset[str]:
        """The words from the header of the function at the cursor to the cursor."""
        lines, size = [self.typed], _indent(self.typed)
        for line in self.lines[-2 : -SCOPE : -1]:
            lines.append(line)
            if _indent(line) < size and "(" in line and not _STATEMENT.match(line.lstrip()):
                break
        return frozenset(_TOKEN.findall(" ".join(lines)))

    def names(self, part: str) -> dict[str, None]:
        """The names that begin with `part`: of the text above, newest first, of the text below and of open files."""
        above = _names(self.before[: -len(part)], part)[::-1]
        return dict.fromkeys([*above, *(name for text in (self.after, *self.opened) for name in _names(text, part))])

    def definitions(self, name: str) -> Iterator[tuple[str, list[str]]]:
        """The lines up to `name(` where a function with this name is defined, with its parameters."""
        texts = (self.before, self.after, *(source.text.decode(errors="ignore") for source in self.sources))
        for text in texts:
            for match in re.finditer(rf"\b{name}\(", text):
                start = text[max(0, match.start() - LINE) : match.start()].rpartition("\n")[2]
                parameters, end = _arguments(text[match.end() : match.end() + ARGUMENTS])
                has_body = first_line(text[match.end() + (end or 0) :]).rstrip().endswith("{")
                if end is not None and (_is_header(start) or (has_body and not start.strip())):
                    yield start, parameters

    @cached_property
    def block(self) -> list[str]:
        """The other lines of the block at the cursor with the indentation of its line."""
        size, below = _indent(self.typed), split_lines(self.after[:REACH])[1:]
        is_inside = lambda line: not line.strip() or _indent(line) >= size
        lines = [*takewhile(is_inside, self.lines[-2::-1]), *takewhile(is_inside, below)]
        return [line for line in lines if line.strip() and _indent(line) == size]


def newest(texts: Mapping[str, str | None], name: str, options: CompleteOptions) -> list[str]:
    """The texts of open files, the newest last in `texts`, except the file `name`, then those of a request."""
    opened = [text for other, text in reversed(texts.items()) if text and other != name]
    return [*opened, *(text for _, text in options.files)]


def half_typed(place: Place, best: Suggestion) -> Suggestion | None:
    """The rest of a half-typed word that these files continue in a single way, unless another word is likely."""
    part = _LAST_WORD.findall(place.typed)[0]
    if len(part) < LEAST or not part.isidentifier() or re.match(r"\w", place.after):
        return None
    names = place.names(part)
    rest, suggested = next(iter(names), part)[len(part) :], re.match(r"\w*", best.text)
    if len(names) != 1 or not rest:
        return None
    if suggested and suggested[0] == rest:
        return replace(best, word=max(best.word, SAME))
    return place.go_on(rest, OTHER) if best.word < UNSURE else None


def without_header(place: Place, best: Suggestion) -> Suggestion | None:
    """The call with the names of parameters as far as the scope has them, if the suggestion has their types, too."""
    line = place.typed + first_line(best.text)
    for call in re.finditer(r"(\w+)\(", line):
        arguments, _ = _arguments(line[call.end() :])
        if not any(map(_PARAMETER.match, arguments)) or _is_header(line[: call.start()]):
            continue
        for start, parameters in place.definitions(call[1]):
            if not (pasted := [a for a in arguments if a in parameters and _PARAMETER.match(a)]):
                continue
            rest = parameters[parameters.index(pasted[0]) :]
            names = [*takewhile(place.scope.__contains__, (_parameter_name(p, start) for p in rest))]
            kept = [*arguments[: arguments.index(pasted[0])], *names]
            text = line[: call.end()] + ", ".join(kept) + (")" if len(names) == len(rest) else ", " * bool(kept))
            if text.startswith(place.typed):
                return place.go_on(text[len(place.typed) :], best.word)
    return None


def renamed_copy(place: Place, best: Suggestion) -> Suggestion | None:
    """A copied line with the names of this place.

    Lines above the cursor are compared with those above the copied line. Where they differ in names alone, these
    names replace names that the function at the cursor does not have.
    """
    line = place.typed + first_line(best.text).rstrip()
    if not best.text.strip() or not _is_name(line.strip()):
        return None
    tokens, above = {*_TOKEN.findall(line)}, _last_tokens(place.lines[:-1])
    near = TextSource(place.before[: len(place.before) - len(place.typed)].encode(errors="replace"))
    for source in (near, *place.sources):
        for theirs in _above_copies(source, line.strip().encode(errors="replace")):
            renamed = next((r for pair in zip(theirs, above, strict=False) if (r := _renaming(*pair))), {})
            names = {old: new for old, new in renamed.items() if old in tokens and old not in place.scope}
            text = re.sub(r"\w+", lambda word, names=names: names.get(word[0], word[0]), line)
            if names and not tokens & {*names.values()} and text.startswith(place.typed):
                return replace(best, text=text[len(place.typed) :])
    return None


def not_again(place: Place, best: Suggestion) -> Suggestion | None:
    """The suggestion up to the name that it defines, if another line of the block defines the same."""
    defined = _defined(place.typed + first_line(best.text))
    if not defined or len(defined) <= len(place.typed.strip()) or defined not in map(_defined, place.block):
        return None
    start = re.sub(r"\w+$", "", defined)[len(place.typed.lstrip()) :]
    return replace(best, text=start.rstrip(), ends_line=False)


def _above_copies(source: TextSource, line: bytes) -> Iterator[list[list[str]]]:
    """The tokens of the lines above each line that equals this one, without indentation."""
    length, positions = source.longest(line[-DEPTH_BYTES:])
    for end in positions if length == len(line[-DEPTH_BYTES:]) else ():
        start = source.text.rfind(b"\n", 0, end) + 1
        if source.text[start : end + LINE].partition(b"\n")[0].strip() == line:
            above = source.text[max(0, start - ALIKE * LINE) : start].rpartition(b"\0")[2]
            yield _last_tokens(above.decode(errors="ignore").split("\n"))


def _last_tokens(lines: Sequence[str]) -> list[list[str]]:
    """The tokens of the last lines that are not blank, the nearest first."""
    return [tokens for line in lines[: -ALIKE * 3 : -1] if (tokens := _TOKEN.findall(line))][:ALIKE]


def _renaming(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """The names in place of others in a line that is otherwise the same; empty if more than half is different."""
    pairs = {(a, b) for a, b in zip(old, new, strict=False) if a != b}
    same = sum(a == b for a, b in zip(old, new, strict=False))
    names = {a: b for a, b in pairs}
    is_alike = len(old) == len(new) >= 3 and 2 * same >= len(old) and len(names) == len(pairs)
    return names if is_alike and all(map(_is_name, (word for pair in pairs for word in pair))) else {}


def _defined(line: str) -> str:
    """A line up to the name that it defines; empty if it defines none."""
    match = _DEFINED.match(line)
    return match[0].strip(" \t=;[:") if match and not _STATEMENT.match(match[0].lstrip()) else ""


def _names(text: str, part: str) -> list[str]:
    """The words of a text that begin with `part`."""
    found = re.finditer(rf"{part}\w*", text)  # with \b, the search would be many times slower
    return [name[0] for name in found if not name.start() or not _is_name(text[name.start() - 1])]


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] in "_$"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_header(prefix: str) -> bool:
    """True if a name with brackets behind this part of a line is defined there."""
    return bool(_FUNCTION.search(prefix) or (_OF_TYPE.fullmatch(prefix) and not _STATEMENT.search(prefix)))


def _arguments(text: str) -> tuple[list[str], int | None]:
    """What stands between commas behind an opening bracket, and the place of the closing one, if it is closed."""
    parts, depth, start = list[str](), 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0 or (character == "," and not depth):
            parts.append(text[start:place].strip())
            start = place + 1
        if depth < 0:
            return parts, place
    return [*parts, text[start:].strip()], None


def _parameter_name(parameter: str, start: str) -> str:
    """The name of a parameter in a definition whose line has this `start`."""
    words = re.findall(r"\w+", re.split(r"\??:|=", parameter)[0])
    return words[0 if "func" in start else -1] if words else ""
