"""The HTTP application: which path is read by which protocol, and what every request has to pass first."""

import asyncio
import hmac
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dunes.serve import describe, llama_cpp, ollama, openai, tabby
from dunes.serve.asked import Asked, Protocol, open_files
from dunes.serve.describe import Named
from dunes.serve.fields import BODY, Fields, Refused, parse
from dunes.serve.requests import Answer, Event, LineRequest, TextRequest
from dunes.serve.served import Models
from dunes.serve.worker import Task, Worker

RECEIPT, SENDING = 10.0, 30.0
"""Seconds in which a request has to arrive, and in which a client has to take what is sent."""
LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
PATHS: dict[str, Protocol] = {
    "/infill": llama_cpp.INFILL,
    "/completion": llama_cpp.COMPLETION,
    "/completions": llama_cpp.COMPLETION,
    "/v1/completions": openai.COMPLETIONS,
    "/v1/chat/completions": openai.CHAT,
    "/chat/completions": openai.CHAT,
    "/v1/fim/completions": openai.MISTRAL,
    "/api/generate": ollama.GENERATE,
    "/api/chat": ollama.CHAT,
}
ABOUT: dict[str, Callable[[Named], Any]] = {
    "/health": describe.health,
    "/v1/health": describe.health,
    "/v1/models": describe.list_models,
    "/models": describe.list_models,
    "/props": describe.props,
    "/slots": describe.slots,
    "/v1beta/server_setting": tabby.server_setting,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.tags,
    "/api/show": ollama.show,
    "/api/version": lambda models: {"version": ollama.VERSION},
}
"""What is said of models."""
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    503: "unavailable_error",
}  # fmt: skip


EMPTY = Answer(reason="length")
"""The answer to a request for no tokens, and where a choice is missing."""


class CompactJSON(JSONResponse):
    """JSON on one line without spaces: llama.vim looks for `"content":"` in the bytes."""

    def render(self, content: Any) -> bytes:
        """The bytes of a value; what is not finite is null."""
        return compact(content)


def compact(content: Any) -> bytes:
    """A value as JSON on one line without spaces; what is not finite is null."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(content), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def error_response(error: Refused, path: str) -> Response:
    """The answer to a refused request, as the path's clients read it."""
    plain = {"code": error.status, "message": error.message, "type": error.kind}
    content = {"error": error.message if path.startswith("/api/") else plain}
    headers = {"Retry-After": str(error.retry)} if error.retry else {}
    return CompactJSON(content, error.status, headers)


class Gate:
    """Lets requests through that come from this machine's programs or have the key: a page of another origin, or
    of a name that was bound to this address, gets nothing. It also ends requests whose client takes too long."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], key: str | None) -> None:
        self.app, self.key = app, key
        self.hosts = {host.lower() for host in (*LOCAL, *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), SENDING)

        try:
            self._check(scope)
            await self.app(scope, receive, send_in_time)
        except Refused as error:
            await error_response(error, scope["path"])(scope, receive, send)
        except (TimeoutError, ClientDisconnect):
            return

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = [host.decode("latin-1") for host in headers.get(b"host", [])]
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.hosts:
            raise Refused(403, f"Host {hosts[:2]} is not this server's; name it by --host", KINDS[403])
        for origin in headers.get(b"origin", []):
            scheme, _, host = origin.decode("latin-1").partition("://")
            if scheme not in ("http", "https", "vscode-webview", "vscode-file") or (
                scheme.startswith("http") and _host_name(host) not in self.hosts
            ):
                raise Refused(403, "requests of pages from elsewhere are not answered", KINDS[403])
        if self.key is not None:
            given = headers.get(b"authorization", [b""])[0].removeprefix(b"Bearer ")
            given = given or headers.get(b"x-api-key", [b""])[0]
            if not hmac.compare_digest(given, self.key.encode()):
                raise Refused(401, "Invalid API Key", KINDS[401])


def _host_name(host: str) -> str:
    """The name in a Host header, without its port and a dot at its end, in lower case."""
    name, colon, port = host.rpartition(":")
    if colon and (port.isdigit() or not port) and not name.endswith(":"):
        host = name
    return host.lower().rstrip(".")


class Server:
    """The paths of the application, over models and their worker."""

    def __init__(self, models: Models, worker: Worker) -> None:
        self.models, self.worker = models, worker

    def app(self, hosts: Sequence[str] = (), key: str | None = None) -> ASGIApp:
        """The application; `hosts` are further names under which it may be asked."""
        routes = [
            Route(path, partial(self._answer, protocol), methods=["POST"]) for path, protocol in PATHS.items()
        ]
        others: dict[str, Callable[[Request], Any]] = {
            **{path: partial(self._describe, write) for path, write in ABOUT.items()},
            "/": self._page,
            "/suggest": self._suggest,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/events": self._ignore,
        }
        routes += [Route(path, endpoint, methods=["GET", "POST"]) for path, endpoint in others.items()]
        app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found, 500: _failed})
        app.add_exception_handler(Refused, _refused)
        return Gate(app, hosts, key)

    async def _answer(self, protocol: Protocol, request: Request) -> Response:
        fields = await _fields(request)
        if protocol is openai.COMPLETIONS and tabby.is_segments(fields):
            protocol = tabby.COMPLETIONS
        asked = await self._with_prompts(protocol.read(fields))
        model = self.models.find(asked.model)
        asked = replace(asked, model=asked.model or model.name)
        files = [request.files for request in asked.requests if isinstance(request, LineRequest)]
        if not asked.requests and protocol is llama_cpp.INFILL:
            files = [open_files(fields, "input_extra")]
        for each in filter(None, files):
            await asyncio.to_thread(model.warm, tuple(each))
        events = self._events(asked, request)
        if not asked.stream:
            async with aclosing(events):
                answers = {index: answer async for index, answer in events if answer.reason}
            # A line may have fewer alternatives than places; no place between others is missing.
            placed = {i: answers.get(i, EMPTY) for i in range(max(answers, default=0) + 1)}
            return CompactJSON(protocol.write(asked, placed, False))
        try:
            first = await anext(events)  # what is refused has no stream
        except StopAsyncIteration:
            first = 0, EMPTY
        chunks = _chunks(protocol, asked, first, events)
        kind = "application/x-ndjson" if protocol.form == "ndjson" else "text/event-stream"
        return StreamingResponse(chunks, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def _with_prompts(self, asked: Asked) -> Asked:
        """The request with the prompts of its chats."""
        requests = []
        for each in asked.requests:
            if isinstance(each, TextRequest) and each.messages:
                each = await asyncio.to_thread(self.models.find(each.model).with_prompt, each)
            requests.append(each)
        return replace(asked, requests=requests)

    async def _events(self, asked: Asked, request: Request) -> AsyncGenerator[tuple[int, Answer], None]:
        """The answers and parts of them, with the index of their choice. A client that has gone cancels the rest.

        Raises Refused.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event | None]]()

        def emit(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, event))

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait((0, None))

        tasks, first = list[Task](), asked.first_choices
        watcher = asyncio.create_task(watch())
        try:
            for index, each in enumerate(asked.requests):
                tasks.append(self.worker.submit(each, partial(emit, first[index])))
            left = len(tasks)
            while left:
                index, event = await queue.get()
                if event is None:
                    raise ClientDisconnect
                if isinstance(event, Exception):
                    raise event if isinstance(event, Refused) else _internal(event)
                if isinstance(event, list):
                    for i, answer in enumerate(event, index):
                        yield i, Answer(answer.text)
                        yield i, answer
                else:
                    yield index, event
                left -= isinstance(event, list) or bool(event.reason)
        finally:
            watcher.cancel()
            for task in tasks:
                task.cancel()

    async def _suggest(self, request: Request) -> Response:
        """The suggestions for the page and for `dunes complete`, with probabilities, and tokens if wanted."""
        fields = await _fields(request)
        line = LineRequest(
            fields.text("before"),
            fields.text("after"),
            fields.path("path"),
            alternatives=3 if fields.flag("tokens") else 1,
            model=fields.text("model"),
            shows_all=True,
            explains=fields.flag("tokens"),
        )
        self.models.find(line.model)
        events = self._events(Asked(fields, [line], line.model), request)
        async with aclosing(events):
            answers = [answer async for _, answer in events if answer.reason]
        listed = [{"text": a.text, "word": a.word, "line": a.line} for a in answers]
        seconds = answers[0].seconds
        return CompactJSON({"suggestions": listed, "milliseconds": 1e3 * seconds, **answers[0].explained})

    async def _page(self, request: Request) -> Response:
        """One page, with nothing from elsewhere."""
        page = files("dunes.serve").joinpath("page.html").read_text()
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def _describe(self, write: Callable[[Named], Any], request: Request) -> Response:
        """What is said of the models, or of the one that is named."""
        fields = await _fields(request)
        name = fields.text("model") or fields.text("name") or request.query_params.get("model", "")
        return CompactJSON(write(self.models.named(name)))

    async def _tokenize(self, request: Request) -> Response:
        fields = await _fields(request)
        tokenizer = self.models.find(fields.text("model")).require_batch().tokenizer
        ids = await asyncio.to_thread(tokenizer.encode, fields.text("content"))
        if not fields.flag("with_pieces"):
            return CompactJSON({"tokens": ids})
        return CompactJSON({"tokens": [{"id": i, "piece": _piece_of(tokenizer.token_bytes[i])} for i in ids]})

    async def _detokenize(self, request: Request) -> Response:
        fields = await _fields(request)
        tokenizer = self.models.find(fields.text("model")).require_batch().tokenizer
        ids = fields.items("tokens", BODY)
        if not all(isinstance(i, int) and 0 <= i < tokenizer.vocab for i in ids):
            raise fields.refused("tokens", f"expected ids from 0 to {tokenizer.vocab - 1}")
        return CompactJSON({"content": tokenizer.decode(ids)})

    async def _ignore(self, request: Request) -> Response:
        return Response(status_code=204)


async def _chunks(
    protocol: Protocol,
    asked: Asked,
    first: tuple[int, Answer],
    events: AsyncIterator[tuple[int, Answer]],
) -> AsyncIterator[bytes]:
    """The bytes of a stream."""
    answers, write = dict[int, Answer](), _line if protocol.form == "ndjson" else _sse
    try:
        yield write(protocol.write(asked, dict([first]), True))
        answers |= dict([first])
        async for index, event in events:
            yield write(protocol.write(asked, {index: event}, True))
            answers[index] = event
        for value in protocol.end(asked, answers):
            yield write(value)
    except Refused as error:
        yield write({"error": {"code": error.status, "message": error.message, "type": error.kind}})
    if protocol.form == "sse":
        yield b"data: [DONE]\n\n"


def _line(value: Any) -> bytes:
    return compact(value) + b"\n"


def _sse(value: Any) -> bytes:
    return b"data: " + compact(value) + b"\n\n"


def _piece_of(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _fields(request: Request) -> Fields:
    """The fields of a request's body, received within its limits. Raises Refused."""
    if int(request.headers.get("content-length") or 0) > BODY:
        raise Refused(413, f"the body has more than {BODY} bytes")
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
    names = {key: name for key in ("model", "name") if isinstance(name := content.get(key), str)}
    return Fields({**content, **{key: name.removesuffix(":latest") for key, name in names.items()}})  # as Ollama's


def _internal(error: Exception) -> Refused:
    return Refused(500, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "server_error")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error_response(error, request.url.path)


def _not_found(request: Request, error: Exception) -> Response:
    return error_response(Refused(404, "File Not Found", KINDS[404]), request.url.path)


def _failed(request: Request, error: Exception) -> Response:
    return error_response(_internal(error), request.url.path)
