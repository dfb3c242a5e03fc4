"""How a protocol's request is read, and the fields that several protocols share."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import accumulate
from typing import Any, NamedTuple

from dunes.serve.fields import CHOICES, FILES, Fields, Refused
from dunes.serve.requests import ENDLESS, Answer, LineRequest, Request, TextRequest, fill_in_the_middle

REFERENCE = json.loads(files("dunes.serve").joinpath("reference.json").read_text())
"""What the reference server says and this one has not: neutral settings, and properties."""
SEEDS = 2**64 - 1
PROMPTS = 48
"""Choices of all prompts of one request at most, so that others find room in the queue."""
OPEN = 256_000
"""Characters of open files that a request may bring along; the last ones count."""


@dataclass(frozen=True)
class Asked:
    """What a body asks for: a line with alternatives, or texts, each of which is a choice of the reply."""

    fields: Fields
    requests: Sequence[Request]
    model: str = ""
    """The name of the model, as the client spells it."""
    stream: bool = False
    id: str = ""
    created: int = 0

    @property
    def first_choices(self) -> list[int]:
        """The index of each request's first choice."""
        counts = [r.alternatives if isinstance(r, LineRequest) else 1 for r in self.requests]
        return [0, *accumulate(counts)][:-1]


class Protocol(NamedTuple):
    """A path's way of reading a body, and of writing answers by the index of their choice: all at once, or in a
    stream a part or the end of one. `end` follows the answers of a stream."""

    read: Callable[[Fields], Asked]
    write: Callable[[Asked, Mapping[int, Answer], bool], Any]
    form: str = "sse"
    """How a stream is written: sse, with `data: [DONE]` at its end, sse-bare without, or ndjson."""
    end: Callable[[Asked, Mapping[int, Answer]], Sequence[Any]] = lambda request, answers: ()


def asked(fields: Fields, requests: Sequence[Request], prefix: str, stream: bool | None = None) -> Asked:
    """The requests of a body with an id of their own."""
    stream = fields.flag("stream") if stream is None else stream
    if len(requests) > PROMPTS:
        raise fields.refused("prompt", f"{len(requests)} choices of all prompts; at most {PROMPTS}")
    return Asked(fields, requests, fields.text("model"), stream, prefix + uuid.uuid4().hex, int(time.time()))


def token_limit(fields: Fields, name: str, default: int = -1) -> int:
    """The number of new tokens: the server's own limit for -1 and for more than that."""
    count = fields.integer(name, default, -2, 2**63)
    return ENDLESS if count < 0 else min(count, ENDLESS)


def seed_of(fields: Fields, name: str = "seed") -> int:
    """The seed of a request; one that differs from call to call if there is none, or -1."""
    seed = fields.integer(name, -1, -(2**63), SEEDS)
    return seed if seed >= 0 else uuid.uuid4().int % 2**63


def refuse_unsupported(fields: Fields, *names: str) -> None:
    """Raise Refused for a field whose effect a client would miss, unless its value is the one without effect."""
    for name in names:
        value = fields.body.get(name)
        if value and value not in (REFERENCE["settings"].get(name), {"type": "text"}):
            raise fields.refused(name, "not supported by this server; leave it out")


def choices(request: TextRequest, count: int) -> list[Request]:
    """As many requests, each with a seed of its own."""
    return [replace(request, seed=(request.seed + i) % (SEEDS + 1)) for i in range(count)]


def choice_count(fields: Fields, name: str = "n") -> int:
    """How many choices are asked for."""
    return fields.integer(name, 1, 1, CHOICES)


def line_or_text(text: TextRequest, before: str, after: str | None, count: int = 1) -> list[Request]:
    """The line that is asked for if there is text behind the cursor, or the prompt spells it; else texts.

    Nothing for a line of no tokens.
    """
    if after is not None:
        line: LineRequest | None = LineRequest(before, after)
    else:
        line = fill_in_the_middle(before)
    if line is None:
        return choices(replace(text, prompt=before), count)
    if text.echo or text.logprobs is not None:
        raise Refused(400, "log-probabilities and echo are not supported for the rest of a line; leave them out")
    limit = text.max_tokens if text.max_tokens < ENDLESS else None
    if limit == 0:
        return []
    return [replace(line, alternatives=count, max_tokens=limit, stop=text.stop, model=text.model)]


def open_files(fields: Fields, name: str) -> list[tuple[str, str]]:
    """The names and texts of other files in a request: the last ones, of which there is room for."""
    files, room = list[tuple[str, str]](), OPEN
    for file in reversed([(each.path("filename"), each.text("text")) for each in fields.objects(name, FILES)]):
        room -= len(file[1])
        if room >= 0:
            files.insert(0, file)
    return files
