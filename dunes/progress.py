"""Show progress to the user, as a bar on a terminal or as a line every few seconds elsewhere; print tables.

Code reports its phases with `phase`, and loops inside a phase report their progress with `each` or `advance`. The
reports go through context variables, so functions need no argument for them:
`with Display() as display, shown_by(display.state): ...`. rich is imported only when a display or table is used.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from shutil import get_terminal_size
from time import monotonic
from typing import TYPE_CHECKING, Self, TypeVar

from dunes.context import bound
from dunes.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 10.0
"""Seconds between two plain lines of progress."""
BAR = 20
"""Width of the bar, in characters."""
KNOWN = 0.01
"""The remaining time is shown only after this fraction of the work."""
UNKNOWN_SECONDS = 2.0
"""The remaining time is shown only after this many seconds."""
T = TypeVar("T")
Line = Callable[[str], object]
"""A function that is called with a line of text for the user."""
Show = Callable[[str, float], object]
"""A function that is called with a description of the current phase and the fraction of the work done."""
_show: ContextVar[Show] = ContextVar("show", default=lambda text, done: None)
_listener: ContextVar[Callable[[float], object] | None] = ContextVar("listener", default=None)
_asked: ContextVar[Callable[[], bool]] = ContextVar("asked", default=lambda: False)
WIDTH = 100
"""Maximum line width of tables, in characters, for an output that is no terminal."""


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


@dataclass
class Display:
    """Shows the progress and messages of a task on a console.

    Inside `with Display(console) as display:`, call `display.state(...)` to show progress, and
    `display.line(text)` to print a line. A quiet display shows no progress and no `detail` lines.
    """

    console: "Console" = field(default_factory=_console)
    quiet: bool = False
    silent: bool = False
    """True to print no lines, as on all ranks except the first."""
    patience: float = 0.0
    """Seconds before the first plain line of progress."""

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=BAR), console=self.console)
        self._task = self._bar.add_task("", total=1.0, start=True)
        self._start = monotonic()
        self._last_line = self._start + self.patience - EVERY
        if self.console.is_terminal and not self.quiet:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal and not self.quiet:
            self._bar.update(self._task, visible=False)  # its description is outdated
            self._bar.stop()

    def state(self, text: str, done: float) -> None:
        """Show the fraction `done` of the work, from 0 to 1, and a text of parts separated by two spaces.

        On a terminal that is too narrow for all parts, parts before the last one are left out.
        """
        if self.quiet:
            return
        if self.console.is_terminal:
            parts = text.split("  ")
            while len(parts) > 2 and len("  ".join(parts)) >= self.console.width - BAR:
                del parts[-2]  # keeps the last part, the remaining time
            self._bar.update(self._task, description="  ".join(parts), completed=min(1.0, done))
        elif monotonic() - self._last_line >= EVERY:
            self._last_line = monotonic()
            self.line(f"{done:4.0%}  {text}")

    def time_left(self, text: str, done: float) -> None:
        """Show the progress, with the remaining time estimated from the average rate so far."""
        elapsed = monotonic() - self._start
        can_estimate = done >= KNOWN and elapsed >= UNKNOWN_SECONDS
        remaining = elapsed * (1 / done - 1) if can_estimate else None
        self.state(text if remaining is None else f"{text}, {format_seconds(round(remaining))} left", done)

    def own_bar(self, title: str) -> AbstractContextManager[None]:
        """Restart the bar for the phases inside the `with` block, with a title and the remaining time."""
        self._start, self._last_line = monotonic(), -math.inf
        return shown_by(lambda text, done: self.time_left(f"{title}: {text}", done))

    def line(self, text: str = "") -> None:
        """Print a line."""
        if self.silent:
            return
        self.console.print(text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Print a line unless the display is quiet."""
        if not self.quiet:
            self.line(text)

    def print_highlighted(self, title: str, parts: Iterable[tuple[str, bool]]) -> None:
        """Print text with the marked parts highlighted: in colour, or in brackets if the console has no colour."""
        if self.silent:
            return
        from rich.text import Text

        no_colour = self.console.color_system is None
        text = Text(f"{title}\n")
        for part, marked in parts:
            text.append(f"⟦{part}⟧" if marked and no_colour else part, style="bold green" if marked else "dim")
        self.console.print(text, soft_wrap=True)


def shown_by(
    show: Show | None = None, scale: Callable[[float], float] = lambda done: done
) -> AbstractContextManager[None]:
    """Inside the `with` block, call `show(text, scale(done))` for each report.

    By default, `show` is the function that shows reports outside the block.
    """
    outer = show or _show.get()
    return bound(_show, lambda text, done: outer(text, scale(done)))


def report(text: str, done: float) -> None:
    """Show a description of the current phase and the fraction of the work done."""
    _show.get()(text, done)


@contextmanager
def phase(text: str, start: float = 0.0, end: float = 1.0) -> Iterator[None]:
    """Show a phase that covers the work from fraction `start` to fraction `end`.

    Loops inside the `with` block report their progress within the phase.
    """
    show, reached = _show.get(), 0.0  # read now, since a loop may report from another thread

    def listen(share: float) -> None:
        nonlocal reached
        reached = max(reached, share)  # so that a second loop does not move the bar back
        show(text, start + (end - start) * reached)

    show(text, start)
    with bound(_listener, listen):
        yield


def part(start: float, end: float) -> AbstractContextManager[None]:
    """Loops inside the `with` block cover the current phase from fraction `start` to fraction `end`."""
    listener = _listener.get()
    return bound(_listener, listener and (lambda share: listener(start + (end - start) * share)))


class Interrupted(Exception):
    """Raised inside `interruptible` by a loop that the user asked to stop."""


def interruptible(asked: Callable[[], bool]) -> AbstractContextManager[None]:
    """Inside the `with` block, loops over `each` and generation raise Interrupted once `asked()` is true."""
    return bound(_asked, asked)


def raise_if_asked() -> None:
    """Inside `interruptible`, raise Interrupted if the user asked to stop."""
    if _asked.get()():
        raise Interrupted


def is_shown() -> bool:
    """True if a phase is in progress, and its progress is already shown."""
    return _listener.get() is not None


def advance(total: float, start: float = 0.0, end: float = 1.0) -> Callable[[float], None]:
    """Return a function to call with the amount of each finished piece of work; the amounts add up to `total`.

    The function reports progress from fraction `start` to fraction `end` of the current phase.
    """
    listener, done = _listener.get(), 0.0

    def report(part: float) -> None:
        nonlocal done
        done += part
        if listener is not None:
            listener(start + (end - start) * (min(1.0, done / total) if total else 1.0))

    return report


def each(items: Collection[T], start: float = 0.0, end: float = 1.0) -> Iterator[T]:
    """Yield the items, and report progress from fraction `start` to fraction `end` of the current phase.

    Inside `interruptible`, raises Interrupted before the next item if the user asked to stop.
    """
    report = advance(len(items), start, end)
    for item in items:
        raise_if_asked()
        yield item
        report(1)


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], keys: int = 1) -> None:
    """Print a table: labels and bars left-aligned, figures right-aligned.

    A table that is wider than the terminal is printed in several parts, since truncated or wrapped figures would
    mislead. Each part repeats the first `keys` columns, which identify a line, and adds at least one other column.
    A column without a title contains text, and stays in the same part as the column before it.
    """
    from rich.cells import cell_len

    most = get_terminal_size((WIDTH, 0)).columns
    cells = [list(column) for column in zip(columns, *lines, strict=True)]
    for number, column in enumerate(cells):
        width = max(map(cell_len, column))
        for line, text in enumerate(column):
            space = " " * (width - cell_len(text))
            column[line] = text + space if number == 0 or not columns[number] else space + text
    labels, parts = cells[:keys], list[list[list[str]]]()
    for column, name in zip(cells[keys:], columns[keys:], strict=True):
        if not parts or (name and sum(cell_len(c[0]) + 2 for c in (*parts[-1], column)) - 2 > most):
            parts.append([*labels])
        parts[-1].append(column)
    texts = ["\n".join("  ".join(row).rstrip() for row in zip(*part, strict=True)) for part in parts or [labels]]
    print(*filter(None, [title]), "\n\n".join(texts), sep="\n")
