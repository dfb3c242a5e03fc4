"""The documentation site: `python .ci/docs_site.py` builds it from docs/ in site/html, and fails at errors in it.

site/pages is a copy of docs/ with the generated reference: a page of Python names for each room, by mkdocstrings,
and one of the command, from the help of its verbs. Errors are links and anchors that lead nowhere, pages that the
navigation in zensical.toml lacks, files that a page would load from another host, and what `zensical build
--strict` reports.
"""

import html
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

from public_names import ROOT, docstring, dunes, missing_docstrings, public_names, resolve

from dunes.cli.main import GROUPS, VERBS, run_command

PAGES, BUILT = ROOT / "site" / "pages", ROOT / "site" / "html"
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "srcset", "use": "href"}
"""What a browser loads with a page: tags, and their attributes."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The head of pages that the search does not list: the log would hide the guides."""


def write_pages() -> None:
    """Write site/pages anew."""
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for page in PAGES.glob("log/*.md"):
        lists_apart = re.sub(r"^(\w.*|\*\*.*)\n(?=- )", r"\1\n\n", page.read_text(), flags=re.MULTILINE)
        page.write_text(UNSEARCHED + lists_apart)
    names, folder = public_names(), PAGES / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "commands.md").write_text("\n\n".join(commands_page()))
    (folder / "python.md").write_text("\n".join(rooms_page(names)))
    for room, members in names.items():
        (folder / f"{room}.md").write_text("\n\n".join(room_page(room, members)))


ROOMS = """# Python names

The package is divided into rooms. The page of a room has its public names: those that it exports, and those in
its modules that recipes and docs use. All else may change without notice. A name with a dot is imported from its
module, as `train.train` of `dunes.runs` by `from dunes.runs.train import train`.

| room | subject |
|---|---|"""


def rooms_page(names: dict[str, list[str]]) -> Iterator[str]:
    """The page that lists the rooms."""
    yield ROOMS
    for room in names:
        subject = dunes._ROOMS.get(room.removeprefix("dunes."), "")
        yield f"| [{room}]({room}.md) | {subject or (sys.modules[room].__doc__ or '').split('.')[0]} |"


def room_page(room: str, names: list[str]) -> Iterator[str]:
    """The page of a room: its docstring, and each of its public names."""
    yield f"# {room}"
    yield sys.modules[room].__doc__ or ""
    for name in names:
        yield f"::: {room}.{name}\n    options:\n      heading: {name}\n      toc_label: {name}"
        value = resolve(f"{room}.{name}")
        if isinstance(value, type) and not is_documented(value):
            yield docstring(f"{room}.{name}")


def is_documented(value: type) -> bool:
    """False for a class that has a comment in the place of a docstring (`public_names.class_docstring`)."""
    return not (value.__doc__ or "").startswith(f"{value.__name__}(")


def commands_page() -> Iterator[str]:
    """The page of the command: each verb, and the commands of verbs that have some."""
    yield "# The command"
    yield "`dunes VERB -h` prints these texts."
    for verb in VERBS:
        if verb in GROUPS:
            usage, *_ = help_text(verb).splitlines()
            yield from command([verb])
            for name in re.search(r"{(.*)}", usage)[1].split(","):
                yield from command([verb, name])
        else:
            yield from command([verb])


def help_text(*words: str) -> str:
    """The text that `dunes WORDS -h` prints."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)  # an encoding that has lines for boxes
    with redirect_stdout(printed), mock.patch.dict(os.environ, COLUMNS="80"), suppress(SystemExit):
        run_command([*words, "-h"])
    return printed.buffer.getvalue().decode()


def command(words: list[str]) -> Iterator[str]:
    """The section of a command."""
    head, *boxes = re.split(r"^╭─ (.*?) ─*╮$", help_text(*words), flags=re.MULTILINE)
    usage, *about = head.strip().split("\n\n")
    yield f"{'#' * (len(words) + 1)} dunes {' '.join(words)}"
    yield f"```text\n{usage.removeprefix('usage: ')}\n```"
    for paragraph in about:
        example = re.fullmatch("Example: (.*)", paragraph, re.DOTALL)
        yield f"```sh\n{' '.join(example[1].split())}\n```" if example else f"<p>{code(paragraph)}</p>"
    for title, box in zip(boxes[::2], boxes[1::2], strict=True):
        lines = re.findall(r"^│ (.*?) *│$", box, re.MULTILINE)
        if title != "subcommands" and (rows := [*options("".join(words), title, lines)]):
            yield f'<h5>{title}</h5>\n<dl class="options">\n' + "\n".join(rows) + "\n</dl>"


def options(anchor: str, title: str, lines: list[str]) -> Iterator[str]:
    """The terms and descriptions of a box of options."""
    entries: list[list[str]] = []
    for line in filter(None, lines):
        if line.startswith("-") or (title.startswith("positional") and not line.startswith(" ")):
            name, text = re.fullmatch(r"(.*?)(?:\s{2,}(.*))?", line).groups("")
            entries.append([name, text])
        elif entries:
            entries[-1][line.startswith(" ")] += f" {line.strip()}" if line.startswith(" ") else line
    for name, text in entries:
        if "--help" not in name:
            target = f"{anchor}{name.split()[0]}"
            yield f'<dt id="{target}"><code>{html.escape(name)}</code></dt><dd>{code(text.strip())}</dd>'


def code(text: str) -> str:
    """Plain text as HTML, with words in backticks as code."""
    return re.sub("`(.*?)`", r"<code>\1</code>", html.escape(text))


class Page(HTMLParser):
    """What a built page has: anchors, links, and addresses of files that are loaded with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get("rel") not in ("canonical", "next", "prev") and LOADED.get(tag) in given:
            self.loaded.append(given[LOADED[tag]])


def navigation_problems() -> Iterator[str]:
    """Differences between the pages of the navigation and those in site/pages; the log has one entry."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    written = {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    listed = {*navigation(config["nav"])}
    yield from (f"zensical.toml: nav has {page}, which does not exist" for page in sorted(listed - written))
    lacking = sorted(page for page in written - listed if not page.startswith("log/"))
    yield from (f"zensical.toml: nav lacks {page}" for page in lacking)


def problems() -> Iterator[str]:
    """Dead links in the built pages, and files that they load from other hosts."""
    built = {path: Page(path) for path in sorted(BUILT.rglob("*.html"))}
    for path, page in built.items():
        place = path.relative_to(BUILT)
        yield from (f"{place} loads {url}" for url in page.loaded if re.match("(https?:)?//", url))
        yield from (f"{place}: {link} leads nowhere" for link in page.links if not leads(path, link, built))


def navigation(entries: list[str | dict]) -> Iterator[str]:
    """The pages of the navigation."""
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else navigation(value)


def leads(path: Path, link: str, built: dict[Path, Page]) -> bool:
    """True if a link of a page leads to another site, a file, or an anchor of a page."""
    url = urlsplit(link)
    if url.scheme or url.netloc or path.name == "404.html":
        return True
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if not url.fragment or target not in built:
        return target.is_file()
    return unquote(url.fragment) in built[target].anchors


def build() -> Iterator[str]:
    """Build site/html, and yield the lines that zensical prints if it finds an error."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if built.returncode:
        yield from re.sub(r"\x1b\[[0-9;]*m", "", built.stdout).partition("Traceback")[0].splitlines()
        yield f"zensical build ended with status {built.returncode}"


def main() -> int:
    write_pages()
    for check in (missing_docstrings, navigation_problems, build, problems):
        if lines := [*check()]:
            print("\n".join(lines), file=sys.stderr)
            return 1
    print(f"the documentation: {BUILT / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
