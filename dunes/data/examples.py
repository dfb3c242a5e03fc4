"""Instruction examples: files of records to conversations, and these to ids of which the answers are trained on.

What a file holds is found by looking, and a bad row is an error that names it: a record that is guessed at or
passed over teaches something else than its writer meant.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dunes.text.plural import plural
from dunes.text.templates import Talk, Template, Turn, encoded
from dunes.text.tokenizer import Tokenizer

LIMIT_ROW, LIMIT_LIST = 1 << 24, 1 << 31
"""The longest line, and the longest file that is one JSON list, in bytes."""

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
    """One row of a file as a conversation; `place` names file and line, or row."""

    talk: Talk
    place: str


@dataclass(frozen=True)
class Records:
    """What a file holds. `kind` is a key of KINDS, `form` how it is written."""

    path: Path
    kind: str
    form: str
    rows: list[Record]

    @property
    def detected(self) -> str:
        """One line: what was found, and as what it is read."""
        return f"{self.path}: {plural(len(self.rows), 'record')} of {KINDS[self.kind].said}, in {self.form}"


@dataclass(frozen=True)
class Kind:
    """A form of record: what it is called, the keys by which it is known, and how it is read."""

    said: str
    keys: tuple[str, ...]
    read: Callable[[dict[str, Any]], Talk]


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """`ids` (T,) int32, and `trained` (T,) bool: which of them are targets. `place` is where it came from."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    place: str = ""

    def __len__(self) -> int:
        return len(self.ids)


def read(path: Path | str) -> Records:
    """The records of a JSON list or of a file with one JSON object a line, gzipped or not.

    Raises ValueError that names the file, the line or row, what was expected and what was found.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            listed = _first(file) == b"["
            rows = list(_listed(path, file) if listed else _lines(path, file))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no records; expected a JSON list, or one JSON object a line")
    kind = _tried(rows[0][0], lambda: _kind(rows[0][1]))
    made = [Record(_tried(place, lambda row=row: _read(kind, row)), place) for place, row in rows]  # type: ignore[misc]
    return Records(path, kind, "a JSON list" if listed else "JSON lines", made)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unzipped if it begins as gzip's do."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        inner: Any = gzip.GzipFile(fileobj=file) if zipped else file
        with io.BufferedReader(inner) as buffered:
            yield buffered


def _first(file: BinaryIO) -> bytes:
    """The first byte that is neither blank nor of a byte order mark; the file begins anew afterwards."""
    start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    file.seek(0)
    return start


def _listed(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    data = file.read(LIMIT_LIST + 1)
    if len(data) > LIMIT_LIST:
        raise ValueError(f"{path}: a list of more than {LIMIT_LIST} bytes; write one JSON object a line")
    rows = _json(str(path), data)
    for i, row in enumerate(rows, 1):
        yield f"{path}, row {i}", row


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(LIMIT_ROW + 1):
        number += 1
        place = f"{path}, line {number}"
        if len(line) > LIMIT_ROW:
            raise ValueError(f"{place}: more than {LIMIT_ROW} bytes; expected a JSON object a line")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield place, _json(place, line)


def _json(place: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}; expected a JSON object a line, or one list") from None


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


def _read(name: str, row: Any) -> Talk:
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


def _alpaca(row: dict[str, Any]) -> Talk:
    asked = Turn("user", _text(row, "instruction"), _text(row, "input", ""))
    return asked, Turn("assistant", _text(row, "output"))


def _pair(row: dict[str, Any]) -> Talk:
    return Turn("user", _text(row, "prompt")), Turn("assistant", _text(row, "completion"))


def _messages(row: dict[str, Any]) -> Talk:
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


def _sharegpt(row: dict[str, Any]) -> Talk:
    said = _list(row, "conversations")
    keys = ("from", "value") if not (isinstance(said[0], dict) and "role" in said[0]) else ("role", "content")
    return tuple(_message(m, f"message {i}", *keys) for i, m in enumerate(said, 1))


def _ultrachat(row: dict[str, Any]) -> Talk:
    texts = _list(row, "data")
    sides = ("user", "assistant")
    for i, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"data: text {i}: expected a text, found {_type(text)}")
    return tuple(Turn(sides[i % 2], _whole("data", text)) for i, text in enumerate(texts))


def _plain(row: dict[str, Any]) -> Talk:
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
    places = [_hashed(row.talk) for row in rows]
    different = sorted(set(places))
    if not share or len(different) < 2:
        return list(rows), []
    # A limit that leaves one on each side, whatever the hashes are.
    limit = min(max(share, np.nextafter(different[0], 1)), different[-1])
    sides = [place < limit for place in places]
    train = [row for row, held in zip(rows, sides, strict=True) if not held]
    return train, [row for row, held in zip(rows, sides, strict=True) if held]


def _hashed(talk: Talk) -> float:
    """Where the words fall in [0, 1)."""
    words = [[t.role, *t.text.split(), None, *t.input.split()] for t in talk]
    return int.from_bytes(blake2b(json.dumps(words).encode(), digest_size=6).digest()) / 2**48


def tokenized(
    rows: Sequence[Record], template: Template, tokenizer: Tokenizer, train_on: str = "answers"
) -> Iterator[Example]:
    """The records as ids. Answers and the tokens that end them are trained on; with "all", all but the begin.

    Raises ValueError that names the record which the template has no form for, and, before the first one, the
    tokens that the template needs and the tokenizer has not.
    """
    if train_on not in ("answers", "all"):
        raise ValueError(f"train_on is 'answers' or 'all', not {train_on!r}")
    template.check(tokenizer)
    written = template.write([row.talk for row in rows])
    for row in rows:
        yield _tried(row.place, lambda place=row.place: _example(next(written), tokenizer, train_on, place))  # type: ignore[misc]


def _example(pieces: Any, tokenizer: Tokenizer, train_on: str, place: str) -> Example:
    ids, trained = encoded(pieces, tokenizer, train_on == "all")
    return Example(np.array(ids, np.int32), np.array(trained, bool), place)


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
