"""The HTTP server: sockets, deadlines, shutdown."""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dunes.serve.app import RECEIPT

CONNECTIONS = 512
"""Maximum concurrent connections."""
ENDING = 30
"""Maximum seconds for open streams to end when the server stops."""


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for requests. Without a deadline, a client could send single bytes forever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request."""
        super().connection_made(transport)
        self._expect(True)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; the deadline applies until the request is complete."""
        super().data_received(data)
        state = self.conn.their_state
        is_partial = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        self._expect(is_partial and self.transport.get_protocol() is self)  # WebSockets have their own protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline of a closed connection."""
        self._expect(False)
        super().connection_lost(exc)

    def _expect(self, is_receiving: bool) -> None:
        if not is_receiving and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_receiving and self._deadline is None:
            self._deadline = self.loop.call_later(RECEIPT, self.transport.abort)


def open_sockets(host: str, ports: Sequence[int]) -> list[socket.socket]:
    """Sockets that listen on these ports, at all of the host's addresses that belong to this machine.

    Raises ValueError if a port is in use, or if the host is unknown.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        for port in ports:
            _listen([*dict.fromkeys((family, address) for family, *_, address in found)], port, sockets)
    except (OSError, OverflowError, ValueError) as error:
        for listener in sockets:
            listener.close()
        remedy = "pass another --port (for 11434: leave out --ollama), or end the program that listens there"
        if isinstance(error, ValueError | socket.gaierror):
            remedy = "name an address of this machine"
        raise ValueError(f"--host {host}: {str(error.args[-1]).lower()}; {remedy}") from None
    return sockets


def _listen(addresses: Sequence[tuple[int, Any]], port: int, sockets: list[socket.socket]) -> None:
    """Append a listening socket for each address to `sockets`. If `port` is 0, all new sockets use the same free
    port. Raises OSError."""
    count, missing = len(sockets), OSError("the host has no address")
    for family, (name, _, *scope) in addresses:
        dual = family == socket.AF_INET6 and len(addresses) == 1  # a single `::` also accepts IPv4
        try:
            sockets.append(socket.create_server((name, port, *scope), family=family, dualstack_ipv6=dual))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            missing = error
            continue
        sockets[-1].setblocking(False)
        # Connections inherit TCP_NODELAY. Otherwise, a reply's body waits 40 ms until its header is acknowledged.
        sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = sockets[-1].getsockname()[1]
    if len(sockets) == count:
        raise missing


def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach the address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def run(app: ASGIApp, sockets: Sequence[socket.socket], ready: Callable[[], object], pages: bool = False) -> None:
    """Serve the application until SIGINT, SIGTERM or SIGHUP; calls `ready` once clients can connect.

    An application with `pages` of NiceGUI also has a lifespan and WebSockets.
    """
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    options |= {"lifespan": "on", "ws": "websockets-sansio"} if pages else {"lifespan": "off", "ws": "none"}
    options |= {"http": DeadlineProtocol, "timeout_keep_alive": 75}
    options |= {"limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": ENDING}
    asyncio.run(_serve(uvicorn.Server(uvicorn.Config(app, **options)), [*sockets], ready))


async def _serve(server: uvicorn.Server, sockets: list[socket.socket], ready: Callable[[], object]) -> None:
    def stop() -> None:
        server.force_exit = server.should_exit  # a second signal ends the server at once
        server.should_exit = True

    hangup = [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)  # nohup ignores SIGHUP
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    # uvicorn would let the signal end the process, without an exit status.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    ready()  # clients can connect, since the sockets listen
    await server.serve(sockets)
