"""Send a server the requests of each editor, and report the text that the editor would show, or the problem."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dunes.serve.client import RECENT, TIMEOUT, SocketConnection, exchange, socket_file
from dunes.serve.protocols import PROTOCOLS
from dunes.units import format_seconds

BEFORE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return "
AFTER = "\n\n\nprint(volume(1, 2, 3))\n"


KEPT = (
    "llama.vim keeps the old reply until `:let g:cache_data = {} | let g:cache_lru_order = []` or the end of Vim, "
    "and llama-vscode until its window is loaded again"
)


class Line(NamedTuple):
    """A line of the report on the server or a client; `problem` is empty if all works."""

    client: str
    text: str
    problem: str


def ask(address: str, path: str, body: Mapping[str, Any] | None = None, key: str = "") -> tuple[int, bytes]:
    """Send a request, and return the reply's status and bytes. Raises OSError if no server listens, and ValueError
    for an invalid address."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address}: expected an address such as http://127.0.0.1:8012")
    connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        return exchange(connection(parts.hostname, parts.port, timeout=TIMEOUT), path, body, key)
    except http.client.HTTPException as error:
        raise ValueError(f"{address}{path}: no HTTP reply ({type(error).__name__})") from None


def examine(address: str, key: str = "", before: str = BEFORE, after: str = AFTER) -> Iterator[Line]:
    """Yield a report on the server itself, then on remembered requests of editors, then on test requests of each
    client.

    Raises ValueError if no server answers.
    """
    try:
        status, data = ask(address, "/health", key=key)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ValueError(
            f"{address}: no server answers ({reason.lower()}); pass its port, or start one: dunes serve RUN"
        ) from None
    if status != 200:
        yield Line("server", "", f"status {status}: {_message(data)}{'; set DUNES_API_KEY' * (status == 401)}")
        if status in (401, 403):
            return
    _, data = ask(address, "/v1/models", key=key)
    try:
        names = [model["id"] for model in json.loads(data)["data"]]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{address}: the reply to /v1/models is not from a model server") from None
    recent = _recent(address, key)
    notes = "".join(f"; {name}: {note}" for name, note in recent.get("notes", {}).items() if note)
    yield Line("server", f"serves {', '.join(names)}{notes}", "" if names else "it has no model")
    yield from map(_replayed, recent.get("places", ()))
    model = names[0] if names else ""
    for check in [check for protocol in PROTOCOLS for check in protocol.checks(before, after, model)]:
        start = perf_counter()
        status, data = ask(address, check.path, check.body, key)
        milliseconds = 1e3 * (perf_counter() - start)
        try:
            text = check.shown(data) if status == 200 else ""
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            yield Line(check.client, "", str(error) or type(error).__name__)
            continue
        result = f"shows {text!r}" if text else "shows nothing: none is probable enough (serve --acceptance 0)"
        problem = "" if status == 200 else f"status {status}: {_message(data)}"
        yield Line(check.client, f"{result} after {milliseconds:.0f} ms", problem)


def _recent(address: str, key: str) -> dict[str, Any]:
    """The last requests of editors that the server remembers; empty if the server refuses this user."""
    with suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        if key:
            status, data = ask(address, RECENT, key=key)
        else:
            folder = json.loads(ask(address, "/props")[1])["model_path"]
            status, data = exchange(SocketConnection(socket_file(Path(folder))), RECENT, None)
        return dict(json.loads(data)) if status == 200 else {}
    return {}


def _replayed(place: Mapping[str, Any]) -> Line:
    """The report on a position at which an editor requested a suggestion."""
    shown, now = (repr(place[name]) if place[name] else "nothing" for name in ("shown", "now"))
    text = f"shows {now}" if shown == now else f"showed {shown}, and would show {now} now; "
    if shown != now:
        text += KEPT if place["shown"] else "the editor asks again when you type there"
    elif not place["now"]:
        needed = min(1.0, place["threshold"])
        text += f": the best suggestion has probability {place['word']:.0%}, and {needed:.0%} is required"
    where = f"an editor, {format_seconds(round(place['seconds']))} ago, behind {place['line'].lstrip()[-40:]!r}"
    return Line(where, text, "")


def _message(data: bytes) -> str:
    with suppress(ValueError, LookupError, TypeError):
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return data[:100].decode(errors="replace")
