"""Files that were hashed before: one that has not changed since is not hashed again.

A note under $DUNES_HOME says how a file looked when it was found right: its size, its times, its number in the
file system, and the digest that was expected. The second of its times is the system's own, which nobody sets.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from dunes.checkpoint import atomic
from dunes.data.shards import default_cache


class Seen:
    """What one note, a JSON file, holds; without one that can be read, nothing."""

    def __init__(self, note: Path | None) -> None:
        self.note = note
        try:
            found = json.loads(note.read_bytes()) if note else {}
        except (OSError, ValueError, RecursionError):
            found = {}
        self.earlier = found if isinstance(found, dict) else {}
        self.right = {path: seen for path, seen in self.earlier.items() if Path(path).exists()}

    def wrong(self, path: Path, digest: str | None, check: Callable[[], str | None]) -> str | None:
        """What `check` says against a file; nothing, unasked, if it was right before and has not changed since."""
        real, look = str(path.resolve()), _look(path, digest)  # before it is read: a later change shows
        if self.right.get(real) == look:
            return None
        if (found := check()) is None:
            self.right[real] = look
        return found

    def keep(self) -> None:
        """Write the note. Where that cannot be, nothing is lost but the time to hash again."""
        if self.note is None or self.right == self.earlier:
            return
        with suppress(OSError):
            self.note.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_file(self.note, json.dumps(self.right, indent=1).encode())


def note_of(folder: Path) -> Path | None:
    """Where it is noted what was right in a folder; nowhere for a user without a home."""
    try:
        home = default_cache().parent
    except RuntimeError:
        return None
    return home / "seen" / f"{sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def _look(path: Path, digest: str | None) -> str:
    """What is another when the file is, or what is expected of it."""
    seen = path.stat()
    return f"{seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} {seen.st_ino} {digest}"
