"""Line completion by a language model and by copying, and simulated typing to measure the keys saved.

Start with `completer.find_completer`, `completer.FolderCompleter` and `search.CompleteOptions`; any
`LineCompleter` can be evaluated.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from dunes.pictures import html_table

__all__ = ["Cancelled", "LineCompleter", "Source", "Suggestion"]
Source = Literal["model", "copies"]
"""`"copies"` for a copied line, `"model"` for a line generated from the mixture of model and copies."""


@dataclass(frozen=True)
class Suggestion:
    """A suggested rest of a line. `word` is the probability in [0, 1] that the first word is right; `line` is the
    probability that `text` is right. `ends_line` is False if the line continues after `text`."""

    text: str
    word: float = 1.0
    line: float = 1.0
    ends_line: bool = True
    source: Source = "model"

    def _repr_html_(self) -> str:
        line = [self.text, f"{self.word:.0%}", f"{self.line:.0%}", self.source]
        return html_table(["suggestion", "first word", "line", "source"], [line])


class LineCompleter(Protocol):
    """Completes lines. A suggestion depends only on the arguments of `complete`, not on earlier calls."""

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line, given the text before and after the cursor and the file's path."""
        ...


class Cancelled(Exception):
    """Raised when a completion is cancelled."""
