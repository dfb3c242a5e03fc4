"""Progress of a run: a bar on a terminal, a line every few seconds elsewhere."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dunes.units import format_seconds

EVERY = 10.0
"""Seconds between plain lines."""
KNOWN, UNKNOWN_SECONDS = 0.01, 2.0
"""The share and the seconds of the work before which the time left is not known."""


@dataclass
class Display:
    """`with Display(console) as display:` then `display.state(...)` after each step and `display.line(text)`.

    A quiet display shows neither progress nor `detail`, only warnings and results.
    """

    console: Console = field(default_factory=lambda: Console(highlight=False))
    quiet: bool = False
    patience: float = 0.0
    """Seconds before the first plain line."""

    def __enter__(self) -> Self:
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), console=self.console)
        self._task = self._bar.add_task("", total=1.0, start=True)
        self._start = monotonic()
        self._last_line = self._start + self.patience - EVERY
        if self.console.is_terminal and not self.quiet:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal and not self.quiet:
            self._bar.stop()

    def state(self, text: str, done: float) -> None:
        """Show the progress: a text and the fraction done."""
        if self.quiet:
            return
        if self.console.is_terminal:
            self._bar.update(self._task, description=text, completed=min(1.0, done))
        elif monotonic() - self._last_line >= EVERY:
            self._last_line = monotonic()
            self.line(f"{done:4.0%}  {text}")

    def time_left(self, text: str, done: float) -> None:
        """Show the progress, and once it is known the time that the rest takes at the same rate."""
        elapsed = monotonic() - self._start
        known = done >= KNOWN and elapsed >= UNKNOWN_SECONDS
        left = elapsed * (1 / done - 1) if known else None
        self.state(text if left is None else f"{text}, {format_seconds(round(left))} left", done)

    def line(self, text: str = "") -> None:
        """Print a line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Print a line unless the display is quiet."""
        if not self.quiet:
            self.line(text)

    def print_highlighted(self, title: str, parts: Iterable[tuple[str, bool]]) -> None:
        """Print text with some parts highlighted: in colour, or in brackets where there is none."""
        plain = self.console.color_system is None
        text = Text(f"{title}\n")
        for part, marked in parts:
            text.append(f"⟦{part}⟧" if marked and plain else part, style="bold green" if marked else "dim")
        self.console.print(text, soft_wrap=True)
