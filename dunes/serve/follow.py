"""Index source files when the user saves them, and load a run's model when it has been written.

Editors need not report saved files. Every second, a thread checks the times and sizes of the training source
files. The thread also checks the modification times of their folders, which change when a file is added or
deleted.
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
from dunes.serve.served_model import Call, ServedModel, file_time

PERIOD = 1.0
"""Seconds between two checks of the files."""
PATIENCE = 60.0
"""Maximum seconds between two attempts to load a model."""
LARGE = 400_000
"""Maximum size in bytes of a file whose changes are followed."""
Stamp = tuple[int, int]


class Follower(threading.Thread):
    """Reloads a served model when its folder changes, and indexes its training source files when they change.

    An error does not end the thread; an error that repeats is reported once.
    """

    def __init__(self, model: ServedModel, call: Call, say: Callable[[str], object]) -> None:
        # The copied context carries the trust settings.
        super().__init__(target=partial(copy_context().run, self._run), name="dunes-follow", daemon=True)
        self.model, self._call, self._say, self._last_message = model, call, say, ""
        self._stamps: dict[Path, Stamp] = {}
        self._folders: dict[Path, int] = {}
        self._files: dict[Path, str] = {}
        self._wait, self._seconds_left, self._load_error, self._follow_links = PERIOD, 0.0, "", False
        self._stop_event = threading.Event()

    def _run(self) -> None:
        """Check the files until the thread is closed."""
        self._try(self._begin)
        while not self._stop_event.wait(PERIOD):
            self._try(self.look)

    def look(self) -> None:
        """Reload an outdated model, and index all files that changed since the last check."""
        self._load_again()
        if not self._folders or any(file_time(path) != time for path, time in self._folders.items()):
            self._walk()
        self._take_in([path for path in self._files if self._stamp(path) != self._stamps.get(path)])

    def close(self) -> None:
        """End the thread."""
        self._stop_event.set()

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
            self._last_message = ""
        except Exception as error:
            self._folders = {}  # the next check lists all files again
            self._last_message = self._say_once(error, self._last_message)

    def _say_once(self, error: Exception, last_message: str) -> str:
        message = f"{self.model.name}: {' '.join(str(error).split())}"
        if message != last_message:
            with suppress(OSError, ValueError):  # standard error may be closed
                self._say(message)
        return message

    def _begin(self) -> None:
        """Index all files that were changed or added since training, and remove deleted files from the index."""
        self._folders, self._stamps, self._files = {}, {}, {}
        self._walk()
        indexed = dict(self.model.current.completer.training_files)
        for path, name in self._files.items():
            stamp = self._stamp(path)
            if stamp and name in indexed and (stamp[1] > LARGE or _read(path, name) == indexed[name]):
                self._stamps[path] = stamp
        if self._files and (deleted := {*filter(None, indexed)} - {*self._files.values()}):
            self.model.take_in(self._call, dict.fromkeys(deleted))
        self._take_in([path for path in self._files if path not in self._stamps])

    def _load_again(self) -> None:
        """Reload the model if it is outdated. After a failure, report it once, and try again later."""
        self._seconds_left -= PERIOD
        if not self.model.is_outdated or self._seconds_left > 0:
            return
        self._seconds_left, self._wait = self._wait, min(2 * self._wait, PATIENCE)
        try:
            self._call(self.model.reload).result()
        except Exception as error:
            self._load_error = self._say_once(error, self._load_error)
        else:
            self._seconds_left, self._wait, self._load_error = 0.0, PERIOD, ""
            self._begin()

    def _walk(self) -> None:
        """List the files and folders of the sources; remove deleted files from the index."""
        sources, self._follow_links = training_sources(self.model.folder)
        if not sources:
            self._folders = {self.model.folder: file_time(self.model.folder)}
            return
        walk = Walk(sources, self._follow_links)
        files = {file.path: header_name(file.name) for file in walk.files() if self._stamp(file.path)}
        deleted = {*self._files.values()} - {*files.values()}
        self._files, self._folders = files, walk.folders
        self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in files}
        if deleted:
            self.model.take_in(self._call, dict.fromkeys(deleted))

    def _stamp(self, path: Path) -> Stamp | None:
        """Modification time (ns) and size of a regular file; None for other paths, such as unfollowed links."""
        try:
            status = os.stat(path, follow_symlinks=self._follow_links)
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def _take_in(self, paths: list[Path]) -> None:
        """Index these files, in order, up to a total of `MOST // 4` bytes."""
        texts, stamps, room = dict[str, str | None](), dict[Path, Stamp](), MOST // 4
        for path in paths:
            stamp, name = self._stamp(path), self._files[path]
            if stamp is None or LARGE >= stamp[1] > room:
                continue  # the next walk removes deleted files; a later check reads files that do not fit now
            stamps[path] = stamp
            if stamp[1] <= LARGE:  # for a larger file, the index keeps the old text
                text = _read(path, name)
                if text is not None or name in self.model.current.files.names:
                    texts[name] = text
                    room -= len(text or "")
        if texts:
            self.model.take_in(self._call, texts)
        self._stamps |= stamps


def _read(path: Path, name: str) -> str | None:
    """The text of a file; None for a file that training would not read."""
    document = plain_document(SourceFile(path, name, False))
    if isinstance(document, str):
        return None
    with suppress(ValueError):  # an incomplete file is read in the next check
        return named_texts([document])[0][1]
    return None
