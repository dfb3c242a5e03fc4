"""Answer `initialize` in the language server before the protocol's library is imported, which takes a second.

The library then reads the same message, and its answer is dropped. A test compares the `capabilities` in both.
"""

import json
import re
from typing import Any, BinaryIO

TRIGGERS = " .(,=:<\"'"
"""Characters after which editors without inline completion request one."""
ACCEPTED = "dunes.accepted"
"""Command that an editor executes when a suggestion was accepted."""


def capabilities(encoding: str) -> dict[str, Any]:
    """The capabilities of the server."""
    folders = {"supported": True, "changeNotifications": True}
    return {
        "positionEncoding": encoding,
        "textDocumentSync": {"openClose": True, "change": 2, "save": False},
        "completionProvider": {"triggerCharacters": [*TRIGGERS]},
        "executeCommandProvider": {"commands": [ACCEPTED]},
        "inlineCompletionProvider": {},
        "workspace": {"workspaceFolders": folders, "fileOperations": {}},
    }


def message(content: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    data = json.dumps(content, separators=(",", ":")).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def shake_hands(stdin: BinaryIO, stdout: BinaryIO, version: str) -> tuple[bytes, bool]:
    """Read the first message, and answer it if it is `initialize`: returns its JSON and True. For another message,
    returns its bytes and False."""
    head = b""
    while (line := stdin.readline()).strip():
        head += line
    length = re.search(rb"(?im)^content-length:\s*(\d+)\s*$", head)
    body = stdin.read(int(length[1])) if length else b""
    try:
        content = json.loads(body)
        client = content["params"]["capabilities"]
        general = client.get("general") or {}
        offered = general.get("positionEncodings") or ()
        encoding = next((name for name in offered if name in ("utf-8", "utf-16", "utf-32")), "utf-16")
        if content["method"] != "initialize" or "id" not in content:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        return head + b"\r\n" + body, False
    result = {"capabilities": capabilities(encoding), "serverInfo": {"name": "dunes", "version": version}}
    stdout.write(message({"id": content["id"], "jsonrpc": "2.0", "result": result}))
    stdout.flush()
    client["general"] = {**general, "positionEncodings": [encoding]}
    return json.dumps(content).encode(), True
