"""A running server of this user, asked for a line without loading a model.

It also listens at a socket in the user's own folder, which no other user can reach or replace.
"""

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dunes.files.staging import cache_home

TIMEOUT = 10.0
"""Seconds after which a server is not waited for any longer."""


class _SocketConnection(http.client.HTTPConnection):
    """A connection to a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = str(path)

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


def exchange(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, key: str = ""
) -> tuple[int, bytes]:
    """The status and the bytes of a reply on a connection of its own; without a body, it is a GET."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request("GET" if data is None else "POST", path, data, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def complete_by_server(folder: Path, before: str, after: str, path: Path | None) -> str | None:
    """The rest of a line by a running server of this folder; None if there is none."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    body = {"before": before, "after": after, "path": str(path.absolute()) if path else ""}
    with suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        body["model"] = folder.resolve().name
        status, data = exchange(_SocketConnection(socket_file(folder)), "/suggest", body)
        if status == 200:
            return str(json.loads(data)["suggestions"][0]["text"])
    return None


def listen(folder: Path) -> socket.socket | None:
    """A listening socket for a folder's server; None where there can be none, as for another user's folder, or if
    another server has it."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    opened = socket.socket(socket.AF_UNIX)
    with suppress(OSError, ValueError):
        file = socket_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = file.parent.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077 and not _answers(file):
            file.unlink(missing_ok=True)
            opened.bind(str(file))
            opened.listen(16)
            opened.setblocking(False)
            return opened
    opened.close()
    return None


@contextmanager
def listening(folders: Sequence[Path]) -> Iterator[list[socket.socket]]:
    """Listening sockets for the servers of these folders, where there can be one; their files are removed."""
    opened = {socket_file(folder): each for folder in folders if (each := listen(folder)) is not None}
    bound = {file: file.stat().st_mtime_ns for file in opened}
    try:
        yield [*opened.values()]
    finally:
        for file, time in bound.items():
            with suppress(OSError):  # it may be a later server's by now
                if file.stat().st_mtime_ns == time:
                    file.unlink()


def _answers(file: Path) -> bool:
    """True if a server listens at the socket."""
    with socket.socket(socket.AF_UNIX) as opened, suppress(OSError):
        opened.connect(str(file))
        return True
    return False


def socket_file(folder: Path) -> Path:
    """The socket of a folder's server."""
    digest = blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8)
    return cache_home() / "servers" / digest.hexdigest()
