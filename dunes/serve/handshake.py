"""The language server's answer to `initialize`, before the protocol's library is imported: that takes a second.

The library then reads the same message; what it answers is dropped. `capabilities` are its own (a test compares).
"""

import json
from typing import Any, BinaryIO

TRIGGERS = " .(,=:<\"'"
"""Characters after which editors without inline completion ask."""
ACCEPTED = "dunes.accepted"
"""The command that an editor executes when a suggestion was accepted."""


def capabilities(encoding: str) -> dict[str, Any]:
    """What the server can do."""
    folders = {"supported": True, "changeNotifications": True}
    return {
        "positionEncoding": encoding,
        "textDocumentSync": {"openClose": True, "change": 2, "save": False},
        "completionProvider": {"triggerCharacters": [*TRIGGERS]},
        "executeCommandProvider": {"commands": [ACCEPTED]},
        "inlineCompletionProvider": {},
        "workspace": {"workspaceFolders": folders, "fileOperations": {}},
    }


class _Input:
    """A stream with bytes before it."""

    def __init__(self, first: bytes, stream: BinaryIO) -> None:
        self._first, self._stream = first, stream

    def readline(self) -> bytes:
        """The next line."""
        if not self._first:
            return self._stream.readline()
        line, end, self._first = self._first.partition(b"\n")
        return line + end

    def read(self, count: int) -> bytes:
        """The next bytes."""
        if not self._first:
            return self._stream.read(count)
        part, self._first = self._first[:count], self._first[count:]
        return part


class _Output:
    """A stream without the first answer to a request."""

    def __init__(self, stream: BinaryIO, answered: Any) -> None:
        self._stream, self._answered = stream, [answered]

    def write(self, data: bytes) -> None:
        """Write a message, but the one that was answered."""
        content = json.loads(data.partition(b"\r\n\r\n")[2]) if self._answered else {}
        if self._answered and "method" not in content and content.get("id") == self._answered[0]:
            self._answered.clear()
        else:
            self._stream.write(data)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


def message(content: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    data = json.dumps(content, separators=(",", ":")).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def shake_hands(stdin: BinaryIO, stdout: BinaryIO, version: str) -> tuple[Any, Any]:
    """Answer the first message if it is `initialize`; the streams on which the library goes on."""
    head = b""
    while (line := stdin.readline()).strip():
        head += line
    lengths = (each for each in head.splitlines() if each.lower().startswith(b"content-length:"))
    length = next(lengths, b":0").split(b":")[1]
    body = stdin.read(int(length)) if length.strip().isdigit() else b""
    try:
        content = json.loads(body)
        params = content["params"]
        offered = (params["capabilities"].get("general") or {}).get("positionEncodings") or ["utf-16"]
        if content["method"] != "initialize" or "id" not in content:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        return _Input(head + line + body, stdin), stdout
    encoding = "utf-8" if "utf-8" in offered else "utf-16"
    result = {"capabilities": capabilities(encoding), "serverInfo": {"name": "dunes", "version": version}}
    stdout.write(message({"id": content["id"], "jsonrpc": "2.0", "result": result}))
    stdout.flush()
    params["capabilities"] |= {"general": {**(params["capabilities"].get("general") or {})}}
    params["capabilities"]["general"]["positionEncodings"] = [encoding]
    return _Input(message(content), stdin), _Output(stdout, content["id"])
