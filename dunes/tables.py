"""Plain tables on standard output."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 240
"""Width of the longest line: narrow screens wrap it, since truncated figures would mislead."""


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table on standard output: words and bars to the left, figures to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not column else "right", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    Console(width=WIDTH, highlight=False, soft_wrap=True).print(table)
