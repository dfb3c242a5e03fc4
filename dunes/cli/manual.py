"""`dunes help`: the pages of the documentation and the help of verbs, in a pager."""

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Annotated

import tyro

from dunes.cli import VERBS
from dunes.flags import flag, nearest


def show_help(
    topic: Annotated[tuple[str, ...], tyro.conf.Positional, flag("TOPIC", "a list of the topics")] = (),
) -> None:
    """Show a page of the documentation, or the help of a verb.

    Example: dunes help completion

    Args:
        topic: A page, or a verb and its subcommand.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    name, pages, console = " ".join(topic), topics(), Console(highlight=False)
    if not topic:
        titles = [
            f"{page:24}{path.read_text('utf-8').partition('# ')[2]}".splitlines()[0]
            for page, path in pages.items()
        ]
        shown: str | Markdown = "\n".join([*titles, f"\nverbs: {' '.join(VERBS)}"])
    elif topic[0] in VERBS:
        shown = _verb_help(topic)
    elif name in pages:
        text = pages[name].read_text("utf-8")
        shown = Markdown(text) if console.is_terminal else text
    else:
        raise ValueError(f"{name}: expected a topic{nearest(name, [*pages, *VERBS])}; dunes help lists all topics")
    os.environ.setdefault("LESS", "-FRX")  # colours, and no waiting for a key after a short text
    with console.pager(styles=console.is_terminal):
        console.print(shown, markup=False, soft_wrap=isinstance(shown, str))


def topics() -> dict[str, Path]:
    """The pages of the documentation by name, in this installation or in the source folder."""
    package = Path(__file__).parent.parent
    folder = next(filter(Path.is_dir, (package / "docs", package.parent / "docs")), package / "docs")
    return {path.stem: path for path in sorted(folder.rglob("*.md")) if path.parent.name != "log"}


def _verb_help(words: tuple[str, ...]) -> str:
    from dunes.cli.main import run_command

    with redirect_stdout(StringIO()) as output, suppress(SystemExit):
        run_command([*words, "--help"])
    return output.getvalue()
