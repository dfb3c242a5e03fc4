"""The HTTP application: paths, their protocols, and the checks that every request must pass."""

import asyncio
import hmac
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dunes.serve.client import AGENT, RECENT
from dunes.serve.fields import BEAMS, BODY, Fields, Refused, parse
from dunes.serve.protocols import DESCRIPTIONS, ENDPOINTS, protocol_of
from dunes.serve.protocols.protocol import Endpoint
from dunes.serve.requests import Answer, Answers, Asked, Event, LineRequest, Named, TextRequest
from dunes.serve.worker import Task, Worker

RECEIPT = 10.0
"""Maximum seconds for receiving a request."""
SENDING = 30.0
"""Maximum seconds for a client to accept one piece of a reply."""
LISTED = 64
"""Maximum number of ignored fields that a reply lists, and maximum number of characters of each listed name."""
REMEMBERED = 8
"""The server remembers this many of the last requests by editors, at most one per line of text, for `dunes
doctor`."""
LOCAL = ("localhost", "127.0.0.1", "::1")
EMPTY = Answer(reason="length")
"""Empty answer, for a request for zero tokens and for a choice without a suggestion."""


def read_suggest(fields: Fields) -> Asked:
    """Read a request of `dunes complete` or `dunes studio`; its field `tokens` asks for an explanation of the
    first suggestion, and `beams` sets the number of beams."""
    before, after, path = fields.text("before"), fields.text("after"), fields.path("path")
    explains, model = fields.flag("tokens"), fields.text("model")
    beams = fields.integer("beams", 1, 1, BEAMS) if fields.has("beams") else None
    line = LineRequest(
        before, after, path, (), 3 if explains else 1, model=model, shows_all=True, explains=explains, beams=beams
    )
    return Asked(fields, [line])


def write_suggest(request: Asked, answers: Answers, streams: bool) -> Any:
    """The fields of the reply: the suggestions, best first, and the explanation of the first one, if requested."""
    listed = [{"text": a.text, "word": a.word, "line": a.line, "source": a.source} for a in answers.values()]
    return {"suggestions": listed, "milliseconds": 1e3 * answers[0].seconds, **answers[0].explained}


SUGGEST = Endpoint(read_suggest, write_suggest)


def compact(content: Any) -> bytes:
    """A value as JSON on one line without spaces; non-finite numbers become null."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return compact(json.loads(json.dumps(content), parse_constant=lambda name: None))


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON reply on one line without spaces, since llama.vim searches the reply's bytes for `"content":"`."""
    return Response(compact(content), status, headers, "application/json")


def refusal(request: Request, error: Exception) -> Response:
    """The response to a request that ended with an error, in the format of the path's clients."""
    refused = client_error(error)
    content = protocol_of(request.url.path).write_error(refused)
    headers = {"Retry-After": str(refused.retry)} if refused.retry else {}
    return json_response(content, refused.status, headers)


def client_error(error: Exception) -> Refused:
    """The error that a client receives; Starlette's errors (unknown path or method) get status 404."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(404, "File Not Found")
    return Refused(500, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


class Gate:
    """Middleware that refuses requests and WebSockets to foreign host names (DNS rebinding) and from web pages of
    other origins. If a key is set, requests without the key are refused; a browser that opens a page with `?key=`
    gets a cookie in its place, which counts only for this server's own pages. The middleware also ends a reply if
    the client takes more than SENDING seconds for one piece."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], key: str | None) -> None:
        digest = sha256((key or "").encode()).hexdigest()
        # A browser sends the cookies of all servers on this machine to each of them, so each key has its own name.
        self.app, self.key, self.cookie = app, key, (f"dunes_{digest[:8]}", digest[8:])
        self.hosts = {_host_name(host) for host in (*LOCAL, *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The entry point of an ASGI application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), SENDING)

        connection = HTTPConnection(scope)
        try:
            self._check(connection)
            if self.key and scope.get("method") == "GET" and "key" in connection.query_params:
                await self._log_in(connection)(scope, receive, send)
            else:
                await self.app(scope, receive, send_in_time)
        except Refused as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
            else:
                await refusal(Request(scope), error)(scope, receive, send)
        except (TimeoutError, ClientDisconnect):
            return

    def _log_in(self, connection: HTTPConnection) -> Response:
        """An empty page that sets the cookie and then goes to the same address without the key.

        After a redirect, a browser that came from a link in another site's page, as in a terminal in the browser,
        would not send the cookie.
        """
        response = RedirectResponse(connection.url.remove_query_params("key"), 200)
        response.headers.update({"Refresh": f"0; url={response.headers['location']}", "Referrer-Policy": "origin"})
        response.set_cookie(*self.cookie, httponly=True, samesite="strict")
        return response

    def _check(self, connection: HTTPConnection) -> None:
        headers = connection.headers
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.hosts:
            raise Refused(403, f"Host {hosts[:2]} is not this server's; allow it with --allow-host")
        for origin in origins:
            scheme, _, host = origin.partition("://")
            is_own = scheme in ("http", "https") and _host_name(host) in self.hosts
            if not is_own and scheme not in ("vscode-webview", "vscode-file"):
                raise Refused(403, "requests from web pages of other origins are refused")
        if self.key is not None:
            header = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
            given = header.encode("latin-1") or connection.query_params.get("key", "").encode()
            name, value = self.cookie
            is_own_page = all(origin.partition("://")[2] == hosts[0] for origin in origins)
            is_own_page &= headers.get("sec-fetch-site", "none") in ("none", "same-origin")
            cookie = connection.cookies.get(name, "").encode() if is_own_page else b""
            if not (hmac.compare_digest(given, self.key.encode()) or hmac.compare_digest(cookie, value.encode())):
                raise Refused(401, "Invalid API Key; in a browser, open the address that the command printed")


def _host_name(host: str) -> str:
    """The host name in a Host header, in lower case, without port, IPv6 brackets or trailing dot."""
    name, colon, port = host.rpartition(":")
    if colon and (port.isdigit() or not port) and not name.endswith(":"):
        host = name
    return host.lower().rstrip(".").removeprefix("[").removesuffix("]")


class Server:
    """HTTP handlers of all paths, which pass requests to a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._recent = deque[tuple[float, LineRequest, str]](maxlen=REMEMBERED)

    def app(self, hosts: Sequence[str] = (), key: str | None = None) -> ASGIApp:
        """The application; `hosts` are additional host names of this server."""
        routes = [Route(path, partial(self._answer, e), methods=["POST"]) for path, e in ENDPOINTS.items()]
        others: dict[str, Callable[[Request], Any]] = {
            **{path: partial(self._describe, write) for path, write in DESCRIPTIONS.items()},
            "/": _start,
            "/suggest": partial(self._answer, SUGGEST),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            RECENT: partial(self._replay, key),
        }
        routes += [Route(path, handler, methods=["GET", "POST"]) for path, handler in others.items()]
        handlers = dict.fromkeys((404, 405, 500, Refused), refusal)
        return Gate(Starlette(routes=routes, exception_handlers=handlers), hosts, key)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        fields = await _fields(request)
        asked = endpoint.read(fields)
        headers = _headers(fields)
        model = self.worker.find(asked.model)
        asked.model = asked.model or model.name
        for i, item in enumerate(asked.requests):
            if isinstance(item, TextRequest) and item.messages:
                asked.requests[i] = await asyncio.to_thread(model.with_prompt, item)
        for opened in filter(None, asked.files):
            await asyncio.to_thread(model.warm, opened)
        is_editor = request.headers.get("user-agent") != AGENT
        events = self.events(asked.requests, request.receive, is_editor)
        if not asked.stream:
            async with aclosing(events):
                answers = {index: answer async for index, answer in events if answer.reason}
            # If a line has fewer alternatives than requested, the last choices have no answer.
            by_place = {i: answers.get(i, EMPTY) for i in range(max(answers, default=0) + 1)}
            return json_response(endpoint.write(asked, by_place, False), headers=headers)
        try:
            first = await anext(events)  # a refused request raises here, before the stream starts
        except StopAsyncIteration:
            first = 0, Answer(reason="length")
        chunks = _chunks(endpoint, asked, first, events, protocol_of(request.url.path).write_error)
        media_type = "application/x-ndjson" if endpoint.form == "ndjson" else "text/event-stream"
        return StreamingResponse(chunks, media_type=media_type, headers={"Cache-Control": "no-cache", **headers})

    async def events(
        self, items: Sequence[LineRequest | TextRequest], receive: Receive | None = None, is_editor: bool = False
    ) -> AsyncGenerator[tuple[int, Answer], None]:
        """Yield pairs: the index of a choice, and its answer or a part of the answer.

        The tasks are cancelled at the end of the iteration, and if `receive` says that the client disconnects.
        Raises Refused.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def emit(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # raised if the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (index, event))

        async def watch(receive: Receive) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait((0, ClientDisconnect()))

        tasks, first = dict[int, Task](), 0
        watchers: list[Any] = [asyncio.create_task(watch(receive))] if receive else []
        try:
            for item in items:
                tasks[first] = self.worker.submit(item, partial(emit, first))
                first += item.alternatives if isinstance(item, LineRequest) else 1
            remaining = len(tasks)
            while remaining:
                index, event = await queue.get()
                if isinstance(event, Exception):
                    raise event if isinstance(event, ClientDisconnect) else client_error(event)
                if isinstance(event, list):
                    line = tasks[index].request
                    if is_editor and isinstance(line, LineRequest) and not line.shows_all:
                        self._remember(line, event[0])
                    for i, answer in enumerate(event, index):
                        yield i, Answer(answer.text)
                        yield i, answer
                else:
                    yield index, event
                remaining -= isinstance(event, list) or bool(event.reason)
        finally:
            for task in (*watchers, *tasks.values()):
                task.cancel()

    async def _describe(self, write: Callable[[Named], Any], request: Request) -> Response:
        """The reply that describes the named model, or all models. If the path contains a name, only exactly this
        model is described."""
        fields, path = await _fields(request), request.path_params.get("name")
        name = path or fields.text("model") or fields.text("name") or request.query_params.get("model", "")
        models = self.worker.facts_by_name(name.removesuffix(":latest"), path is not None)
        return json_response(write(models), headers=_headers(fields))

    def _remember(self, request: LineRequest, answer: Answer) -> None:
        """Remember an editor's request and the shown text. An earlier request in the same line of text is
        forgotten."""
        above = request.before.rpartition("\n")[0]
        others = [past for past in self._recent if past[1].before.rpartition("\n")[0] != above]
        self._recent = deque([*others, (monotonic(), request, answer.text)], REMEMBERED)

    def _places(self) -> list[dict[str, Any]]:
        """The editors' last requests, newest first: for each, the line up to the cursor, the text shown then and
        the text suggested now."""
        places = []
        for time, request, shown in [*self._recent][::-1]:
            model = self.worker.find(request.model)
            answer = self.worker.call(partial(model.lines, request, lambda: False)).result()[0]
            place = {"line": request.before.rpartition("\n")[2], "seconds": monotonic() - time, "shown": shown}
            places.append(place | {"now": answer.text, "word": answer.word, "threshold": model.threshold})
        return places

    async def _replay(self, key: str | None, request: Request) -> Response:
        """The reply with the result of `_places`. Only the server's user receives this reply, since the reply
        contains text from an editor."""
        if key is None and request.client is not None:  # requests on the user's Unix socket have no client
            raise Refused(403, "only the user who runs the server may see this")
        notes = {name: model.current.note for name, model in self.worker.models.items()}
        return json_response({"notes": notes, "places": await asyncio.to_thread(self._places)})

    async def _tokenize(self, request: Request) -> Response:
        fields = await _fields(request)
        tokenizer = self.worker.find(fields.text("model")).require_batch().tokenizer
        encode = tokenizer.prompt if fields.flag("add_special") else tokenizer.encode
        tokens: list[Any] = await asyncio.to_thread(encode, fields.text("content"))
        if fields.flag("with_pieces"):
            tokens = [{"id": i, "piece": _piece_of(tokenizer.token_bytes[i])} for i in tokens]
        return json_response({"tokens": tokens}, headers=_headers(fields))

    async def _detokenize(self, request: Request) -> Response:
        fields = await _fields(request)
        tokenizer = self.worker.find(fields.text("model")).require_batch().tokenizer
        ids = fields.items("tokens", BODY)
        if not all(isinstance(i, int) and 0 <= i < tokenizer.vocab for i in ids):
            raise fields.refusal("tokens", f"expected ids from 0 to {tokenizer.vocab - 1}")
        return json_response({"content": tokenizer.decode(ids)}, headers=_headers(fields))


async def _start(request: Request) -> Response:
    return PlainTextResponse(
        "This server is for editors and programs; dunes studio shows its models in a browser.\n"
    )


async def _chunks(
    endpoint: Endpoint,
    asked: Asked,
    first: tuple[int, Answer],
    events: AsyncIterator[tuple[int, Answer]],
    write_error: Callable[[Refused], Any],
) -> AsyncIterator[bytes]:
    """Yield the bytes of a streamed reply."""
    head, tail = (b"", b"\n") if endpoint.form == "ndjson" else (b"data: ", b"\n\n")
    answers, first[1].first = dict([first]), True
    try:
        yield head + compact(endpoint.write(asked, answers, True)) + tail
        async for index, event in events:
            event.first = index not in answers
            yield head + compact(endpoint.write(asked, {index: event}, True)) + tail
            answers[index] = event
        for value in endpoint.end(asked, answers):
            yield head + compact(value) + tail
    except Refused as error:
        yield head + compact(write_error(error)) + tail
    if endpoint.form == "sse":
        yield b"data: [DONE]\n\n"


def _headers(fields: Fields) -> dict[str, str]:
    """The header that lists ignored fields, if any. Raises Refused if an ignored field would change the text."""
    names = [re.sub(r"[^\w.\[\]-]", "?", name, flags=re.ASCII)[:LISTED] for name in fields.ignored()]
    return {"X-Ignored-Fields": ", ".join([*dict.fromkeys(names)][:LISTED])} if names else {}


def _piece_of(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _fields(request: Request) -> Fields:
    """Receive a request's body and parse its fields. Raises Refused for a body that is invalid, too long or
    received too late."""
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIPT):
            async for part in request.stream():
                body += part
                if len(body) > BODY:
                    raise Refused(413, f"the body has more than {BODY} bytes")
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {RECEIPT:.0f} s") from None
    content = parse(bytes(body)).body
    names = {k: v.removesuffix(":latest") for k in ("model", "name") if isinstance(v := content.get(k), str)}
    return Fields({**content, **names})  # as in Ollama
