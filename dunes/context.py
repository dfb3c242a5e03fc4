"""Set a context variable inside a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside the `with` block, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
