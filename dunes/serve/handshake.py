"""Answer an editor's `initialize` request before importing pygls, since the import takes a second.

After its import, pygls answers `initialize` again; this second answer is dropped. A test compares the
`capabilities` of both answers.
"""

import json
import re
from typing import Any, BinaryIO

TRIGGERS = " .(,=:<\"'"
"""Characters after which an editor requests `textDocument/completion`, if it does not support inline
completion."""
ACCEPTED = "dunes.accepted"
"""Command that an editor executes when the user accepts a suggestion."""


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
    """A message with its header, as bytes."""
    data = json.dumps(content, separators=(",", ":")).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def shake_hands(stdin: BinaryIO, stdout: BinaryIO, version: str) -> tuple[bytes, bool]:
    """Read the first message. If the message is `initialize`, answer it, and return its JSON and True. Otherwise,
    return its bytes and False."""
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
