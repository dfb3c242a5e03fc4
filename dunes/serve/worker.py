"""A worker runs the models in its own thread. Other threads send requests, each with a function that receives the
answers.

Models are not called concurrently, since each call changes the model's caches. Requests for lines have priority:
they run between two tokens of generated texts.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dunes import measure
from dunes.completion import Cancelled
from dunes.serve.fields import Refused
from dunes.serve.follow import Follower
from dunes.serve.requests import Event, LineRequest, Named, Request
from dunes.serve.served_model import ServedModel

QUEUE = 64
"""Maximum number of waiting requests."""
STACK = 16 << 20
"""Stack size of the worker's thread in bytes; compiled decoding needs 2 MiB."""
T = TypeVar("T")


@dataclass(eq=False)
class Task:
    """A request to a model. The worker's thread calls `emit` with each `Event`: parts of the answer, complete
    answers or an error. After the task is cancelled, `emit` is not called."""

    request: Request
    emit: Callable[[Event], None]

    def __post_init__(self) -> None:
        cancelled = threading.Event()
        self.cancel, self.is_cancelled = cancelled.set, cancelled.is_set


class Worker:
    """Completes lines and generates texts with all models in one thread; for each model, another thread watches
    its files.

    Raises ValueError for a model folder that cannot be used for completion.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        acceptance: float,
        adapters: Sequence[Path] = (),
        say: Callable[[str], object] = print,
        follows: bool = True,
    ) -> None:
        if adapters and len(folders) > 1:
            raise ValueError("--adapter needs a single model; pass one MODEL")
        names = [folder.resolve().name for folder in folders]
        if duplicates := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"two models are named {duplicates[0]!r}; rename one of the folders")
        measure.keep_freed_memory()
        self.models, self._followers = dict[str, ServedModel](), list[Follower]()
        self._lines, self._texts = deque[Task](), deque[Task]()
        self._calls = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._wake, self._is_closed = threading.Condition(), False
        before = threading.stack_size(STACK)
        self._thread = threading.Thread(target=self._run, name="dunes-model", daemon=True)
        self._thread.start()
        threading.stack_size(before)
        context, request = copy_context(), LineRequest("def main(\nmai", max_tokens=4)
        try:
            for folder, name in zip(folders, names, strict=True):
                # The context carries the trust settings.
                load = partial(context.run, ServedModel, folder, name, acceptance, adapters, say)
                self.models = self.models | {name: self.call(load).result()}
        except BaseException:
            self.close()
            raise
        for model in self.models.values():
            # The first line takes longer than later lines, so a first line is completed here.
            self.call(partial(model.lines, request, lambda: False)).exception()
            if follows:
                self._followers.append(Follower(model, self.call, say))
                self._followers[-1].start()
        self.call(measure.return_freed_memory)

    def facts_by_name(self, name: str, is_exact: bool = False) -> Named:
        """Pairs (name, facts) for the model or adapter with this name, or for all models and adapters if the name
        is empty."""
        models = [self.find(name, is_exact)] if name or is_exact else self.models.values()
        entries = [(entry, model.current.facts) for model in models for entry in model.names]
        return [entry for entry in entries if entry[0] == name] or entries

    def find(self, name: str, is_exact: bool = False) -> ServedModel:
        """The model with this name, or with an adapter of this name. Raises Refused for an unknown name.

        Unless `is_exact` is true, an empty name selects the first model, and if there is only one model, any name
        selects it.
        """
        for model in self.models.values():
            if name in model.names or (not is_exact and (not name or len(self.models) == 1)):
                return model
        listed = ", ".join(n for model in self.models.values() for n in model.names)
        raise Refused(404, f"model '{name[:80]}' not found; this server has {listed}")

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

    def take_in(self, path: str, text: str | None) -> None:
        """All models then copy from this text of an open file when they complete lines in other files."""
        for model in self.models.values():
            model.take_in(self.call, {model.name_of(path): text})

    def close(self) -> None:
        """End the threads; the worker's thread first completes its current call, line or token."""
        for follower in self._followers:
            follower.close()
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
        return sum(model.advance() for model in self.models.values()) > 0  # each goes on

    def _must_wait(self, task: Task) -> bool:
        """True if the batch of the text's model is full."""
        with suppress(Refused):  # a text for an unknown model is refused later
            return self.find(task.request.model).is_full
        return False

    def _work_on(self, task: Task) -> None:
        """Complete a line, or start generating a text. If this fails, the error is emitted."""
        request = task.request
        try:
            if task.is_cancelled():
                return
            model = self.find(request.model)
            if isinstance(request, LineRequest):
                task.emit(model.lines(request, task.is_cancelled))
            else:
                model.add(request, task.emit, task.is_cancelled)
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, Refused):
                with suppress(OSError, ValueError):  # standard error may be closed
                    traceback.print_exception(error)
            task.emit(error)
