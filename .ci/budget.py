"""The lines of the package and of its tests, against budget.toml.

`python .ci/budget.py` fails if `dunes/` or `tests/` has more lines of source than its ceiling, or if a ceiling is
higher than where this branch left the main branch. It may rise by what a line `Budget: dunes +N` of a commit
message since then says. Blank lines, docstrings and strings that document an attribute do not count, so that none
is cut to save. `--write` sets both ceilings to what is there.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = "dunes", "tests"
SOURCES = {".py", ".html", ".js", ".css", ".h", ".cpp", ".cu", ".metal", ".sh"}


def lines_of(path: Path) -> int:
    """The number of lines of a file that count."""
    text, documents = path.read_text(), set[int]()
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            documents.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(bool(line.strip()) and n not in documents for n, line in enumerate(text.splitlines(), 1))


def measured(folder: str) -> int:
    """The number of lines that count in the sources of a folder that git knows."""
    paths = (ROOT / name for name in git("ls-files", folder).splitlines())
    return sum(lines_of(path) for path in paths if path.suffix in SOURCES and path.is_file())


def git(*arguments: str) -> str:
    """What git prints; empty if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def earlier() -> tuple[dict[str, int], str]:
    """The ceilings where this branch left main (on main: of the commit before), and the messages since then."""
    head = git("rev-parse", "HEAD")
    bases = (git("merge-base", "HEAD", name) for name in ("origin/main", "main"))
    base = next((base for base in bases if base and base != head), git("rev-parse", "--verify", "-q", "HEAD~1"))
    values = tomllib.loads(git("show", f"{base}:budget.toml")) if base else {}
    return {name: values[name] for name in FOLDERS if isinstance(values.get(name), int)}, git(
        "log", "--format=%B", f"{base}..HEAD" if base else "HEAD"
    )


def main() -> int:
    found, file = {name: measured(name) for name in FOLDERS}, ROOT / "budget.toml"
    if "--write" in sys.argv:
        rows = [f"{name} = {lines}\n" for name, lines in found.items()]
        file.write_text("# Most lines, without blank ones and docstrings (.ci/budget.py).\n" + "".join(rows))
    ceilings, (before, messages), status = tomllib.loads(file.read_text()), earlier(), 0
    for name, lines in found.items():
        granted = sum(map(int, re.findall(rf"^Budget: {name} \+(\d+)", messages, re.M)))
        print(f"{name}: {lines} lines, at most {ceilings[name]}")
        if lines > ceilings[name]:
            print(f"{name}: {lines - ceilings[name]} lines too many: delete as much as was added", file=sys.stderr)
            status = 1
        if ceilings[name] > before.get(name, ceilings[name]) + granted:
            print(f"{name}: its ceiling was {before[name]} in budget.toml, and may only fall", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
