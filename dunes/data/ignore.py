"""What .gitignore files exclude, by git's rules: https://git-scm.com/docs/gitignore

The last line that matches decides, in the deepest file that has such a line. A line speaks of one path, not of
what lies below it: that is excluded because nobody walks there.
"""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

Lines = list[tuple[re.Pattern[str], bool, bool]]
"""What a line matches, whether it excludes or takes back, whether it is for folders only."""

Rules = list[tuple[Path, Lines]]
"""Lines and the folder that they speak of, the deepest folder last."""

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


def parsed(lines: Iterable[str]) -> Lines:
    """The lines of a .gitignore, without those that say nothing."""
    return [rule for line in lines if (rule := _parsed(line)) is not None]


def rules(folder: Path) -> Rules:
    """The rules in a folder's own .gitignore; none if it is a link or cannot be read, as git has it too."""
    listing = folder / ".gitignore"
    try:
        status = os.lstat(listing)
        if not (stat.S_ISREG(status.st_mode) and status.st_size):
            return []
        # File names need not be UTF-8, and neither need what is written about them.
        text = listing.read_text("utf-8-sig", "surrogateescape")
    except OSError:
        return []
    return [(folder.resolve(), parsed(text.split("\n")))]


def above(folder: Path) -> Rules:
    """The rules in the folders above one inside a git checkout.

    None, if they exclude the folder itself: whoever names it all the same wants what is in it.
    """
    return rules_above(folder, True) or []


def rules_above(path: Path, is_folder: bool) -> Rules | None:
    """The rules in the folders above a path inside a git checkout; None if they exclude it, or one of these."""
    parents = [path.resolve(), *path.resolve().parents]
    top = next((i for i, parent in enumerate(parents) if os.path.lexists(parent / ".git")), 0)
    found: Rules = []
    for i in range(top, 0, -1):
        found += rules(parents[i])
        if ignored(parents[i - 1], is_folder or i > 1, found):
            return None
    return found


def ignored(path: Path, is_folder: bool, found: Rules) -> bool:
    """Whether the rules exclude this path, which has no link in it, and whose parents they do not exclude."""
    for base, lines in reversed(found):
        name = path.relative_to(base).as_posix()
        for regex, excludes, folders in reversed(lines):
            if (is_folder or not folders) and regex.fullmatch(name):
                return excludes
    return False


def _parsed(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
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


def _regex(found: re.Match[str]) -> str:
    kind = str(found.lastgroup)
    if kind == "set":
        members = re.sub(r"\\(.)|([^-\w])", lambda m: re.escape(m[1] or m[2]), found["of"], flags=re.DOTALL)
        return f"(?!/)[{'^' if found['none'] else ''}{members}]"
    return _REGEX.get(kind) or re.escape(found[kind])
