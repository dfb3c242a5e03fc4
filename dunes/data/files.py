"""List the plain files in sources (files and folders), except files that .gitignore excludes.

Links are not followed by default. A link's target inside the sources is listed anyway, or excluded on purpose. A
target outside the sources may be a device, a password file, or an entire disk.

By git's rules (https://git-scm.com/docs/gitignore), the last matching line in the deepest .gitignore decides. A
line that matches a folder does not match the files below it, but excluded folders are never walked.
"""

import io
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from dunes.data.hub_tables import fetch
from dunes.data.installed import installed_roots, package_folder, select_files
from dunes.flags import HUB, INSTALLED, STDLIB, is_path

NEVER = {".git", ".hg", ".svn", "__pycache__"}
DEPENDENCIES = {"node_modules", ".venv", "site-packages"}
"""Folders of third-party code. They are skipped, and reported unless .gitignore excludes them."""
THIRD_PARTY = {"bower_components", "third_party", "third-party", "thirdparty", "3rdparty"}
VENDOR = {"vendor", "vendors", "vendored", "_vendor"}
"""Folders that contain third-party code if `_OF_OTHERS` matches a file in them or in a subfolder."""
_OF_OTHERS = re.compile(
    r"licen[cs]e.*|copying.*|modules\.txt|vendor\.txt|autoload\.php|package\.json|\.cargo-checksum\.json", re.I
)
GENERATED_NAMES = re.compile(
    r""".+\.lock(b|file)? | .*[-.]lock\.(json|ya?ml|toml|hcl) | pylock(\..+)?\.toml | go(\.work)?\.sum
    | npm-shrinkwrap\.json | (package|cartfile)\.resolved | project\.assets\.json | cabal\.project\.freeze
    | .+[-.]min\.([cm]?js|css) | .+\.([cm]?[jt]s|css)\.map | .+\.(snap|ambr)
    | .+_pb2(_grpc)?\.pyi? | .+\.pb\.((gw|validate)\.)?(go|cc|h|rs|swift|dart) | .+\.(g|freezed)\.dart
    | .+\.designer\.cs | .+\.g(\.i)?\.cs | .*[._]generated\..+ | zz_generated.*""",
    re.VERBOSE | re.I,
)
"""Names of lock files, minified code, source maps, snapshots of tests, and code that a generator writes."""
STDLIB_TESTS = ["test/", "tests/", "idle_test/", "site-packages/"]
OUTSIDE = "links that lead outside"

Lines = list[tuple[re.Pattern[str], bool, bool]]
"""For each line of a .gitignore: pattern, True to exclude or False to re-include, True if for folders only."""

Rules = list[tuple[Path, Lines]]
"""Folders with the rules of their .gitignore, the deepest folder last."""

_GLOB = re.compile(
    r"""(?P<all>^\*\*$) | (?P<lead>^(?:\*\*/)+) | (?P<inner>(?:/\*\*)+/) | (?P<tail>(?:/\*\*)+$) | (?P<stars>\*+)
    | (?P<one>\?) | (?P<set>\[(?P<none>[!^]?)(?P<of>\]?+(?:\\.|[^\]\\])*)\]) | \\(?P<quoted>.)
    | (?P<unclosed>[\[\\]) | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_REGEX = {
    "all": ".+", "lead": "(?:.*/)?", "inner": "/(?:.*/)?", "tail": "/.+",
    "stars": "[^/]*", "one": "[^/]", "unclosed": "(?!)",
}  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A file. `name` is its path within its source; `named` is True if the user named the file itself.

    `package` is the folder of its package in the source `installed`, and empty for other sources.
    """

    path: Path
    name: str
    named: bool
    package: str = ""


def reason_by_name(file: SourceFile) -> str:
    """The reason to skip a file, judged by its path: "third-party" or "generated"; empty if there is none."""
    *folders, name = file.name.split("/")
    for depth, folder in enumerate(folders):
        above = file.path.parents[len(folders) - 1 - depth]
        if folder.lower() in THIRD_PARTY or (folder.lower() in VENDOR and _is_of_others(above)):
            return "third-party"
    return "generated" if GENERATED_NAMES.fullmatch(name) or "__snapshots__" in folders else ""


@lru_cache(256)
def _is_of_others(folder: Path) -> bool:
    """True if a folder or a subfolder has a licence, or a package manager's list of packages."""
    with suppress(OSError):
        entries = [*os.scandir(folder)]
        below = (name for e in entries if e.is_dir(follow_symlinks=False) for name in os.listdir(e.path))
        return any(map(_OF_OTHERS.fullmatch, chain((e.name for e in entries), below)))
    return False


class Walk:
    """The files of sources, sorted by name. `skipped` maps each reason to the names of skipped files.

    `folders` maps each folder that was read to its modification time (ns). The source `stdlib` is the standard
    library of the running Python, `installed` the code of installed packages, and `hf:ORG/NAME` a data set of the
    Hub, whose files count as named. A link that is itself a source
    is always followed. With `follow_links`, other links are followed if their targets are outside the sources.
    Raises ValueError for a missing source.
    """

    def __init__(self, sources: Sequence[str | Path], follow_links: bool = False) -> None:
        self.follow_links = follow_links
        self.skipped: dict[str, list[str]] = {}
        self.folders: dict[Path, int] = {}
        self.sources = [(source, source_roots(source)) for source in sources]
        self._roots = [path.resolve() for _, roots in self.sources for path in roots]

    def files(self) -> Iterator[SourceFile]:
        """Yield each file (also devices, pipes and sockets) once for each source that contains it."""
        for source, roots in self.sources:
            files = chain.from_iterable(
                # The user named this folder, so rules that exclude the folder itself are dropped.
                self._walk(path, path, rules or rules_above(path, True) or [])
                if path.is_dir()
                else [SourceFile(path, path.name, True)]
                for path, rules in roots.items()
            )
            yield from self._select_installed(files) if str(source).partition(":")[0] == INSTALLED else files

    def _select_installed(self, files: Iterable[SourceFile]) -> Iterator[SourceFile]:
        """The installed files to read, each with its package."""
        named = [replace(file, package=package_folder(file.path, file.name)) for file in files]
        selected = select_files([(file.package, file.name, file_size(file.path)) for file in named])
        for file in named:
            if (file.package, file.name) in selected:
                yield file
            else:
                self.skip("installed files beyond the cap", file.name)

    def skip(self, reason: str, name: str) -> None:
        self.skipped.setdefault(reason, []).append(name)

    def _walk(self, folder: Path, root: Path, rules: Rules) -> Iterator[SourceFile]:
        try:
            self.folders[folder] = os.stat(folder).st_mtime_ns  # before the folder is read
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError:
            self.skip("unreadable", folder.relative_to(root).as_posix())
            return
        rules, real = [*rules, *read_rules(folder)], folder.resolve()
        for entry in entries:
            path = Path(entry.path)
            name, is_folder = path.relative_to(root).as_posix(), os.path.isdir(path)
            if entry.name in NEVER:
                continue
            ignored = is_ignored(real / entry.name, is_folder, rules)
            if entry.name in DEPENDENCIES:
                if not ignored:
                    self.skip("folders of dependencies", name)
            elif ignored:
                self.skip("ignored", name)
            elif entry.is_symlink():
                yield from self._follow_link(path, root, is_folder)
            elif is_folder:
                yield from self._walk(path, root, rules)
            else:
                yield SourceFile(path, name, False)

    def _follow_link(self, path: Path, root: Path, is_folder: bool) -> Iterator[SourceFile]:
        """Yield a link's files, if `follow_links` and the target is outside the sources and not ignored."""
        name = path.relative_to(root).as_posix()
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):  # a broken link, or a loop
            self.skip("unreadable", name)
            return
        if any(target.is_relative_to(source) for source in self._roots):
            self.skip("links", name)
        elif not self.follow_links:
            self.skip(OUTSIDE, name)
        elif (rules := rules_above(target, is_folder)) is None:
            self.skip("ignored", name)
        elif is_folder:
            self._roots.append(target)  # so that links back to the target are not followed
            yield from self._walk(path, root, rules)
        else:
            yield SourceFile(path, name, False)


def parse_lines(lines: Iterable[str]) -> Lines:
    """The rules in the lines of a .gitignore."""
    return [rule for line in lines if (rule := _parse_line(line)) is not None]


def read_rules(folder: Path) -> Rules:
    """The rules of a folder's own .gitignore; empty if this file is a link or cannot be read, as in git."""
    listing = folder / ".gitignore"
    with suppress(OSError):
        status = os.lstat(listing)
        if stat.S_ISREG(status.st_mode) and status.st_size:
            text = listing.read_text("utf-8-sig", "surrogateescape")  # file names need not be UTF-8
            return [(folder.resolve(), parse_lines(text.split("\n")))]
    return []


def rules_above(path: Path, is_folder: bool) -> Rules | None:
    """The rules of all folders above a path in its git checkout; None if a rule excludes the path or a parent."""
    parents = [path.resolve(), *path.resolve().parents]
    top = next((i for i, parent in enumerate(parents) if os.path.lexists(parent / ".git")), 0)
    rules: Rules = []
    for i in range(top, 0, -1):
        rules += read_rules(parents[i])
        if is_ignored(parents[i - 1], is_folder or i > 1, rules):
            return None
    return rules


def is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    """True if the rules exclude this path; the path is resolved, and none of its parents is excluded."""
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


def file_size(path: Path) -> int:
    """Size of a plain file in bytes; 0 for anything else, or if the size is unknown."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def skipped_line(skipped: Mapping[str, Sequence[str]]) -> str:
    """One line with the number of files skipped for each reason, and a hint on how to follow links."""
    counts = sorted(((len(names), reason) for reason, names in skipped.items()), key=lambda c: -c[0])
    hint = "; --follow-links reads these" if OUTSIDE in skipped else ""
    return f"skipped: {', '.join(f'{n} {reason}' for n, reason in counts) or 'nothing'}{hint}"


def source_roots(source: str | Path) -> dict[Path, Rules]:
    """A source's files or folders; for `stdlib` and `installed`, with rules that select their files. A data set of
    the Hub is downloaded if the cache lacks it. Raises ValueError for a missing source."""
    if str(source).startswith(HUB):
        return {path: [] for path in fetch(str(source))[1]}
    if not is_path(source):
        stdlib = {Path(sysconfig.get_paths()["stdlib"]).resolve(): STDLIB_TESTS}
        roots = stdlib if str(source) == STDLIB else installed_roots(str(source))
        return {root: [(root, parse_lines(lines))] for root, lines in roots.items()}
    if str(source) == "":  # Path("") is the current folder
        raise ValueError("a source is an empty string; pass a file or a folder, . for the current one")
    path = Path(os.path.expanduser(source))
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    return {path: []}


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises OSError for any other file, without blocking."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # first, since opening a device may have side effects
        raise OSError("not a plain file")
    opener = lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    file = open(path, "rb", opener=opener)  # noqa: SIM115  (the caller closes it)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return file
    file.close()
    if stat.S_ISREG(status.st_mode):
        return io.BytesIO()  # files of /proc have size 0, but may have endless content
    raise OSError("not a plain file any more")


CODE_SUFFIXES = frozenset((
    ".ada", ".adb", ".ads", ".agda", ".asm", ".bash", ".bat", ".c", ".cc", ".cjs", ".clj", ".cljs", ".cmake",
    ".coffee", ".cpp", ".cs", ".css", ".cts", ".cu", ".cuh", ".cxx", ".d", ".dart", ".el", ".elm", ".erl",
    ".ex", ".exs", ".f", ".f90", ".fish", ".fs", ".glsl", ".go", ".gradle", ".groovy", ".h", ".hh", ".hpp",
    ".hs", ".hxx", ".java", ".jl", ".js", ".jsx", ".kt", ".kts", ".lean", ".less", ".lisp", ".lua", ".m",
    ".metal", ".mjs", ".ml", ".mli", ".mm", ".mts", ".nim", ".nix", ".pas", ".php", ".pl", ".pm", ".proto",
    ".ps1", ".purs", ".py", ".pyi", ".pyx", ".r", ".rb", ".rkt", ".rs", ".s", ".scala", ".scm", ".scss", ".sh",
    ".sol", ".sql", ".sv", ".svelte", ".swift", ".tcl", ".tf", ".ts", ".tsx", ".v", ".vb", ".vhd", ".vim",
    ".vue", ".wgsl", ".zig", ".zsh",
))  # fmt: skip
"""Suffixes of source code in lower case; prose and data (.md, .html, .json) do not count as code."""

DOCUMENTATION = re.compile(r"(?i)(.*/)?(docs?|documentation)/.*|.*\.(mdx?|markdown|rst|adoc|asciidoc|html?|po)")
"""Paths of documentation, unless they are source code."""
