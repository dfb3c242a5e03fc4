"""Instruction examples: files of records to conversations, and these to ids of which the answers are trained on.

What a file holds is found by looking, and a bad row is an error that names it: a record that is guessed at or
passed over teaches something else than its writer meant.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dunes.data.records import form, rows
from dunes.plural import plural
from dunes.text.lines import line_parts
from dunes.text.templates import Conversation, Template, Turn, encode_segments
from dunes.text.tokenizer import Tokenizer

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
"""Who speaks, by the names that OpenAI's and ShareGPT's files have for it."""

ASKS_TOOLS = ("tools", "functions", "tool_calls", "function_call")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file as a conversation; `place` names file and line, or row, and `kind` is a key of KINDS."""

    turns: Conversation
    place: str
    kind: str = ""


@dataclass(frozen=True)
class Records:
    """What a file holds. `kind` is a key of KINDS, `form` how it is written, `blank` counts rows without text."""

    path: Path
    kind: str
    form: str
    rows: list[Record]
    blank: int = 0

    @property
    def detected(self) -> str:
        """One line: what was found, and as what it is read."""
        blank = f"; {self.blank} without text are passed over" if self.blank else ""
        records = plural(len(self.rows), "record")
        return f"{self.path}: {records} of {KINDS[self.kind].said}, in {self.form}{blank}"


@dataclass(frozen=True)
class Kind:
    """A form of record: what it is called, the keys by which it is known, and how it is read."""

    said: str
    keys: tuple[str, ...]
    read: Callable[[dict[str, Any]], Conversation]


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """`ids` (T,) int32, and `trained` (T,) bool: which of them are targets. `place` is where it came from.

    `window` counts the parts of a plain text, which share their ends; a conversation is whole, and has None.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    place: str = ""
    window: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


def read(path: Path | str, fields: Sequence[str] = ()) -> Records:
    """The records of a JSON list, of a file with one JSON object a line, gzipped or not, or of a parquet file.

    With `fields` these are read as plain text, whatever else there is. Raises ValueError that names the file, the
    line or row, what was expected and what was found.
    """
    path = Path(path)
    if fields:
        given = [*texts(path, fields)]
        made = [Record((Turn("text", text),), place, "text") for place, text in given if text]
        return Records(path, "text", form(path), made, len(given) - len(made))
    found = list(rows(path))
    if not found:
        raise ValueError(f"{path}: {NO_RECORDS}")
    kind = _tried(found[0][0], lambda: _known(found[0][1]))
    made = [Record(_tried(place, lambda row=row: _read(kind, row)), place, kind) for place, row in found]  # type: ignore[misc]
    return Records(path, kind, form(path), made)


def texts(path: Path, fields: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """The place and the text of each record, empty if it has none: of these fields, or of what `text_of` knows.

    Raises ValueError like `read`, and if no record has text.
    """
    take: Callable[[Any], str] | None = None
    some, seen = False, ""
    for place, row in rows(path, fields):
        if take is None:
            _, take = _tried(place, lambda row=row: text_of(row, fields))  # type: ignore[misc]
            seen = _keys(row)
        text = _tried(place, lambda take=take, row=row: take(row))  # type: ignore[misc]
        some = some or bool(text)
        yield place, text
    if take is None:
        raise ValueError(f"{path}: {NO_RECORDS}")
    if not some:
        expected = f"text in {_listed(fields)}" if fields else "records with text"
        raise ValueError(f"{path}: expected {expected}, found {seen}; {NAME_FIELD}")


NAME_FIELD = "name what to read with --text-field"
NO_RECORDS = "no records; expected a JSON list, or one JSON object a line"


def text_of(first: Any, fields: Sequence[str] = ()) -> tuple[str, Callable[[Any], str]]:
    """What is text in a file of which this is the first row, in words, and what takes it from a row.

    Several fields, and the turns of a conversation, are put together with a blank line between them. Raises
    ValueError for a row of no known kind.
    """
    if not fields:
        kind = _known(first)
        if kind != "text":
            return f"the texts of {KINDS[kind].said}", lambda row: _joined(t.full_text for t in _read(kind, row))
    fields = fields or ("text",)
    return _listed(fields), lambda row: _joined(_field(row, name) for name in fields)


def _known(row: Any) -> str:
    try:
        return _kind(row)
    except ValueError as error:
        raise ValueError(f"{error}; {NAME_FIELD}") from None


def _listed(fields: Sequence[str]) -> str:
    return f"the field{'s' if len(fields) > 1 else ''} {', '.join(fields)}"


def _field(row: Any, name: str) -> str:
    """The text in a field; empty if there is none."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {_type(row)}")
    return _text(row, name, "")


def _joined(parts: Iterable[str]) -> str:
    """The parts with a blank line between them; empty if they are blank."""
    return "\n\n".join(part for part in parts if part.strip())


def _keys(row: Any) -> str:
    return ", ".join(map(str, row))[:200] or "no keys" if isinstance(row, dict) else _type(row)


def _tried(place: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _kind(row: Any) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {_type(row)}")
    for name, kind in KINDS.items():
        if all(key in row for key in kind.keys):
            return name
    expected = "; or ".join(", ".join(kind.keys) for kind in KINDS.values())
    raise ValueError(f"expected the keys {expected}; found {', '.join(map(str, row))[:200] or 'none'}")


def _read(name: str, row: Any) -> Conversation:
    kind = KINDS[name]
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {_type(row)}")
    if missing := [key for key in kind.keys if key not in row]:
        raise ValueError(
            f"expected {kind.said}, as in the first row; found no {', '.join(missing)}, but "
            f"{', '.join(row)[:200] or 'no keys'}"
        )
    _without_tools(row)
    talk = kind.read(row)
    if not any(turn.role in ("assistant", "text") for turn in talk):
        raise ValueError(f"expected an answer, found {', '.join(t.role for t in talk[:9]) or 'no message'}")
    return talk


def _without_tools(row: dict[str, Any]) -> None:
    used = [key for key in ASKS_TOOLS if row.get(key)]
    if used:
        raise ValueError(f"{used[0]}: calls of tools are not supported; write them as text, or leave the row out")


def _text(row: dict[str, Any], key: str, given: str | None = None) -> str:
    """The text under the key, or what is given if there is none."""
    found = row.get(key)
    if found is None and given is not None:
        return given
    if not isinstance(found, str):
        raise ValueError(f"{key}: expected a text, found {_type(found)}")
    return _whole(key, found)


def _whole(key: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key}: half of a surrogate pair at character {error.start}") from None
    return text


def _type(found: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}.get(
        type(found), "a number"
    )


def _alpaca(row: dict[str, Any]) -> Conversation:
    asked = Turn("user", _text(row, "instruction"), _text(row, "input", ""))
    return asked, Turn("assistant", _text(row, "output"))


def _pair(row: dict[str, Any]) -> Conversation:
    return Turn("user", _text(row, "prompt")), Turn("assistant", _text(row, "completion"))


def _messages(row: dict[str, Any]) -> Conversation:
    return tuple(_message(m, f"message {i}") for i, m in enumerate(_list(row, "messages"), 1))


def _message(found: Any, place: str, role: str = "role", content: str = "content") -> Turn:
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected an object with {role} and {content}, found {_type(found)}")
    return _tried(place, lambda: Turn(_role(found, role), _content(found, content), "", _weight(found)))  # type: ignore[no-any-return]


def _role(message: dict[str, Any], key: str) -> str:
    _without_tools(message)
    role = message.get(key)
    if role in ("tool", "function", "observation", "function_call"):
        raise ValueError(f"{key}: {role!r}: calls of tools are not supported; write them as text")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{key}: expected one of {', '.join(ROLES)}, found {str(role)[:40]!r}")
    if used := [key for key in THOUGHTS if message.get(key)]:
        raise ValueError(f"{used[0]}: thoughts beside the content are not supported; write them into it")
    return ROLES[role]


def _content(message: dict[str, Any], key: str) -> str:
    """A text, or OpenAI's list of parts that are all texts."""
    found = message.get(key)
    if not isinstance(found, list):
        return _text(message, key)
    for part in found:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _type(part)
            raise ValueError(f"{key}: expected parts of type 'text', found {str(kind)[:40]!r}")
    return "".join(_text(part, "text") for part in found)


def _weight(message: dict[str, Any]) -> bool:
    """OpenAI's mark of an answer that is context only: weight 0."""
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"weight: expected 0 or 1, found {str(weight)[:40]}")
    return weight != 0


def _list(row: dict[str, Any], key: str) -> list[Any]:
    found = row[key]
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"{key}: expected a list of messages, found {_type(found) if found != [] else 'an empty one'}"
        )
    return found


def _sharegpt(row: dict[str, Any]) -> Conversation:
    said = _list(row, "conversations")
    keys = ("from", "value") if not (isinstance(said[0], dict) and "role" in said[0]) else ("role", "content")
    return tuple(_message(m, f"message {i}", *keys) for i, m in enumerate(said, 1))


def _ultrachat(row: dict[str, Any]) -> Conversation:
    texts = _list(row, "data")
    sides = ("user", "assistant")
    for i, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"data: text {i}: expected a text, found {_type(text)}")
    return tuple(Turn(sides[i % 2], _whole("data", text)) for i, text in enumerate(texts))


def _plain(row: dict[str, Any]) -> Conversation:
    if not (text := _text(row, "text")):
        raise ValueError("text: expected some, found none")
    return (Turn("text", text),)


KINDS = {
    "messages": Kind("chats (messages)", ("messages",), _messages),
    "sharegpt": Kind("ShareGPT (conversations)", ("conversations",), _sharegpt),
    "alpaca": Kind("Alpaca (instruction, input, output)", ("instruction", "output"), _alpaca),
    "completion": Kind("prompts and completions", ("prompt", "completion"), _pair),
    "ultrachat": Kind("UltraChat (data)", ("data",), _ultrachat),
    "text": Kind("plain text", ("text",), _plain),
}
"""The forms of records, in the order in which they are tried."""


def split(rows: Sequence[Record], share: float = 0.05) -> tuple[list[Record], list[Record]]:
    """Records to learn from and to validate on: about `share` of them, of several at least one, never all.

    A hash of what is said decides, spaces aside, so that a record is on the same side in every run and with
    every tokenizer, and all its copies with it. Without two different records none is for validation.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share for validation is at least 0 and below 1, not {share}")
    places = [hashed(row.turns) for row in rows]
    different = sorted(set(places))
    if not share or len(different) < 2:
        return list(rows), []
    limit = validation_limit(different[0], different[-1], share)
    sides = [place < limit for place in places]
    train = [row for row, held in zip(rows, sides, strict=True) if not held]
    return train, [row for row, held in zip(rows, sides, strict=True) if held]


def validation_limit(least: float, most: float, share: float) -> float:
    """Below which hash records validate: about `share` of them, and of different ones some on each side."""
    return min(max(share, float(np.nextafter(least, 1))), most) if least < most else 0.0


def hashed(talk: Conversation) -> float:
    """Where the words fall in [0, 1): the digest of their JSON, a list for each turn."""
    words = blake2b(digest_size=6)
    for i, turn in enumerate(talk):
        words.update(f"{', ' if i else '['}[{json.dumps(turn.role)}".encode())
        for part in chain(line_parts(turn.text), (None,), line_parts(turn.input)):
            listed = [None] if part is None else part.split()
            words.update(f", {json.dumps(listed)[1:-1]}".encode() if listed else b"")
        words.update(b"]")
    words.update(b"]" if talk else b"[]")
    return int.from_bytes(words.digest()) / 2**48


def tokenized(
    rows: Sequence[Record], template: Template, tokenizer: Tokenizer, train_on: str = "answers"
) -> Iterator[Example]:
    """The records as ids. Answers and the tokens that end them are trained on; with "all", all but the begin.

    Raises ValueError that names the record which the template has no form for, and, before the first one, the
    tokens that the template needs and the tokenizer has not.
    """
    if train_on not in ("answers", "all"):
        raise ValueError(f"train_on is 'answers' or 'all', not {train_on!r}")
    template.check_tokenizer(tokenizer)
    # A text may be large, and is written as it is: only whether the template has plain texts is asked.
    talks = [row.turns if row.turns[-1].role != "text" else (Turn("text", ""),) for row in rows]
    written = template.render(talks)
    for row in rows:
        yield _tried(row.place, lambda row=row: _example(next(written), tokenizer, train_on, row))  # type: ignore[misc]


def _example(pieces: Any, tokenizer: Tokenizer, train_on: str, row: Record) -> Example:
    if row.turns[-1].role == "text":
        return _text_example(row, tokenizer)
    ids, trained = encode_segments(pieces, tokenizer, train_on == "all")
    return Example(np.array(ids, np.int32), np.array(trained, bool), row.place)


def _text_example(row: Record, tokenizer: Tokenizer) -> Example:
    """What `encoded` gives for a plain text, which may be too long for lists of Python's numbers."""
    parts = tokenizer.encode_document(line_parts(row.turns[-1].text))
    begin, end = (np.array(ids, np.int32) for ids in (tokenizer.document_start, [tokenizer.eos]))
    ids = np.concatenate([begin, *(np.array(part, np.int32) for part in parts), end])
    return Example(ids, np.arange(len(ids)) >= len(begin), row.place, 0)


def coloured(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The text of an example in parts, each with whether it is trained on; special tokens are spelled out.

    Parts are cut where training begins or ends, and the text of each is decoded as a whole.
    """
    edges = np.flatnonzero(np.diff(example.trained)) + 1
    runs = np.split(example.ids, edges)
    return [
        (_shown(ids.tolist(), tokenizer), bool(flag))
        for ids, flag in zip(runs, example.trained[[0, *edges]], strict=True)
        if len(ids)
    ]


def _shown(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text, with special tokens as they are spelled."""
    special = {i: t.content for i, t in tokenizer.inner.get_added_tokens_decoder().items() if t.special}
    text = ""
    plain: list[int] = []
    for i in ids:
        if i in special:
            text, plain = text + tokenizer.decode(plain) + special[i], []
        else:
            plain.append(i)
    return text + tokenizer.decode(plain)
