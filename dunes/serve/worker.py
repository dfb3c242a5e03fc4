"""One thread owns the models: other threads send it requests, and it answers them by calling a function.

An engine's caches change with each call, so concurrent calls would give wrong answers. Lines have priority: they
are completed between two tokens of generated texts.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dunes.completion import Cancelled
from dunes.serve.fields import Refused
from dunes.serve.requests import Event, LineRequest, Request

if TYPE_CHECKING:
    from dunes.serve.running import Running

QUEUE = 64
"""Maximum number of waiting requests."""
STACK = 16 << 20
"""Bytes of the thread's stack, of which compiled steps need 2 MiB."""
T = TypeVar("T")


@dataclass(eq=False)
class Task:
    """A request to a model. The worker's thread calls `emit` with the parts and the answer, or with an error, but
    not after the task is cancelled."""

    request: Request
    emit: Callable[[Event], None]

    def __post_init__(self) -> None:
        cancelled = threading.Event()
        self.cancel, self.is_cancelled = cancelled.set, cancelled.is_set


class Worker:
    """Completes lines and generates texts with models, in its own thread."""

    def __init__(self, models: "Running") -> None:
        self._models = models
        self._lines, self._texts = deque[Task](), deque[Task]()
        self._calls = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._wake, self._is_closed = threading.Condition(), False
        before = threading.stack_size(STACK)
        self._thread = threading.Thread(target=self._run, name="dunes-model", daemon=True)
        self._thread.start()
        threading.stack_size(before)

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Task:
        """Queue a request. Raises Refused if too many requests wait, or if the worker is closed."""
        task = Task(request, emit)
        with self._wake:
            if self._is_closed:
                raise Refused(503, "the server is shutting down", retry=1)
            if sum(not waiting.is_cancelled() for waiting in (*self._lines, *self._texts)) >= QUEUE:
                raise Refused(503, f"{QUEUE} requests are waiting", retry=1)
            (self._lines if isinstance(request, LineRequest) else self._texts).append(task)
            self._wake.notify()
        return task

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run a function in the worker's thread, between two requests; closing the worker cancels the future."""
        result: Future[T] = Future()
        with self._wake:
            if self._is_closed:
                result.cancel()
            else:
                self._calls.append((work, result))
                self._wake.notify()
        return result

    def close(self) -> None:
        """End the thread after the current call, line or token."""
        with self._wake:
            self._is_closed = True
            for _, result in self._calls:
                result.cancel()
            self._wake.notify()
        self._thread.join(5)

    def _run(self) -> None:
        import torch

        torch.set_num_threads(1)  # for single tokens, more threads only wait for each other
        while not self._is_closed:
            if not self._do_next():
                with self._wake:
                    self._wake.wait_for(lambda: self._is_closed or self._calls or self._lines or self._texts)

    def _do_next(self) -> bool:
        """Do one piece of work; False if no work is waiting."""
        if self._lines:
            self._work_on(self._lines.popleft())
            return True
        if self._calls:
            work, result = self._calls.popleft()
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except Exception as error:
                    result.set_exception(error)
            return True
        with self._wake:
            self._texts = deque(task for task in self._texts if not task.is_cancelled())
        while self._texts and not self._must_wait(self._texts[0]):
            self._work_on(self._texts.popleft())
        return sum(model.advance() for model in self._models.served.values()) > 0  # each goes on

    def _must_wait(self, task: Task) -> bool:
        """True if a text has to wait until its model has room for it."""
        with suppress(Refused):  # an unknown model, refused when the text starts
            return self._models.find(task.request.model).is_full
        return False

    def _work_on(self, task: Task) -> None:
        """Complete a line, or start generating a text; an error is emitted, and does not end the thread."""
        request = task.request
        try:
            if task.is_cancelled():
                return
            model = self._models.find(request.model)
            if isinstance(request, LineRequest):
                task.emit(model.lines(request, task.is_cancelled))
            else:
                model.add(request, task.emit, task.is_cancelled)
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, Refused):
                with suppress(OSError, ValueError):  # nobody may read it
                    traceback.print_exception(error)
            task.emit(error)
