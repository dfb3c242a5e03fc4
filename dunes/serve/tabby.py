"""Tabby's request, which has OpenAI's path. https://tabby.tabbyml.com/api"""

from collections.abc import Mapping
from typing import Any

from dunes.serve.asked import Asked, Protocol, asked
from dunes.serve.fields import FILES, Fields
from dunes.serve.requests import Answer, LineRequest


def is_segments(fields: Fields) -> bool:
    """True for Tabby's request."""
    return isinstance(fields.body.get("segments"), dict)


def read(fields: Fields) -> Asked:
    """The rest of a line in a file."""
    parts = fields.object("segments")
    others = (*parts.objects("declarations", FILES), *parts.objects("relevant_snippets_from_changed_files", FILES))
    files = [(other.text("filepath"), other.text("body")) for other in others]
    line = LineRequest(parts.text("prefix"), parts.text("suffix"), parts.path("filepath"), files)
    return asked(fields, [line], "cmpl-", False)


def write(request: Asked, answers: Mapping[int, Answer], streams: bool) -> Any:
    """The best suggestion; none if it is empty."""
    text = next(iter(answers.values())).text
    return {"id": request.id, "choices": [{"index": 0, "text": text}] if text else []}


def server_setting(models: object) -> dict[str, bool]:
    """Nothing is sent elsewhere."""
    return {"disable_client_side_telemetry": True}


COMPLETIONS = Protocol(read, write)
