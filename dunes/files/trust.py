"""Permission to import functions named by the cards of model folders, which runs their code."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trusted = ContextVar("trusted", default=False)


@contextmanager
def trust_cards(trust: bool = True) -> Iterator[None]:
    """Inside this context, in this thread, functions named by cards are imported, which runs third-party code.

    The command's `--trust-code` does the same. `trust=False` leaves the permission unchanged.
    """
    token = _trusted.set(trust or cards_trusted())
    try:
        yield
    finally:
        _trusted.reset(token)


def cards_trusted() -> bool:
    """True inside `trust_cards`. Child processes do not inherit it."""
    return _trusted.get()
