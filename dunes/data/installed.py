"""The code that is installed on this machine: packages of Python, Node, Go and Rust, and headers of C.

`installed` is a source of text like `stdlib`; `installed:python,go` is the part of it in these languages;
without names, headers are left out, since a machine has them whatever its user writes. Tests and vendored packages are
left out, and of several versions of a package all but the newest. If there are more than CAP bytes, each language and
each of its packages contributes the same number of bytes, and smaller ones contribute all.
"""

import json
import math
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

CAP = 100_000_000
"""Maximum bytes of installed code in a corpus."""
_LEFT_OUT = (
    *("test/", "tests/", "testing/", "testdata/", "__tests__/", "__mocks__/", "fixtures/", "spec/", "externals/"),
    *("test_*", "*_test.*", "*.test.*", "*.spec.*", "conftest.py", "*.d.ts", "*.d.mts", "*.d.cts"),
)
"""Lines of a .gitignore for tests, vendored packages, and declarations that a compiler writes."""
_PACKAGE = re.compile(r"@[^/]+/[^/]+|(?:[^/@]+/)+[^/@]+@v\d[^/]*|[^/]+")
"""A package's path within its root: @scope/name, host/path@version (Go), or the first folder."""
_VERSION = re.compile(r"(?<=[@-])v?\d+\.\d+\.\d.*$")
_MANIFESTS = {"package.json": json.loads, "Cargo.toml": lambda text: tomllib.loads(text)["package"]}
"""Files that state name, version and licence of a package, each with the function that reads it."""


def _python_roots() -> list[Path]:
    return [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _node_roots() -> Iterator[Path]:
    program = shutil.which("node") or "/usr/local/bin/node"
    for root in (Path("node_modules"), Path(program).parent.parent / "lib" / "node_modules"):
        yield from (root, *sorted(root.glob(".pnpm/*/node_modules")))


def _go_roots() -> list[Path]:
    path = Path(os.environ.get("GOPATH", "").split(os.pathsep)[0] or "~/go", "pkg", "mod")
    return [Path(os.environ.get("GOMODCACHE") or path).expanduser()]


def _rust_roots() -> list[Path]:
    return sorted(Path(os.environ.get("CARGO_HOME") or "~/.cargo").expanduser().glob("registry/src/*"))


LANGUAGES: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[Path]]]] = {
    "python": ((".py",), _python_roots),
    "javascript": ((".js", ".cjs", ".mjs", ".jsx", ".ts", ".mts", ".cts", ".tsx"), _node_roots),
    "go": ((".go",), _go_roots),
    "rust": ((".rs",), _rust_roots),
    "c": ((".h", ".hh", ".hpp", ".hxx"), lambda: [Path("/usr/include"), Path("/usr/local/include")]),
}
"""The languages of installed code: the suffixes of their files, and the folders that may have packages. The last one
must be named."""
_BY_SUFFIX = {suffix: name for name, (suffixes, _) in LANGUAGES.items() for suffix in suffixes}


def installed_roots(source: str) -> dict[Path, list[str]]:
    """The folders of a source `installed` or `installed:LANGUAGE,...`, with lines of a .gitignore for the other files.

    A suffix such as `ts` also names its language. Raises ValueError for an unknown language, and if no folder exists.
    """
    asked = source.partition(":")[2].lower().split(",") if ":" in source else [*LANGUAGES][:-1]
    names = [_BY_SUFFIX.get(f".{text.strip()}", text.strip()) for text in asked]
    if unknown := [name for name in names if name not in LANGUAGES]:
        raise ValueError(f"{source}: unknown language {unknown[0]!r}; name one or more of {','.join(LANGUAGES)}")
    roots: dict[Path, list[str]] = {}
    for suffixes, folders in (LANGUAGES[name] for name in names):
        rules = ["*", "!*/", *(f"!*{suffix}" for suffix in suffixes), *_LEFT_OUT]
        roots |= {folder.resolve(): rules for folder in folders() if folder.is_dir()}
    if not roots:
        places = ", ".join(str(folder) for name in names for folder in LANGUAGES[name][1]())
        raise ValueError(f"{source}: nothing is installed here (looked in {places or 'no folder'})")
    return roots


def package_folder(path: Path, name: str) -> str:
    """The folder of the package of an installed file, or the file itself; `name` is its path within its root."""
    match = _PACKAGE.match(name)
    return f"{str(path)[: -len(name)]}{match[0]}" if match else str(path)


def select_files(files: Iterable[tuple[str, str, int]], cap: float = CAP) -> set[tuple[str, str]]:
    """(package, name) of the files to read, of (package, name, size): the newest versions, and at most `cap` bytes."""
    languages: dict[str, dict[str, dict[str, list[tuple[str, int]]]]] = {}
    for package, name, size in files:
        packages = languages.setdefault(_BY_SUFFIX[Path(name).suffix], {})
        packages.setdefault(_VERSION.sub("", package), {}).setdefault(package, []).append((name, size))
    newest = [[max(p.items(), key=_version) for p in packages.values()] for packages in languages.values()]
    size_of = lambda item: sum(size for _, size in item[1])
    most, selected = _limit([sum(map(size_of, packages)) for packages in newest], cap), set[tuple[str, str]]()
    for packages in newest:
        limit = _limit([*map(size_of, packages)], most)
        for package, named in packages:
            room = limit
            for name, size in sorted(named, key=lambda file: blake2b(os.fsencode(file[0])).digest()):
                if size <= room:
                    room -= size
                    selected.add((package, name))
    return selected


def _version(item: tuple[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", item[0])]


def _limit(sizes: Sequence[int], total: float) -> float:
    """The number that limits each of the sizes so that their sum is at most `total`; infinite if it is anyway."""
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * count > total:
            return total / count
        total -= size
    return math.inf


def describe_package(folder: Path) -> str:
    """Name, version and licence of a package, as far as its manifest or its file of the licence states them."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        for name, parse in _MANIFESTS.items():
            if (folder / name).is_file():
                fields = parse((folder / name).read_text("utf-8"))
                return _one_line(f"{fields['name']} {fields['version']}", fields.get("license"))
        if owners := _distributions(folder.parent).get(folder.name):
            return "; ".join(sorted({_one_line(f"{d.name} {d.version}", _license(d)) for d in owners}))
        files = sorted(p for p in folder.glob("*") if re.match("licen[cs]e|copying", p.name, re.I) and p.is_file())
        return _one_line(folder.name, next(filter(None, map(str.strip, files[0].read_text("utf-8").splitlines())), None))
    return _one_line(folder.name, None)


def _one_line(name: str, license: object) -> str:
    return f"{name}, {' '.join(str(license or 'no licence stated').split())[:80]}"


@lru_cache(8)
def _distributions(root: Path) -> dict[str, list[Distribution]]:
    """The distributions that installed something under each name in a folder of Python packages."""
    owners: dict[str, list[Distribution]] = {}
    for distribution in distributions(path=[str(root)]):
        listing = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
        for name in {re.split("[/,]", line, maxsplit=1)[0] for line in listing.splitlines()}:
            owners.setdefault(name, []).append(distribution)
    return owners


def _license(distribution: Distribution) -> str:
    fields = {key: distribution.metadata.get_all(key, [""]) for key in ("License-Expression", "License", "Classifier")}
    classified = [c.rpartition(" :: ")[2] for c in fields["Classifier"] if c.startswith("License")]
    stated = (fields["License-Expression"][0], fields["License"][0], " and ".join(classified))
    return next((text for text in stated if text and "\n" not in text.strip()), "")
