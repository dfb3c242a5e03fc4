"""`dunes help`: the pages of the documentation and the help of verbs, in a pager."""

import os
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

    from dunes.cli.main import run_command

    if topic and topic[0] in VERBS:
        run_command([*topic, "--help"])  # prints the help, and raises SystemExit
    name, pages, console = " ".join(topic), topics(), Console(highlight=False)
    if topic and name not in pages:
        raise ValueError(f"{name}: expected a topic{nearest(name, [*pages, *VERBS])}; dunes help lists all topics")
    titles = [f"{page:24}{path.read_text('utf-8').splitlines()[0][2:]}" for page, path in pages.items()]
    text = pages[name].read_text("utf-8") if topic else "\n".join([*titles, f"\nverbs: {' '.join(VERBS)}"])
    shown = Markdown(text) if topic and console.is_terminal else text
    os.environ.setdefault("LESS", "-FRX")  # colours, and no waiting for a key after a short text
    with console.pager(styles=console.is_terminal and "R" in os.environ["LESS"]):
        console.print(shown, markup=False, soft_wrap=shown is text)


def topics() -> dict[str, Path]:
    """The pages of the documentation by name, in this installation or in the source folder."""
    package = Path(__file__).parent.parent
    folder = next(filter(Path.is_dir, (package / "docs", package.parent / "docs")), package / "docs")
    return {path.stem: path for path in sorted(folder.rglob("*.md")) if path.parent.name != "log"}
