"""Context managers: other values of variables and attributes, and messages that say where an error is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside the `with` block, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the `with` block, an attribute of an object or module has another value."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)


@contextmanager
def prefix_errors(
    prefix: object,
    errors: type[Exception] | tuple[type[Exception], ...] = ValueError,
    end: str = "",
    describe: Callable[[Exception], str] = str,
) -> Iterator[None]:
    """Inside the `with` block, these errors become a ValueError, whose message is the prefix, then
    `describe(error)` and `end`."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{prefix}: {describe(error)}{end}") from None
