"""Send requests to a server of the same user, so that this process loads no model.

For these requests, the server listens on a Unix socket in the user's cache folder, which no other user can reach
or replace.
"""

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dunes.files.atomic import cache_home

TIMEOUT = 10.0
"""Timeout of a request in seconds."""
AGENT = "dunes"
"""User-Agent that distinguishes requests by this package from requests by editors."""
RECENT = "/recent"
"""Path that returns the editors' last requests, for `dunes doctor`."""


class SocketConnection(http.client.HTTPConnection):
    """An HTTP connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


def exchange(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, key: str = ""
) -> tuple[int, bytes]:
    """Send a request, close the connection, and return the reply's status and bytes. Without a body, the method is
    GET, else POST."""
    headers = {"Content-Type": "application/json", "User-Agent": AGENT}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    with closing(connection):
        connection.request("GET" if data is None else "POST", path, data, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def complete_by_server(folder: Path, before: str, after: str, path: Path | None) -> dict[str, Any] | None:
    """The best suggestion of the folder's running server, as a dict with `text`; None if no server answers."""
    body = {"before": before, "after": after, "path": str(path.absolute()) if path else ""}
    with suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        body["model"] = folder.resolve().name
        status, data = exchange(SocketConnection(socket_file(folder)), "/suggest", body)
        if status == 200:
            suggestion: dict[str, Any] = json.loads(data)["suggestions"][0]
            return suggestion | {"text": str(suggestion["text"])}
    return None


def listen(folder: Path) -> socket.socket | None:
    """A listening socket for a folder's server. None if another server uses the socket, or if the socket cannot be
    created, as in another user's folder."""
    listener = socket.socket(socket.AF_UNIX)
    with suppress(OSError, ValueError):
        file = socket_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = file.parent.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077 and not _is_served(file):
            file.unlink(missing_ok=True)
            listener.bind(str(file))
            listener.listen(16)
            listener.setblocking(False)
            return listener
    listener.close()
    return None


@contextmanager
def listening(folders: Sequence[Path]) -> Iterator[list[socket.socket]]:
    """Inside the `with` block, listen on a socket for each folder if possible; at the end, remove the sockets'
    files."""
    listeners = {socket_file(folder): listener for folder in folders if (listener := listen(folder)) is not None}
    try:
        yield [*listeners.values()]
    finally:
        for file in listeners:
            file.unlink(missing_ok=True)


def _is_served(file: Path) -> bool:
    """True if a server listens on the socket."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(file))
        return True
    return False


def socket_file(folder: Path) -> Path:
    """The path of the socket of a folder's server."""
    digest = blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8)
    return cache_home() / "servers" / digest.hexdigest()
