"""The language server: completion of lines for editors with inline completion, or plain completion.

`handshake.py` has answered `initialize` by now; the model is loaded meanwhile, and until then the newest request
waits. https://microsoft.github.io/language-server-protocol/specifications/lsp/3.18/specification/
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlparse

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from dunes import __version__
from dunes.serve.handshake import ACCEPTED, TRIGGERS
from dunes.units import plural

if TYPE_CHECKING:
    from dunes.serve.requests import Answer, Event
    from dunes.serve.running import Running
    from dunes.serve.worker import Task

ITEMS = 3
"""Suggestions at most."""
IDLE = 0.5
"""Seconds without a change after which an open file is indexed for the completion of others."""


@dataclass
class _State:
    """The model once it is loaded, and the newest request."""

    load: Callable[[], "Running"]
    running: "Running | None" = None
    failed: str = ""
    newest: "Task | None" = None
    asked: int = 0
    accepted: int = 0
    is_closed: bool = False
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


def start(load: Callable[[], "Running"], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Speak on these streams until the editor ends it; `load` loads the model, in another thread."""
    build(load).start_io(stdin, stdout)


def build(load: Callable[[], "Running"]) -> LanguageServer:
    """The server, before it speaks."""
    server = LanguageServer("dunes", __version__)
    state = _State(load)
    _add_life(server, state)
    _add_completion(server, state)
    return server


def _add_life(server: LanguageServer, state: _State) -> None:
    @server.feature(types.INITIALIZED)
    def initialized(params: types.InitializedParams) -> None:
        threading.Thread(target=_load, args=(server, state), daemon=True, name="dunes-load").start()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        _index_later(server, state, params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        _index_later(server, state, params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        if timer := state.timers.pop(params.text_document.uri, None):
            timer.cancel()
        _take_in(state, params.text_document.uri, None)

    @server.feature(types.SHUTDOWN)
    def shutdown(params: Any) -> None:
        state.is_closed = True
        message = f"dunes: {plural(state.accepted, 'suggestion')} accepted"
        server.window_log_message(types.LogMessageParams(types.MessageType.Info, message))
        if state.running:
            state.running.close()

    @server.command(ACCEPTED)
    def accepted(*_: Any) -> None:
        """Editors execute it after an acceptance; how many there were is said at the end."""
        state.accepted += 1


def _load(server: LanguageServer, state: _State) -> None:
    try:
        state.running = state.load()
    except Exception as error:
        state.failed = " ".join(str(error).split()) or type(error).__name__
        message = types.ShowMessageParams(types.MessageType.Error, f"dunes: {state.failed}")
        with suppress(Exception):
            server.window_show_message(message)


def _index_later(server: LanguageServer, state: _State, uri: str) -> None:
    """Index a file once it has not changed for a while: other files copy from it."""
    if timer := state.timers.get(uri):
        timer.cancel()
    loop = asyncio.get_running_loop()
    state.timers[uri] = loop.call_later(IDLE, _index, server, state, uri)


def _index(server: LanguageServer, state: _State, uri: str) -> None:
    if state.running is None:
        _index_later(server, state, uri)
        return
    state.timers.pop(uri, None)
    if uri in server.workspace.text_documents:
        _take_in(state, uri, server.workspace.text_documents[uri].source)


def _take_in(state: _State, uri: str, text: str | None) -> None:
    """Let other files copy from this text; None for what is saved."""

    def work() -> None:
        if running is not None:
            path, found = _path(uri), text
            with suppress(OSError, UnicodeDecodeError, ValueError):
                found = Path(path).read_text(encoding="utf-8") if text is None else text
            running.take_in(path, found)

    running = state.running
    threading.Thread(target=work, daemon=True, name="dunes-index").start()


def _add_completion(server: LanguageServer, state: _State) -> None:
    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def inline(params: types.InlineCompletionParams) -> types.InlineCompletionList:
        answers = await _answers(server, state, params.text_document.uri, params.position)
        here = types.Range(params.position, params.position)
        command = types.Command("accepted", ACCEPTED)
        items = [types.InlineCompletionItem(a.text, range=here, command=command) for a in answers]
        return types.InlineCompletionList(items)

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[*TRIGGERS]))
    async def completion(params: types.CompletionParams) -> types.CompletionList:
        answers = await _answers(server, state, params.text_document.uri, params.position)
        here = types.Range(params.position, params.position)
        word = _word_before(server, params.text_document.uri, params.position)
        items = [
            types.CompletionItem(
                label=(word + a.text).strip(),
                kind=types.CompletionItemKind.Text,
                detail="dunes" if a.line is None else f"dunes {100 * a.line:.0f} %",
                filter_text=word + a.text,
                sort_text=f"{i}",
                text_edit=types.TextEdit(here, a.text),
                command=types.Command("accepted", ACCEPTED),
            )
            for i, a in enumerate(answers)
        ]
        return types.CompletionList(is_incomplete=True, items=items)


def _word_before(server: LanguageServer, uri: str, position: types.Position) -> str:
    """The part of a word before the cursor, which editors filter by."""
    if uri not in server.workspace.text_documents:
        return ""
    document = server.workspace.text_documents[uri]
    before: str = document.source[: document.offset_at_position(position)]
    start = len(before)
    while start and (before[start - 1].isalnum() or before[start - 1] == "_"):
        start -= 1
    return before[start:]


async def _answers(server: LanguageServer, state: _State, uri: str, position: types.Position) -> list["Answer"]:
    """The suggestions at a position. A newer request ends an older one, also one that waits for the model."""
    number = state.asked = state.asked + 1
    if state.newest is not None:
        state.newest.cancel()
    while state.running is None:
        await asyncio.sleep(0.05)
        if state.failed or state.asked != number:
            return []
    if state.is_closed or uri not in server.workspace.text_documents:
        return []
    from dunes.serve.requests import LineRequest

    document = server.workspace.text_documents[uri]
    offset = document.offset_at_position(position)
    before, after = document.source[:offset], document.source[offset:]
    request = LineRequest(before, after, _path(uri), (), ITEMS)
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def emit(event: "Event") -> None:
        with suppress(RuntimeError):  # the editor has gone
            loop.call_soon_threadsafe(lambda: None if result.done() else result.set_result(event))

    task = state.newest = state.running.worker.submit(request, emit)
    try:
        while not result.done():
            await asyncio.wait([result], timeout=0.25)
            if task.is_cancelled():
                return []
        event = result.result()
    finally:
        task.cancel()
    if isinstance(event, Exception):
        server.window_log_message(types.LogMessageParams(types.MessageType.Error, f"dunes: {event}"))
        return []
    return [answer for answer in event if answer.text]


def _path(uri: str) -> str:
    """The path of a file's address; of another address, its end."""
    return unquote(urlparse(uri).path)
