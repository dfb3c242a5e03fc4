"""Give a suggestion the names of its place, with any model and with none.

A half-typed name is completed to one of this file or of open files. A copied line gets the names of its new
surroundings, and what a block defines is not defined again.
The rules read words, brackets and indentation, and no grammar, so they hold for many languages.
docs/log/completion.md ("Names") has what each won and lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from dunes.completion import Suggestion
from dunes.completion.search import CompleteOptions
from dunes.completion.text import first_line, line_start, without_overlap
from dunes.generate.copying import DEPTH_BYTES, TextSource
from dunes.text.lines import split_lines

LEAST = 3
"""Minimum characters of a half-typed name."""
SAME, OTHER = 0.98, 0.75
"""Probabilities of the only name that continues a half-typed word: if the suggestion has it, and if it has another
word."""
UNSURE = 0.6
"""A suggestion whose first word has at least this probability keeps it."""
REACH = 20_000
"""Number of characters above and below the cursor in which lines are read."""
SCOPE = 80
"""Maximum lines of a function above the cursor."""
ALIKE = 6
"""Number of lines above the cursor and above a copied line that are compared."""
LINE = 400
"""Maximum characters of a line."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_COMMENT = re.compile(r"\s*(?:\*|--|//|#(?!\s*define))|.*\s(?://|# )")
_STATEMENT = re.compile(
    r"\b(?:return|else|new|throw|raise|await|yield|case|go|defer|in|not|and|or|typeof|delete|import|package|use|using"
    r"|if|while|for|switch|match|with|try|catch|elif|do|assert|echo|print|select|goto|break|continue)\b"
)
_DEFINED = re.compile(
    r"(?:(?:export|pub(?:\(\w+\))?|public|private|protected|static|async|default|abstract|final|override)\s+)*"
    r"(?:(?:func(?:\s*\([^)]*\))?|fn|def|function|class|struct|enum|interface|trait|type|const|let|var|val)\s+"
    r"(?:mut\s+)?\w+|\w+(?:, \w+)*(?=\s*:=)|(?:[A-Za-z_][\w:.<>\[\],]*[\s*&]+)+\w+(?=\s*(?:=[^=]|[;\[(])))"
)
"""A line without indentation up to the name that it defines: behind such a word, before := or behind a type."""


@dataclass(frozen=True)
class Place:
    """A cursor between two texts, the texts of open files, newest first, and all other files to copy from.

    `suggest(text)` returns suggestions for the cursor behind a text that is inserted there, best first. A changed
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
        rules = (half_typed, renamed_copy, not_again)
        for rule in rules if len(self.typed) < LINE else ():
            if (changed := rule(self, best)) is not None:
                text = without_overlap(changed.text, self.after, self.typed)
                best = self.limit(replace(changed, text=text))
        return [best, *(other for other in others if other.text != best.text)]

    def go_on(self, text: str, word: float) -> Suggestion:
        """A suggestion that begins with a text, whose last word is complete; `word` is that of its first one."""
        more, *_ = self.suggest(text)
        if re.match(r"\w", text[-1:]) and re.match(r"\w", more.text):
            return Suggestion(text, word, 0.0, ends_line=False)
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
        """The words, without attributes, from the header of the function at the cursor to the cursor."""
        lines, size = [self.typed], _indent(self.typed)
        for line in self.lines[-2:-SCOPE:-1]:
            lines.append(line)
            if _indent(line) < size and "(" in line and not _STATEMENT.match(line.lstrip()):
                break
        return frozenset(re.findall(r"(?<![.>$\w])\$?\w+", "\n".join(lines)))

    def names(self, part: str) -> Mapping[str, None]:
        """The names that begin with `part`: of the file and of open files."""
        texts = self.before[: -len(part)], self.after, *self.opened
        return dict.fromkeys(name for text in texts for name in _names(text, part))

    def block(self) -> Iterator[str]:
        """The other lines of the cursor's block with the indentation of its line."""
        size, below = _indent(self.typed), split_lines(self.after[:REACH])[1:]
        for lines in (self.lines[-2::-1], below):
            inside = takewhile(lambda line: not line.strip() or _indent(line) >= size, lines)
            yield from (line for line in inside if _indent(line) == size)


def newest(texts: Mapping[str, str | None], name: str, options: CompleteOptions) -> list[str]:
    """The texts of open files but `name`, the last of `texts` first, then those of a request."""
    opened = [text for other, text in reversed([*texts.items()]) if text and other != name]
    return [*opened, *(text for _, text in options.files)]


def half_typed(place: Place, best: Suggestion) -> Suggestion | None:
    """The rest of a half-typed word that these files continue in a single way, unless another word is likely."""
    part = re.split(r"\W", place.typed)[-1]
    if len(part) < LEAST or not part.isidentifier() or re.match(r"\w", place.after):
        return None
    names = place.names(part)
    rest = "".join(names)[len(part) :]
    if len(names) != 1 or not rest:
        return None
    if re.split(r"\W", best.text)[0] == rest:
        return replace(best, word=max(best.word, SAME))
    return place.go_on(rest, OTHER) if best.word < UNSURE else None


def renamed_copy(place: Place, best: Suggestion) -> Suggestion | None:
    """A copied line with the names of this place.

    Lines above the cursor are compared with those above the copied line. Where they differ in names alone, these
    names replace names that the function at the cursor does not have.
    """
    first, whole = first_line(best.text).rstrip(), place.typed + best.text
    line = place.typed + first
    if not first.strip() or not line.strip()[0].isidentifier():
        return None
    tokens, above = _TOKEN.findall(line), _last_tokens(place.lines[:-1])
    near = TextSource(place.before[: len(place.before) - len(place.typed)].encode(errors="replace"))
    for source in (near, *place.sources):
        for copied, *theirs in _copied_lines(source, line.strip().encode(errors="replace")):
            pairs = zip(theirs, above, strict=False)
            renamed = next((r for a, b in pairs if (r := _renaming(a, b) or _renaming(_head(a), _head(b)))), {})
            names = {old: renamed[old] for old in {*tokens} & {*renamed} - place.scope}
            text = "".join(names.get(part, part) for part in re.split(r"(\W)", whole))
            is_alike = [renamed.get(a, a) for a in copied] == [renamed.get(a, a) for a in tokens]
            if names and is_alike and not {*tokens} & {*names.values()} and text.startswith(place.typed):
                return replace(best, text=text[len(place.typed) :])
    return None


def _copied_lines(source: TextSource, line: bytes) -> Iterator[list[list[str]]]:
    """The tokens of lines that end like this one, which has no indentation, and of the lines above each."""
    length, positions = source.longest(line[-DEPTH_BYTES:])
    for place in positions if 2 * length >= min(len(line), DEPTH_BYTES) else ():
        end = source.text.find(b"\n", place)
        text = source.text[max(0, place - ALIKE * LINE) : end if end >= 0 else None].rpartition(b"\0")[2]
        if lines := _last_tokens(text.decode(errors="ignore").split("\n")):
            yield lines


def _last_tokens(lines: Sequence[str]) -> list[list[str]]:
    """The tokens of the last lines that are not blank, the nearest first."""
    return [tokens for line in lines[: -3 * ALIKE : -1] if (tokens := _TOKEN.findall(line))][: ALIKE + 1]


def _head(tokens: Sequence[str]) -> Sequence[str]:
    """The tokens up to the first bracket or sign of assignment."""
    return tokens[: next((n for n, token in enumerate(tokens, 1) if token in "=(:"), 0)]


def _renaming(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """The names in place of others in a line that is otherwise the same; empty if more than half is different."""
    pairs = {(a, b) for a, b in zip(old, new, strict=False) if a != b}
    same = sum(a == b for a, b in zip(old, new, strict=False))
    is_alike = len(old) == len(new) >= 3 and 2 * same >= len(old) and len(dict(pairs)) == len(pairs)
    return dict(pairs) if is_alike and all(word.isidentifier() for pair in pairs for word in pair) else {}


def not_again(place: Place, best: Suggestion) -> Suggestion | None:
    """The suggestion up to the name that it defines, if another line of the block defines it."""
    typed, defined = place.typed.lstrip(), _defined(place.typed + first_line(best.text))
    if len(defined) <= len(typed) or defined not in map(_defined, place.block()):
        return None
    return replace(best, text=re.sub(r"\s*\w+$", "", defined)[len(typed) :], ends_line=False)


def _defined(line: str) -> str:
    """A line without indentation up to the name that it defines; empty if it defines none."""
    match = _DEFINED.match(line.strip()[:LINE])
    return match[0] if match and not _STATEMENT.match(match[0]) else ""


def _names(text: str, part: str) -> list[str]:
    """The words of a text, without comments, that begin with `part`."""
    found = re.finditer(rf"{part}\w*", text)  # with \b, the search would be many times slower
    above = ((name[0], text[max(0, name.start() - LINE) : name.start()]) for name in found)
    return [
        name
        for name, before in above
        if not re.match(r"\w", before[-1:]) and not _COMMENT.match(before, line_start(before))
    ]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
