"""The interface of an HTTP protocol: its paths, its errors, and the requests of its clients."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dunes.serve.fields import Fields, Refused
from dunes.serve.requests import Answers, Asked, Named


class Endpoint(NamedTuple):
    """The functions that read a path's requests and write its replies. `read` reads a body. `write` returns the
    reply with all answers; in a stream, `write` returns an object for a part or the end of an answer. `end`
    returns the objects that follow the answers of a stream."""

    read: Callable[[Fields], Asked]
    write: Callable[[Asked, Answers, bool], Any]
    form: str = "sse"
    """Format of a stream: sse (ends with `data: [DONE]`), sse-bare (server-sent events without this end) or
    ndjson."""
    end: Callable[[Asked, Answers], Sequence[Any]] = lambda request, answers: ()


class Check(NamedTuple):
    """A client's request. `shown` returns the text that the client shows for a reply, or raises ValueError."""

    client: str
    path: str
    body: Mapping[str, Any] | None
    shown: Callable[[bytes], str]


class Protocol(NamedTuple):
    """A protocol: paths with their endpoints, and paths that describe the models.

    `checks(before, after, model)` returns the clients' requests at the cursor between two texts; `dunes doctor`
    sends these requests. `write_error` returns the body of a reply with an error, also for unknown paths that
    start with `prefix`.
    """

    name: str
    endpoints: Mapping[str, Endpoint]
    checks: Callable[[str, str, str], list[Check]] = lambda before, after, model: []
    descriptions: Mapping[str, Callable[[Named], Any]] = MappingProxyType({})
    prefix: str = ""
    write_error: Callable[[Refused], Any] = lambda refused: {"error": refused.content}
