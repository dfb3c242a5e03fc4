"""Whether functions that the cards of model folders name may be imported, which runs their code."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trusted = ContextVar("trusted", default=False)


@contextmanager
def trust_cards(trust: bool = True) -> Iterator[None]:
    """Inside, in this thread, the functions that cards name are imported, which runs code outside of this package.

    `--trust-code` of the command does the same. With `trust=False`, what holds outside holds inside.
    """
    token = _trusted.set(trust or cards_trusted())
    try:
        yield
    finally:
        _trusted.reset(token)


def cards_trusted() -> bool:
    """Whether this runs inside of `trust_cards`; a process that is started must be told."""
    return _trusted.get()
