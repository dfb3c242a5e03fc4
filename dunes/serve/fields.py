"""The fields of a request's JSON, each validated before it is used."""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from types import UnionType
from typing import Any, TypeVar

from dunes.files.json_file import unique_keys
from dunes.text.chat_template import REASONING_KEYS
from dunes.text.lines import valid_text
from dunes.text.templates import Conversation, Turn, map_strings

BODY = 4 << 20
"""Maximum bytes of a request's body."""
PATH = 4_096
"""Maximum characters of a path."""
STOPS = 64
"""Maximum number of stop strings."""
STOP = 1_000
"""Maximum characters of a stop string."""
CHOICES = 4
"""Maximum number of choices."""
BEAMS = 8
"""Maximum number of beams of a line search."""
FILES = 64
"""Maximum number of open files."""
ENDLESS = 4096
"""Maximum number of new tokens of an answer, even if the client asks for no limit."""
OPEN = 256_000
"""Maximum total characters of a request's open files. Of files with more characters in total, only the last ones
are used."""
SEEDS = 2**64 - 1
REFERENCE: dict[str, dict[str, Any]] = json.loads(files("dunes.serve").joinpath("reference.json").read_text())
"""Properties and settings that llama-server reports and this server lacks."""
NEUTRAL: Mapping[str, Sequence[Any]] = REFERENCE["unsupported"] | REFERENCE["neutral"]
"""Fields that change the generated text, with their neutral values. If a path does not read such a field, it
refuses all other values. Unread fields outside this table are ignored and listed in the reply."""
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "server_error",
    503: "unavailable_error",
}  # fmt: skip
"""Error types of llama-server by status; the type for any other status is invalid_request_error."""
Number = TypeVar("Number", int, float)


class Refused(Exception):
    """Raised to refuse a request; the reply has this status and message."""

    def __init__(self, status: int, message: str, error_type: str = "", retry: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.retry = status, message, retry
        error_type = error_type or KINDS.get(status, "invalid_request_error")
        self.content = {"code": status, "message": message, "type": error_type}


def parse(data: bytes) -> "Fields":
    """The fields of a body. Raises Refused unless the body is one JSON object without duplicate keys."""
    try:
        body = json.loads(data or b"{}", object_pairs_hook=unique_keys, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {_type_name(body)}; expected a JSON object")
    return Fields(body)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _type_name(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number")


class Fields:
    """The fields of a JSON object. Each method raises Refused, with the field's name, if the value has another
    type or is out of range; null counts as missing."""

    def __init__(self, body: Mapping[str, Any], place: str = "") -> None:
        self.body, self.place = body, place
        self._read, self._parts = set[str](), dict[str, Fields]()

    def has(self, name: str) -> bool:
        """True if the field is present, and not null."""
        return self.body.get(name) is not None

    def get(self, name: str) -> Any:
        """The value of a field of any type; marks the field as read."""
        self._read.add(name)
        return self.body.get(name)

    def first(self, *names: str) -> str:
        """The first of these names whose field is present; if none is present, the first of all."""
        return next(filter(self.has, names), names[0])

    def ignored(self) -> list[str]:
        """Paths of unread fields, like `options.seed`. Raises Refused if an unread field would change the text."""
        names = [name for name in self.body if self.has(name) and name not in self._read]
        for name in names:
            if name in NEUTRAL and self.body[name] not in NEUTRAL[name]:
                raise self.refusal(name, "not supported by this path; leave it out")
        own = [self.place + name for name in names if name not in NEUTRAL]
        return [*own, *(name for part in self._parts.values() for name in part.ignored())]

    def disregard(self, *names: str) -> None:
        """List these fields as ignored, even if they were read."""
        self._read.difference_update(names)
        for part in self._parts.values():
            part.disregard(*names)

    def text(self, name: str, default: str | None = "") -> str:
        """The string in a field, with U+FFFD for lone surrogates. If `default` is None, the field is required."""
        return valid_text(self._value(name, str, "a string", default))

    def path(self, *names: str) -> str:
        """The path of a file, from the first of these fields that is present."""
        name = self.first(*names)
        path = self.text(name)
        if len(path) > PATH or "\0" in path:
            raise self.refusal(name, f"not a path; expected at most {PATH} characters without NUL")
        return path

    def flag(self, name: str, default: bool = False) -> bool:
        """The value of a boolean field."""
        return bool(self._value(name, bool, "true or false", default))

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """The value of an integer field; refused unless it is from `low` to `high`."""
        value = self._value(name, int | float, "a whole number", default)
        if value % 1:
            raise self.refusal(name, "a number; expected a whole number")
        return self._check_bounds(name, int(value), low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """The value of a number field; refused unless it is from `low` to `high`."""
        value: float = self._value(name, int | float, "a number", default)
        return self._check_bounds(name, value, low, high)

    def limit(self, name: str, default: int = -1) -> int:
        """The maximum number of new tokens, at most ENDLESS; a negative value means ENDLESS."""
        count = self.integer(name, default, -2, 2**63)
        return ENDLESS if count < 0 else min(count, ENDLESS)

    def seed(self, name: str = "seed") -> int:
        """The seed of a request; a random seed if the field is missing or negative."""
        seed = self.integer(name, -1, -(2**63), SEEDS)
        return seed if seed >= 0 else uuid.uuid4().int % 2**63

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """The stop strings in a field, which is a string or a list of strings; empty strings are dropped."""
        value, expected = self.get(name), f"a string, or a list of at most {STOPS}"
        values = [value] if isinstance(value, str) else self._value(name, list, expected, [])
        if len(values) > STOPS:
            raise self.refusal(name, f"{len(values)} strings; expected {expected}")
        for stop in values:
            if not isinstance(stop, str) or len(stop) > STOP:
                raise self.refusal(name, f"not a string of at most {STOP} characters: {str(stop)[:20]!a}")
        return tuple(valid_text(stop) for stop in values if stop)

    def items(self, name: str, most: int) -> list[Any]:
        """The value of a list field, with at most `most` entries."""
        value: list[Any] = self._value(name, list, "a list", [])
        if len(value) > most:
            raise self.refusal(name, f"{len(value)} values; at most {most}")
        return value

    def objects(self, name: str, most: int) -> list["Fields"]:
        """The objects in a list field with at most `most` entries."""
        values = self.items(name, most)
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.refusal(f"{name}[{i}]", f"{_type_name(value)}; expected an object")
        parts = {f"{name}[{i}]": Fields(value, f"{self.place}{name}[{i}].") for i, value in enumerate(values)}
        self._parts |= parts
        return [*parts.values()]

    def object(self, name: str) -> "Fields":
        """The fields of the object in a field; empty if the field is missing."""
        value = self._value(name, dict, "an object", {})
        return self._parts.setdefault(name, Fields(value, f"{self.place}{name}."))

    def messages(self, name: str = "messages") -> Conversation:
        """The messages of a chat in OpenAI's format; each content is a string or a list of text parts."""
        return tuple(self._message(f"{name}[{i}]", m) for i, m in enumerate(self.objects(name, 4096)))

    def _message(self, place: str, message: "Fields") -> Turn:
        # Imported late, since `data.examples` imports torch, and `dunes doctor` does not need torch.
        from dunes.data.examples import CALL_KEYS, RESULT_KEYS, ROLES, read_message

        role = message.text("role", None)
        try:
            body = map_strings(message.body, valid_text)
            turn = read_message(body | {"role": role if role in ROLES else "user"}, "a message")
        except ValueError as error:
            raise self.refusal(place, str(error).removeprefix("a message: ")) from None
        message._read.update(("content", *CALL_KEYS, *REASONING_KEYS, *RESULT_KEYS * (turn.role == "tool")))
        return turn if role in ROLES else replace(turn, role=role)

    def open_files(self, name: str) -> list[tuple[str, str]]:
        """Names and texts of other open files: the last files that fit into OPEN characters."""
        files, room = list[tuple[str, str]](), OPEN
        for file in reversed([(part.path("filename"), part.text("text")) for part in self.objects(name, FILES)]):
            room -= len(file[1])
            if room >= 0:
                files.insert(0, file)
        return files

    def refusal(self, name: str, why: str) -> Refused:
        """The error that refuses a request because of this field, for the reason `why`."""
        return Refused(400, f"Field '{self.place}{name}': {why}")

    def _value(self, name: str, value_type: type | UnionType, expected: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise Refused(400, f"key '{self.place}{name}' not found")
        if not isinstance(value, value_type) or isinstance(value, bool) != (value_type is bool):
            raise self.refusal(name, f"{_type_name(value)}; expected {expected}")
        return value

    def _check_bounds(self, name: str, value: Number, low: float, high: float) -> Number:
        if not (low <= value <= high) or not math.isfinite(value):
            raise self.refusal(name, f"Value must be between {low} <= value <= {high}, but got {str(value)[:40]}")
        return value
