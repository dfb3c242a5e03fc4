"""What follows the user's work: saved files enter the index, and a run's model is loaded when it is there.

No editor needs to say anything. The files of the training's sources are looked at every second: their times and
sizes, and the times of their folders, which change when a file comes or goes.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from dunes.data.document import header_name, plain_document
from dunes.data.files import SourceFile, Walk
from dunes.runs.completion.completer import training_sources
from dunes.runs.completion.index import MOST, named_texts
from dunes.serve.served import ServedModel, model_stamp
from dunes.serve.worker import Worker

PERIOD = 1.0
"""Seconds between two looks at the files."""
LARGE = 400_000
"""Bytes of a file from which on it is not followed."""
Stamp = tuple[int, int]


class Follower(threading.Thread):
    """Keeps a served model in step with its folder and with the files of its training's sources."""

    def __init__(self, model: ServedModel, worker: Worker) -> None:
        super().__init__(name="dunes-follow", daemon=True)
        self.model, self.worker = model, worker
        self._sources, self._follow_links = training_sources(model.folder)
        self._known: dict[Path, Stamp] = {}
        self._folders: dict[Path, int] = {}
        self._names: dict[Path, str] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        """Look at the files until it is closed."""
        index = self.model.folder / "completion" / "index.safetensors"
        self._take_in(self._changes(index.stat().st_mtime_ns if index.exists() else 0))
        while not self._ended.wait(PERIOD):
            self.look()

    def look(self) -> None:
        """Take in what has changed since the last look."""
        if model_stamp(self.model.folder) != self.model.stamp:
            self.worker.call(self.model.load).exception()
        self._take_in(self._changes())

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _take_in(self, texts: Mapping[str, str | None]) -> None:
        if texts:
            indexed = self.model.with_texts(texts)
            self.worker.call(lambda: self.model.use(indexed))

    def _changes(self, since: int | None = None) -> dict[str, str | None]:
        """The names and texts of files that have changed since the last look; None for those that are gone.

        With `since` (ns), those that have changed since then, or that the index does not have.
        """
        if since is not None or any(_folder_time(path) != time for path, time in self._folders.items()):
            self._walk()
        texts: dict[str, str | None] = {}
        for path, name in [*self._names.items()]:
            stamp = _stamp(path)
            if stamp == self._known.get(path):
                continue
            first = path not in self._known
            self._known[path] = stamp or (0, 0)
            if since is not None and first and stamp and stamp[0] <= since and name in self.model.files.names:
                continue
            texts[name] = _read(path, name) if stamp else None
            if not stamp:
                del self._names[path], self._known[path]
        size = 0
        for name in [*texts]:
            size += len(texts[name] or "")
            if size > MOST // 4:  # what is left of it is in the next training
                del texts[name]
        return texts

    def _walk(self) -> None:
        """Find the files of the sources, and their folders."""
        if not self._sources:
            return
        found = [file for file in Walk(self._sources, self._follow_links).files() if not file.path.is_symlink()]
        self._names |= {file.path: header_name(file.name) for file in found}
        self._folders = {path: _folder_time(path) for path in {file.path.parent for file in found}}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _folder_time(path: Path) -> int:
    return (_stamp(path) or (0, 0))[0]


def _read(path: Path, name: str) -> str | None:
    """The text of a file that training would read; None for others."""
    stamp = _stamp(path)
    document = plain_document(SourceFile(path, name, False)) if stamp and stamp[1] <= LARGE else "large"
    if isinstance(document, str):
        return None
    try:
        return named_texts([document])[0][1]
    except ValueError:  # it was written meanwhile; the next look has it
        return None
