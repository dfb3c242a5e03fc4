"""Tabby's request, which has OpenAI's path. https://tabby.tabbyml.com/api"""

from collections.abc import Sequence
from typing import Any

from dunes.serve.asked import Asked, Protocol, asked
from dunes.serve.fields import FILES, Fields
from dunes.serve.llama_cpp import no_end
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


def reply(request: Asked, answers: Sequence[Answer]) -> Any:
    """The best suggestion; none if it is empty."""
    texts = [answer.text for answer in answers[:1] if answer.text]
    return {"id": request.id, "choices": [{"index": i, "text": text} for i, text in enumerate(texts)]}


def _no_chunk(*_: Any) -> Any:
    raise AssertionError("Tabby's answers are whole")


COMPLETIONS = Protocol(read, reply, _no_chunk, _no_chunk, no_end)
