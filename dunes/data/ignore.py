"""Apply .gitignore files by git's rules: https://git-scm.com/docs/gitignore

The last matching line in the deepest .gitignore decides. A line applies to one path, not to the files below it:
excluded folders are never walked.
"""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

Lines = list[tuple[re.Pattern[str], bool, bool]]
"""Per line: pattern, True if it excludes (False re-includes), and True if it is for folders only."""

Rules = list[tuple[Path, Lines]]
"""Folders with the rules of their .gitignore, the deepest folder last."""

_GLOB = re.compile(
    r"""(?P<all>^\*\*$) | (?P<lead>^(?:\*\*/)+) | (?P<inner>(?:/\*\*)+/) | (?P<tail>(?:/\*\*)+$) | (?P<stars>\*+)
    | (?P<one>\?) | (?P<set>\[(?P<none>[!^]?)(?P<of>\]?+(?:\\.|[^\]\\])*)\]) | \\(?P<quoted>.)
    | (?P<unclosed>[\[\\]) | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_REGEX = {
    "all": ".+",
    "lead": "(?:.*/)?",
    "inner": "/(?:.*/)?",
    "tail": "/.+",
    "stars": "[^/]*",
    "one": "[^/]",
    "unclosed": "(?!)",
}


def parse_lines(lines: Iterable[str]) -> Lines:
    """The rules in the lines of a .gitignore."""
    return [rule for line in lines if (rule := _parse_line(line)) is not None]


def read_rules(folder: Path) -> Rules:
    """The rules of a folder's own .gitignore; empty if it is a link or cannot be read, as in git."""
    listing = folder / ".gitignore"
    try:
        status = os.lstat(listing)
        if not (stat.S_ISREG(status.st_mode) and status.st_size):
            return []
        # File names need not be UTF-8.
        text = listing.read_text("utf-8-sig", "surrogateescape")
    except OSError:
        return []
    return [(folder.resolve(), parse_lines(text.split("\n")))]


def rules_above(path: Path, is_folder: bool) -> Rules | None:
    """The rules of all folders above a path inside a git checkout; None if they exclude it or a parent."""
    parents = [path.resolve(), *path.resolve().parents]
    top = next((i for i, parent in enumerate(parents) if os.path.lexists(parent / ".git")), 0)
    rules: Rules = []
    for i in range(top, 0, -1):
        rules += read_rules(parents[i])
        if is_ignored(parents[i - 1], is_folder or i > 1, rules):
            return None
    return rules


def is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    """True if the rules exclude this resolved path, whose parents are not excluded."""
    for base, lines in reversed(rules):
        name = path.relative_to(base).as_posix()
        for regex, excludes, folders in reversed(lines):
            if (is_folder or not folders) and regex.fullmatch(name):
                return excludes
    return False


def _parse_line(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    if line.startswith("#"):
        return None
    line = re.sub(r"(?<!\\) +$", "", line)
    excludes, line = not line.startswith("!"), line.removeprefix("!")
    folders, line = line.endswith("/"), line.removesuffix("/")
    if not line:
        return None
    anywhere = "" if "/" in line else "(?:.*/)?"
    try:
        return re.compile(anywhere + _GLOB.sub(_regex, line.removeprefix("/")), re.DOTALL), excludes, folders
    except re.error:  # such as [z-a]
        return None


def _regex(match: re.Match[str]) -> str:
    group = str(match.lastgroup)
    if group == "set":
        members = re.sub(r"\\(.)|([^-\w])", lambda m: re.escape(m[1] or m[2]), match["of"], flags=re.DOTALL)
        return f"(?!/)[{'^' if match['none'] else ''}{members}]"
    return _REGEX.get(group) or re.escape(match[group])
