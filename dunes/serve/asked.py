"""How a protocol's request is read, and the fields that several protocols share."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dunes.serve.fields import CHOICES, FILES, Fields
from dunes.serve.requests import ENDLESS, Answer, LineRequest, Piece, Request, TextRequest, fill_in_the_middle

SEEDS = 2**64 - 1
PROMPTS = 64
"""Prompts of one request at most."""


@dataclass(frozen=True)
class Asked:
    """What a body asks for: a line with alternatives, or texts, each of which is a choice of the reply."""

    fields: Fields
    requests: Sequence[Request]
    stream: bool = False
    id: str = ""
    created: int = 0

    @property
    def model(self) -> str:
        """The name of the model, as the client spells it."""
        return self.requests[0].model if self.requests else ""

    @property
    def line(self) -> LineRequest | None:
        """The request for a line; None if texts are asked for."""
        first = self.requests[0] if self.requests else None
        return first if isinstance(first, LineRequest) else None


class Protocol(NamedTuple):
    """A path's way of reading a body, of writing all answers, a piece of the answer with an index, and the last
    piece of it with the answer; `end` follows all answers of a stream. Chunks are JSON values."""

    read: Callable[[Fields], Asked]
    reply: Callable[[Asked, Sequence[Answer]], Any]
    piece: Callable[[Asked, int, Piece], Any]
    last: Callable[[Asked, int, Answer], Any]
    end: Callable[[Asked, Sequence[Answer]], Sequence[Any]]
    form: str = "sse"
    """How a stream is written: sse, with `data: [DONE]` at its end, sse-bare without, or ndjson."""


def asked(fields: Fields, requests: Sequence[Request], prefix: str, stream: bool | None = None) -> Asked:
    """The requests of a body with an id of their own."""
    stream = fields.flag("stream") if stream is None else stream
    return Asked(fields, requests, stream, prefix + uuid.uuid4().hex, int(time.time()))


def model_name(fields: Fields) -> str:
    """The name of the model; clients with a single model send an empty one, or any."""
    return fields.text("model")


def token_limit(fields: Fields, name: str, default: int = -1) -> int:
    """The number of new tokens: the server's own limit for -1 and for more than that."""
    count = fields.integer(name, default, -2, 2**63)
    return ENDLESS if count < 0 else min(count, ENDLESS)


def seed_of(fields: Fields, name: str = "seed") -> int:
    """The seed of a request; one that differs from call to call if there is none, or -1."""
    seed = fields.integer(name, -1, -(2**63), SEEDS)
    return seed if seed >= 0 else uuid.uuid4().int % 2**63


def refuse_unsupported(fields: Fields, *names: str) -> None:
    """Raise Refused for a field whose effect a client would miss."""
    for name in names:
        if fields.body.get(name):
            raise fields.refused(name, "not supported by this server; leave it out")


def choices(request: TextRequest, count: int) -> list[Request]:
    """As many requests, each with a seed of its own."""
    return [replace(request, seed=(request.seed + i) % (SEEDS + 1)) for i in range(count)]


def choice_count(fields: Fields, name: str = "n") -> int:
    """How many choices are asked for."""
    return fields.integer(name, 1, 1, CHOICES)


def line_or_text(text: TextRequest, before: str, after: str | None, count: int = 1) -> list[Request]:
    """The line that is asked for if there is text behind the cursor, or the prompt spells it; else texts."""
    if after is not None:
        line: LineRequest | None = LineRequest(before, after)
    else:
        line = fill_in_the_middle(before)
    if line is None:
        return choices(replace(text, prompt=before), count)
    limit = text.max_tokens if text.max_tokens < ENDLESS else None
    return [replace(line, alternatives=count, max_tokens=limit, stop=text.stop, model=text.model)]


def open_files(fields: Fields, name: str) -> list[tuple[str, str]]:
    """The names and texts of other files in a request."""
    return [(file.text("filename"), file.text("text")) for file in fields.objects(name, FILES)]
