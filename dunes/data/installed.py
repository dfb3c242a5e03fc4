"""Code that is installed on this machine: packages of Python, Node, Go and Rust, and headers of C.

`installed` is a source of text like `stdlib`; `installed:python,go` limits it to these languages. Headers are read
only if `c` is listed, since every machine has them. Tests are left out. If there are more than CAP bytes, about
the same number of bytes is read from each package; smaller packages are read completely.
"""

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import metadata, packages_distributions, version
from itertools import accumulate
from pathlib import Path

CAP = 100_000_000
"""Maximum bytes of installed code in a corpus."""
TESTS = (
    *("test/", "tests/", "testing/", "testdata/", "__tests__/", "__mocks__/", "fixtures/", "spec/", "externals/"),
    *("test_*", "*_test.*", "*.test.*", "*.spec.*", "conftest.py", "*.d.ts", "*.d.mts", "*.d.cts"),
)
"""Lines of a .gitignore that exclude tests, vendored packages, and declarations that a compiler writes."""
_PACKAGE = re.compile(r"@[^/]+/[^/]+|(?:[^/@]+/)+[^/@]+@v\d[^/]*|[^/]+")
"""A package's path within its root: @scope/name (Node), host/path@version (Go), or the first component."""


def _python_folders() -> list[Path]:
    return [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _node_folders() -> list[Path]:
    program = Path(shutil.which("node") or "/usr/local/bin/node")
    roots = [Path("node_modules"), program.parent.parent / "lib" / "node_modules"]
    return roots + [folder for root in roots for folder in sorted(root.glob(".pnpm/*/node_modules"))]


def _go_folders() -> list[Path]:
    first = os.environ.get("GOPATH", "").split(os.pathsep)[0] or "~/go"
    return [_expanded(os.environ.get("GOMODCACHE") or f"{first}/pkg/mod")]


def _rust_folders() -> list[Path]:
    return sorted(_expanded(os.environ.get("CARGO_HOME") or "~/.cargo").glob("registry/src/*"))


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser raises for a user without a home


LANGUAGES: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[Path]]]] = {
    "python": ((".py",), _python_folders),
    "javascript": ((".js", ".cjs", ".mjs", ".jsx", ".ts", ".mts", ".cts", ".tsx"), _node_folders),
    "go": ((".go",), _go_folders),
    "rust": ((".rs",), _rust_folders),
    "c": ((".h", ".hh", ".hpp", ".hxx"), lambda: [Path("/usr/include"), Path("/usr/local/include")]),
}
"""Suffixes of files, and folders that may contain packages, by language. `installed` alone omits `c`."""


def installed_roots(source: str) -> dict[Path, list[str]]:
    """The folders of a source `installed` or `installed:LANGUAGE,...`, with .gitignore lines that select files.

    LANGUAGE may also be a suffix such as `ts`. Raises ValueError if a language is unknown or no folder exists.
    """
    aliases = {suffix[1:]: name for name, (suffixes, _) in LANGUAGES.items() for suffix in suffixes}
    asked = source.partition(":")[2].lower().split(",") if ":" in source else [*LANGUAGES][:-1]
    names = [aliases.get(text.strip(), text.strip()) for text in asked]
    if unknown := [name for name in names if name not in LANGUAGES]:
        raise ValueError(f"{source}: unknown language {unknown[0]!r}; name one or more of {','.join(LANGUAGES)}")
    folders = [(folder, LANGUAGES[name][0]) for name in names for folder in LANGUAGES[name][1]()]
    roots = {
        folder.resolve(): [f"!*{s}" for s in suffixes] for folder, suffixes in folders if os.path.isdir(folder)
    }
    if roots:
        return {root: ["*", "!*/", *code, *TESTS] for root, code in roots.items()}
    places = ", ".join(str(folder) for folder, _ in folders) or "no folder"
    raise ValueError(f"{source}: nothing is installed here (looked in {places}); name a folder of code")


def package_folder(path: Path, name: str) -> str:
    """The folder of an installed file's package, or the file itself if it is directly in its root. `name` is the
    file's path within the root."""
    match = _PACKAGE.match(name)
    return f"{str(path)[: -len(name)]}{match[0] if match else name}"


def select_files(files: Sequence[tuple[str, str, int]], cap: float = CAP) -> set[tuple[str, str]]:
    """Select from `files` (package, name, size) at most `cap` bytes in total; returns (package, name) of each."""
    package_bytes, ordered = Counter[str](), []
    for package, name, size in sorted(files, key=lambda file: blake2b(os.fsencode(file[1])).digest()):
        package_bytes[package] += size
        ordered.append((package_bytes[package], size, package, name))
    total = accumulate(size for _, size, *_ in sorted(ordered))
    return {
        (package, name) for size, (*_, package, name) in zip(total, sorted(ordered), strict=True) if size <= cap
    }


def describe_package(folder: Path) -> str:
    """Name, version and licence of a package, as far as its metadata or licence file states them."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        if (folder / "package.json").is_file():
            fields = json.loads((folder / "package.json").read_bytes())
            return _describe(f"{fields['name']} {fields['version']}", fields.get("license"))
        if owners := _owners(tuple(sys.path)).get(folder.name.removesuffix(".py")):
            return "; ".join(sorted({_describe(f"{name} {version(name)}", _license(name)) for name in owners}))
        files = sorted(path for path in folder.iterdir() if re.match("licen[cs]e|copying", path.name, re.I))
        return _describe(folder.name, files[0].read_text("utf-8").strip().split("\n")[0])
    return _describe(folder.name, None)


def _describe(name: str, license: object) -> str:
    return " ".join(f"{name}, {license or 'no licence stated'}".split())[:200]


@lru_cache(1)
def _owners(path: Sequence[str]) -> Mapping[str, list[str]]:
    """The distributions of each importable name; `path` is `sys.path`, the key of the cache."""
    return packages_distributions()


def _license(name: str) -> str:
    """The licence that a distribution states: an expression, one line of text, or the names in its classifiers."""
    get, fields = metadata(name).get_all, ("License-Expression", "License", "Classifier")
    stated = [text for field in fields for text in get(field, []) if "\n" not in text]
    classified = [text.rpartition(" :: ")[2] for text in stated if text.startswith("License :: ")]
    return next((text for text in stated if " :: " not in text), " and ".join(classified))
