"""Follow the user's work: saved files enter the index, and a run's model is loaded when it is complete.

Editors need not send anything. Every second, times and sizes of the training source files are checked, and the
times of their folders, which change when a file is added or deleted.
"""

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path

from dunes.completion.completer import training_sources
from dunes.completion.index import MOST, named_texts
from dunes.data.document import header_name, plain_document
from dunes.data.files import SourceFile, Walk
from dunes.serve.served import ServedModel, file_time, model_stamp
from dunes.serve.worker import Worker

PERIOD = 1.0
"""Seconds between two checks of the files."""
PATIENCE = 60.0
"""Maximum seconds between two attempts to load a model."""
LARGE = 400_000
"""Bytes of a file above which changes are not followed."""
Stamp = tuple[int, int]


class Follower(threading.Thread):
    """Keeps a served model in step with its folder and its training source files.

    Errors are reported once, and do not end the thread.
    """

    def __init__(self, model: ServedModel, worker: Worker, say: Callable[[str], object]) -> None:
        # The copied context carries the trust settings.
        super().__init__(target=partial(copy_context().run, self._run), name="dunes-follow", daemon=True)
        self.model, self.worker, self._say, self._said = model, worker, say, ""
        self._known: dict[Path, Stamp] = {}
        self._folders: dict[Path, int] = {}
        self._files: dict[Path, str] = {}
        self._wait, self._left, self._failed, self._follow_links = PERIOD, 0.0, "", False
        self._ended = threading.Event()

    def _run(self) -> None:
        """Check the files until the thread is closed."""
        self._guarded(self._begin)
        while not self._ended.wait(PERIOD):
            self._guarded(self.look)

    def look(self) -> None:
        """Update the model with all changes since the last check."""
        self._load_again()
        if not self._folders or any(file_time(path) != time for path, time in self._folders.items()):
            self._walk()
        self._take_in([path for path in self._files if self._stamp(path) != self._known.get(path)])

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
            self._said = ""
        except Exception as error:
            self._folders = {}  # everything is checked again
            self._said = self._say_once(error, self._said)

    def _say_once(self, error: Exception, said: str) -> str:
        message = f"{self.model.name}: {' '.join(str(error).split())}"
        if message != said:
            with suppress(OSError, ValueError):  # nobody may read it
                self._say(message)
        return message

    def _begin(self) -> None:
        """Update the model with files that differ from its index: changed, added or deleted since training."""
        self._folders, self._known, self._files = {}, {}, {}
        self._walk()
        indexed = dict(self.model.now.completer.training_files)
        for path, name in self._files.items():
            found = self._stamp(path)
            if found and name in indexed and (found[1] > LARGE or _read(path, name) == indexed[name]):
                self._known[path] = found
        if self._files and (gone := {*filter(None, indexed)} - {*self._files.values()}):
            self.model.take_in(self.worker, dict.fromkeys(gone))
        self._take_in([path for path in self._files if path not in self._known])

    def _load_again(self) -> None:
        """Load the model again if its folder has changed; report a failure once, and try again later."""
        self._left -= PERIOD
        if model_stamp(self.model.folder) == self.model.now.stamp or self._left > 0:
            return
        self._left, self._wait = self._wait, min(2 * self._wait, PATIENCE)
        try:
            self.worker.call(self.model.reload).result()
        except Exception as error:
            self._failed = self._say_once(error, self._failed)
        else:
            self._left, self._wait, self._failed = 0.0, PERIOD, ""
            self._begin()

    def _walk(self) -> None:
        """Find the files of the sources, and their folders; deleted files leave the index."""
        sources, self._follow_links = training_sources(self.model.folder)
        if not sources:
            self._folders = {self.model.folder: file_time(self.model.folder)}
            return
        walk = Walk(sources, self._follow_links)
        files = {file.path: header_name(file.name) for file in walk.files() if self._stamp(file.path)}
        gone = {*self._files.values()} - {*files.values()}
        self._files, self._folders = files, walk.folders
        self._known = {path: stamp for path, stamp in self._known.items() if path in files}
        if gone:
            self.model.take_in(self.worker, dict.fromkeys(gone))

    def _stamp(self, path: Path) -> Stamp | None:
        """Modification time (ns) and size of a regular file; None for others, such as a link not followed."""
        try:
            status = os.stat(path, follow_symlinks=self._follow_links)
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def _take_in(self, paths: list[Path]) -> None:
        """Update the model with these files, in order, as long as their text fits."""
        texts, read, room = dict[str, str | None](), dict[Path, Stamp](), MOST // 4
        for path in paths:
            found, name = self._stamp(path), self._files[path]
            if found is None or LARGE >= found[1] > room:
                continue  # the next walk finds that it is gone, or the next check has room
            read[path] = found
            if found[1] <= LARGE:  # a larger file keeps its text in the index
                text = _read(path, name)
                if text is not None or name in self.model.now.files.names:
                    texts[name] = text
                    room -= len(text or "")
        if texts:
            self.model.take_in(self.worker, texts)
        self._known |= read


def _read(path: Path, name: str) -> str | None:
    """The text of a file that training would read; None for others."""
    document = plain_document(SourceFile(path, name, False))
    if isinstance(document, str):
        return None
    try:
        return named_texts([document])[0][1]
    except ValueError:  # written meanwhile; the next check reads it
        return None
