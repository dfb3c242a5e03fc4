"""How much of a long step is done: its loops report it to whoever shows it.

A context variable connects the two, so that the functions between them need no argument for it.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Show = Callable[[str, float], object]
"""Called with a description of the current step and the share of the work that is done."""

_listener: ContextVar[Callable[[float], object] | None] = ContextVar("listener", default=None)


@contextmanager
def step(show: Show, what: str, start: float, end: float) -> Iterator[None]:
    """Show a step from `start` to `end` of the work, and the share of it that loops inside report."""
    reached = 0.0

    def listen(share: float) -> None:
        nonlocal reached
        reached = max(reached, share)  # a second loop does not move it back
        show(what, start + (end - start) * reached)

    show(what, start)
    token = _listener.set(listen)
    try:
        yield
    finally:
        _listener.reset(token)


def is_shown() -> bool:
    """Whether a step is shown, so that no second display is needed."""
    return _listener.get() is not None


def advance(total: float, start: float = 0.0, end: float = 1.0) -> Callable[[float], None]:
    """A function that is called with each part of `total` that is done, as of a step from `start` to `end`."""
    listener, done = _listener.get(), 0.0

    def report(part: float) -> None:
        nonlocal done
        done += part
        if listener is not None:
            listener(start + (end - start) * min(1.0, done / total))

    return report


def each(items: Collection[T], start: float = 0.0, end: float = 1.0) -> Iterator[T]:
    """The items, of a loop that takes a step from `start` to `end`."""
    report = advance(len(items), start, end)
    for item in items:
        yield item
        report(1)
