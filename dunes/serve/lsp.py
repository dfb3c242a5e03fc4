"""The language server: completes lines for editors that support inline completion, or only plain completion.

A thread loads the model, and the newest request waits for it.
https://microsoft.github.io/language-server-protocol/specifications/lsp/3.18/specification/
"""

import asyncio
import re
import threading
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlparse

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from dunes import __version__
from dunes.serve.requests import Answer, Event, LineRequest
from dunes.text.lines import decode_text, split_lines
from dunes.units import plural

if TYPE_CHECKING:
    from dunes.serve.worker import Worker

ITEMS = 3
"""Maximum number of suggestions."""
TRIGGERS = " .(,=:<\"'"
"""Characters after which an editor without inline completion requests plain completion."""
ACCEPTED = "dunes.accepted"
"""Command that an editor executes when the user accepts a suggestion."""
IDLE = 0.5
"""An open file is indexed after this many seconds without a change; completions in other files then copy from
it."""


def start(load: Callable[[], "Worker"], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Serve on these streams until the editor ends the server; another thread calls `load` to load the model."""
    Server(load).start_io(stdin, stdout)


class Document(TextDocument):
    """An open file, split into lines as the protocol defines; pygls itself uses `str.splitlines`."""

    def apply_change(self, change: types.TextDocumentContentChangeEvent) -> None:
        """Replace a range of the text, or all of it."""
        text, start, end = self.source, 0, len(self.source)
        if isinstance(change, types.TextDocumentContentChangePartial):
            start, end = map(self.offset_at_position, (change.range.start, change.range.end))
        self._source = text[:start] + change.text + text[max(start, end) :]

    def offset_at_position(self, position: types.Position) -> int:
        """The offset of a position in characters. Beyond the end of a line or of the text, the offset is that
        end."""
        lines = split_lines(self.source)
        if position.line >= len(lines):
            return len(self.source)
        line, column = lines[position.line].rstrip("\r\n"), position.character
        if not line.isascii():
            column = bisect_right([*accumulate(map(self.position_codec.client_num_units, line))], column)
        return sum(map(len, lines[: position.line])) + min(column, len(line))


class Server(LanguageServer):
    """The language server: it loads the model in a thread, and answers only the newest request."""

    def __init__(self, load: Callable[[], "Worker"]) -> None:
        super().__init__("dunes", __version__)
        self._load = load
        self._worker: Worker | None = None
        self._newest: asyncio.Future[Event] | None = None
        self._load_error, self._accepted, self._is_closed = "", 0, False
        self._timers = dict[str, asyncio.TimerHandle]()
        # pygls sets an attribute on the function, which a partial allows and a bound method does not.
        self.feature(types.INITIALIZED)(partial(self._begin))
        self.feature(types.TEXT_DOCUMENT_DID_OPEN)(partial(self._open))
        self.feature(types.TEXT_DOCUMENT_DID_CHANGE)(partial(self._change))
        self.feature(types.TEXT_DOCUMENT_DID_CLOSE)(partial(self._close))
        self.feature(types.SHUTDOWN)(partial(self._shut_down))
        self.command(ACCEPTED)(partial(self._count))
        inline, plain = types.InlineCompletionOptions(), types.CompletionOptions(trigger_characters=[*TRIGGERS])
        self.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, inline)(partial(self._complete_inline))
        self.feature(types.TEXT_DOCUMENT_COMPLETION, plain)(partial(self._complete))

    def _begin(self, params: types.InitializedParams) -> None:
        threading.Thread(target=self._load_model, daemon=True, name="dunes-load").start()

    def _load_model(self) -> None:
        try:
            self._worker = self._load()
        except Exception as error:
            self._load_error = " ".join(str(error).split()) or type(error).__name__
            message = types.ShowMessageParams(types.MessageType.Error, f"dunes: {self._load_error}")
            with suppress(Exception):
                self.window_show_message(message)

    def _open(self, params: types.DidOpenTextDocumentParams) -> None:
        opened, codec = params.text_document, self.workspace.position_codec
        document = Document(opened.uri, opened.text, opened.version, opened.language_id, position_codec=codec)
        self.workspace.text_documents[unquote(opened.uri)] = document  # replaces the document of pygls
        self._index_later(opened.uri)

    def _change(self, params: types.DidChangeTextDocumentParams) -> None:
        self._index_later(params.text_document.uri)

    def _close(self, params: types.DidCloseTextDocumentParams) -> None:
        if timer := self._timers.pop(params.text_document.uri, None):
            timer.cancel()
        self._take_in(params.text_document.uri, None)

    def _shut_down(self, params: Any) -> None:
        self._is_closed = True
        self._log(types.MessageType.Info, f"{plural(self._accepted, 'suggestion')} accepted")
        if self._worker:
            self._worker.close()

    def _count(self, *_: Any) -> None:
        """Count an accepted suggestion; at shutdown, the log reports the count."""
        self._accepted += 1

    def _index_later(self, uri: str) -> None:
        """Index a file after IDLE seconds without a change, so that completions in other files copy from it."""
        if timer := self._timers.get(uri):
            timer.cancel()
        self._timers[uri] = asyncio.get_running_loop().call_later(IDLE, self._index, uri)

    def _index(self, uri: str) -> None:
        if self._worker is None:
            self._index_later(uri)
            return
        self._timers.pop(uri, None)
        if document := self.workspace.text_documents.get(unquote(uri)):
            self._take_in(uri, document.source)

    def _take_in(self, uri: str, text: str | None) -> None:
        """Let completions in other files copy from this text, or from the saved file if `text` is None."""

        def work() -> None:
            if worker is not None:
                path, content = _path(uri), text
                with suppress(OSError, ValueError):
                    content = decode_text(Path(path).read_bytes(), path) if text is None else text
                worker.take_in(path, content)

        worker = self._worker
        threading.Thread(target=work, daemon=True, name="dunes-index").start()

    def _log(self, message_type: types.MessageType, message: str) -> None:
        """Write a line into the editor's log."""
        self.window_log_message(types.LogMessageParams(message_type, f"dunes: {message}"))

    def _split_at(self, uri: str, position: types.Position) -> tuple[str, str] | None:
        """The text of an open file before and after a position; None if the file is not open."""
        if (document := self.workspace.text_documents.get(unquote(uri))) is None:
            return None
        offset = document.offset_at_position(position)
        return document.source[:offset], document.source[offset:]

    async def _answers(self, uri: str, position: types.Position) -> list[Answer]:
        """The suggestions at a position. A newer request cancels an older request that is running or waiting."""
        if self._newest is not None and not self._newest.done():
            self._newest.set_result([])
        loop = asyncio.get_running_loop()
        result = self._newest = loop.create_future()
        while self._worker is None:
            await asyncio.sleep(0.05)
            if self._load_error or result.done():
                return []
        texts = self._split_at(uri, position)
        if self._is_closed or texts is None:
            return []

        def take(event: Event) -> None:
            if not result.done():
                result.set_result(event)

        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # raised if the event loop is closed
                loop.call_soon_threadsafe(take, event)

        request = LineRequest(*texts, _path(uri), alternatives=ITEMS)
        task = self._worker.submit(request, emit)
        try:
            event = await result
        finally:
            task.cancel()
        if isinstance(event, Exception):
            self._log(types.MessageType.Error, str(event))
            return []
        return [answer for answer in event if answer.text]

    async def _complete_inline(self, params: types.InlineCompletionParams) -> types.InlineCompletionList:
        answers = await self._answers(params.text_document.uri, params.position)
        cursor = types.Range(params.position, params.position)
        items = [types.InlineCompletionItem(a.text, range=cursor, command=_command(a)) for a in answers]
        return types.InlineCompletionList(items)

    async def _complete(self, params: types.CompletionParams) -> types.CompletionList:
        answers = await self._answers(params.text_document.uri, params.position)
        cursor = types.Range(params.position, params.position)
        before, _ = self._split_at(params.text_document.uri, params.position) or ("", "")
        word = re.split(r"\W", before.rpartition("\n")[2])[-1]  # editors filter items by the cursor's word
        items = [
            types.CompletionItem(
                label=(word + a.text).strip(),
                kind=types.CompletionItemKind.Text,
                detail="dunes" if a.line is None else f"dunes {100 * a.line:.0f} % ({a.source})",
                filter_text=word + a.text,
                sort_text=f"{i}",
                text_edit=types.TextEdit(cursor, a.text),
                command=_command(a),
                data={"source": a.source},
            )
            for i, a in enumerate(answers)
        ]
        return types.CompletionList(is_incomplete=True, items=items)


def _command(answer: Answer) -> types.Command:
    """The command that an editor sends for an accepted suggestion, with the suggestion's source as argument."""
    return types.Command("accepted", ACCEPTED, arguments=[answer.source])


def _path(uri: str) -> str:
    """The decoded path component of a URI."""
    return unquote(urlparse(uri).path)
