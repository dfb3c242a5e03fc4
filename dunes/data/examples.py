"""Convert records to conversations, and conversations to finetuning examples: ids and a loss mask for answers.

The format of a file is detected from its first row. An invalid row raises an error that names the row.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, cycle, groupby, takewhile
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dunes.data.duplicates import LARGE, group_duplicates
from dunes.data.records import DECODER, file_format, rows
from dunes.text.chat_template import REASONING_KEYS
from dunes.text.lines import line_parts
from dunes.text.templates import (
    ANSWER_ROLES,
    EQUAL_ROLES,
    NO_FIELDS,
    Conversation,
    Template,
    Turn,
    encode_segments,
)
from dunes.text.tokenizer import Tokenizer
from dunes.units import plural

T = TypeVar("T")

ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
"""Maps each role of OpenAI's, ShareGPT's and OASST's formats to the role of a `Turn`."""

CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's roles for tool calls; the text of such a message is one tool call or a list of them, in JSON."""

CALL_KEYS = ("tool_calls", "function_call")
"""Keys of tool calls in a message; only answers have them."""
RESULT_KEYS = ("name", "tool_call_id")
"""Keys of further fields of a message; only messages with the role `tool` have them."""

SYSTEM_KEYS = ("system", "system_prompt", "system_message")
"""Keys under which a row may have a system prompt beside its conversation or task."""

ALPACA, DOLLY = ("instruction", "input", "output"), ("instruction", "context", "response")
PAIR, QUESTION = ("prompt", "completion"), ("question", "answer")
TREE = ("message_id", "parent_id", "text", "role", "rank")
"""Keys of rows: of Alpaca, of Dolly, of prompts and completions, of GSM8K, and of OASST's messages."""

VARIABLES = "chat_template_kwargs"
"""Key of a row's additional variables for the chat template."""

LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys with which OpenAI, axolotl and ms-swift exclude a message from the loss."""

TOOL_KEYS = ("tools", "functions")
"""Keys of a row's tools: a list of OpenAI's schemas, or this list as JSON."""

_Unusable = tuple[Sequence[str], Callable[[Any], bool], str]
_MEDIA: _Unusable = (
    ("images", "image", "videos", "video", "audios", "audio"),
    lambda value: value is not False,
    "only text is supported; leave the row out",
)
_UNLEARNED = "false excludes a row from training; leave the row out"
UNUSABLE_IN_ROWS: tuple[_Unusable, ...] = (
    _MEDIA,
    (("weight",), lambda value: value != 1, "rows cannot be weighted; leave it out, or repeat the row"),
    (("mask",), lambda value: ROLES.get(str(value).lower()) != "user", "only prompts can be masked; leave it out"),
    (("label",), lambda value: value is False, _UNLEARNED),  # a label 0 may be a class
    (("kto_tag", *LOSS_KEYS[1:]), lambda value: value in (0, "false", "False", "0"), _UNLEARNED),
)
UNUSABLE_IN_MESSAGES: tuple[_Unusable, ...] = (
    _MEDIA,
    (
        ("mask", "masked", "train_detail", "loss_scale"),
        lambda value: value is not False,
        "only whole messages can be excluded from the loss; expected train: false, or weight: 0",
    ),
    (("refusal",), lambda value: value is not False, "write a refusal into the content"),
)
"""Unsupported fields: their keys, a predicate that is True for values to refuse, and the error message. Other
values are ignored; `Records.ignored` lists these fields, except `weight` and `mask`."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file as a conversation. `place` is the file and the line or row.

    `format` is a key of RECORD_FORMATS. `variables` are additional variables for the chat template, such as
    `tools`. For a preference, `turns` are the prompt and the chosen answer, and `rejected` are the prompt and the
    rejected answer. Answers inside the prompt are not trained on. `seen` is `Example.seen`; it is set after the
    record is tokenized.
    """

    turns: Conversation
    place: str
    format: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    rejected: Conversation = ()
    seen: bytes = b""


@dataclass(frozen=True)
class Records:
    """The records of a file. `format` is a key of RECORD_FORMATS; `blank` is the number of rows without text.

    `ignored` are the names of fields, in rows or in messages, that have no effect.
    """

    path: Path
    format: str
    file_format: str
    rows: list[Record] = field(repr=False)
    blank: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """One line: the number of records and their format."""
        blank = f"; {self.blank} without text skipped" if self.blank else ""
        records = plural(len(self.rows), "record")
        return f"{self.path}: {records} of {RECORD_FORMATS[self.format].description}, in {self.file_format}{blank}"


@dataclass(frozen=True)
class RecordFormat:
    """A record format: description, keys that identify it, the function that reads a row, and optional keys.

    A row with a value under a key in `refused` raises ValueError, since the format does not read this value.
    `gather` makes the rows that `read` reads from the rows of a file; both are pairs (place, row).
    """

    description: str
    keys: tuple[str, ...]
    read: Callable[[dict[str, Any]], Conversation]
    options: tuple[str, ...] = ()
    refused: tuple[str, ...] = ("history",)
    gather: Callable[[Iterable[tuple[str, Any]]], Iterable[tuple[str, Any]]] = iter

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of a row that have an effect."""
        common = () if self.keys == ("text",) else (*SYSTEM_KEYS, *TOOL_KEYS, VARIABLES)
        return (*self.keys, *self.options, *common)


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """The `ids` (T,), int32, of a record, and `loss_mask` (T,), bool, True for targets. `place` is its location.

    `window_index` numbers the windows of a plain text (None for conversations); windows overlap by one id. For a
    preference, `ids` are the prompt and the chosen answer, and `rejected` is the example of the rejected answer.
    `seen` is a digest of the words of a rendered conversation or a preference's prompt; plain text has none.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    place: str = ""
    window_index: int | None = None
    rejected: "Example | None" = None
    seen: bytes = b""

    def __len__(self) -> int:
        return max(len(side.ids) for side in self.sides)

    @property
    def sides(self) -> "tuple[Example, ...]":
        """The example itself; for a preference, also the rejected example."""
        return (self,) if self.rejected is None else (self, self.rejected)

    def targets(self, context_length: int) -> int:
        """Number of targets that remain if the example is truncated to `context_length` + 1 ids.

        For a preference, the result is the sum for both sides. If one side has no target, or the truncated sides
        are equal, the result is 0 and the pair is skipped.
        """
        counts = [int(side.loss_mask[1 : context_length + 1].sum()) for side in self.sides]
        equal = len({side.ids[: context_length + 1].tobytes() for side in self.sides}) < len(self.sides)
        return sum(counts) if all(counts) and not equal else 0


def read_records(path: Path | str, fields: Sequence[str] = (), names: Mapping[str, str] | None = None) -> Records:
    """The records of a JSON list or JSON lines (plain or gzipped), or of a CSV, TSV or parquet file.

    With `fields`, only these fields are read, as plain text. `names` maps fields of RECORD_FORMATS to the file's
    field names; only formats that have all these fields are tried. Raises ValueError that names the file, the line
    or row, the expected value and the actual value.
    """
    path, names = Path(path), names or {}
    check_names(names)
    if fields:
        texts = [*record_texts(path, fields)]
        records = [Record((Turn("text", text),), place, "text") for place, text in texts if text]
        return Records(path, "text", file_format(path), records, len(texts) - len(records))
    all_rows = list(rows(path, (), names))
    if not all_rows:
        raise ValueError(f"{path}: {NO_RECORDS}")
    first_place, first = all_rows[0]
    name = _at(first_place, _known_format, first, names, f"{NAME_FIELD}, or map the names with --fields")
    records = [_at(place, _record, name, row, place) for place, row in RECORD_FORMATS[name].gather(all_rows)]
    ignored = dict.fromkeys(key for _, row in all_rows for key in _ignored_fields(name, row))
    return Records(path, name, file_format(path), records, ignored=(*ignored,))


def record_texts(
    path: Path, fields: Sequence[str] = (), names: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each record: the file and line, and the text, which may be empty.

    Arguments are as for `read_records`. Raises ValueError like `read_records`, and if no record has text.
    """
    check_names(names or {})
    remaining, has_text = rows(path, fields, names), False
    if (first := next(remaining, None)) is None:
        raise ValueError(f"{path}: {NO_RECORDS}")
    _, read_text = _at(first[0], text_reader, first[1], fields, names or ())
    gather = iter if fields else RECORD_FORMATS[_known_format(first[1], names or ())].gather
    for place, row in gather(chain([first], remaining)):
        text = _at(place, read_text, row)
        has_text = has_text or bool(text)
        yield place, text
    if not has_text:
        expected = f"text in {_name_fields(fields)}" if fields else "records with text"
        raise ValueError(f"{path}: expected {expected}, found {_keys(first[1])}; {NAME_FIELD}")


NAME_FIELD = "name the field to read with --text-field"
NO_RECORDS = "no records; expected a JSON list, or one JSON object per line"


def text_reader(
    first: Any, fields: Sequence[str] = (), names: Collection[str] = ()
) -> tuple[str, Callable[[Any], str]]:
    """A description of the text in a file with the first row `first`, and a function that extracts a row's text.

    Several fields, or the turns of a conversation, are joined by blank lines. Only formats that have all fields in
    `names` are tried. Raises ValueError for a row of an unknown format.
    """
    if not fields:
        name = _known_format(first, names)
        if name != "text":
            return f"the texts of {RECORD_FORMATS[name].description}", partial(_chat_text, name)
    fields = fields or ("text",)
    return _name_fields(fields), lambda row: _join(_text(_typed(row, dict), name, "") for name in fields)


def _chat_text(name: str, row: Any) -> str:
    """The text of a conversation. Raises ValueError if it has tools, tool calls or reasoning."""
    turns = _read(name, row)
    if keys := [*["tools"] * bool(_tools(row)), *(key for turn in turns for key in turn.fields)]:
        raise ValueError(
            f"{keys[0]}: plain text cannot express it; use dunes finetune with a "
            "model whose own chat template can, or leave it out"
        )
    return _join(turn.full_text for turn in turns if turn.trained or turn.role not in ANSWER_ROLES)


def _name_fields(fields: Sequence[str]) -> str:
    return f"the field{'s' if len(fields) > 1 else ''} {', '.join(fields)}"


def _join(parts: Iterable[str]) -> str:
    """The nonblank parts joined by blank lines."""
    return "\n\n".join(part for part in parts if part.strip())


def _keys(row: Any) -> str:
    return ", ".join(map(str, row))[:200] or "no keys" if isinstance(row, dict) else _type(row)


def _at(place: str, read: Callable[..., T], *arguments: Any) -> T:
    """The result of `read(*arguments)`; `place` is put before the message of a ValueError."""
    try:
        return read(*arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None


def check_names(names: Collection[str]) -> None:
    """Raise ValueError unless all these names of --fields are fields of one record format."""
    if not any({*names} <= {*record_format.fields} for record_format in RECORD_FORMATS.values()):
        formats = "; or ".join(", ".join(record_format.fields) for record_format in RECORD_FORMATS.values())
        raise ValueError(f"--fields: no record format has all of {', '.join(names)}; expected {formats}")


def _known_format(row: Any, names: Collection[str] = (), remedy: str = NAME_FIELD) -> str:
    row = _typed(row, dict)
    formats = {name: f for name, f in RECORD_FORMATS.items() if {*names} <= {*f.fields}}
    for name, record_format in formats.items():
        if all(key in row for key in record_format.keys):
            return name
    expected = "; or ".join(", ".join(record_format.keys) for record_format in formats.values())
    raise ValueError(f"expected the keys {expected}; found {_keys(row)}; {remedy}")


def _read(name: str, row: Any) -> Conversation:
    record_format, row = RECORD_FORMATS[name], _typed(row, dict)
    if missing := [key for key in record_format.keys if key not in row]:
        raise ValueError(
            f"expected {record_format.description}, as in the first row; found no {', '.join(missing)}, but "
            f"{_keys(row)}"
        )
    if name == "text":
        return record_format.read(row)
    reason = "the format does not read this field; write it into the conversation, or leave the row out"
    _check_usable(row, (*UNUSABLE_IN_ROWS, (record_format.refused, bool, reason)))
    turns = record_format.read(row)
    turns = (*_system(row, turns), *turns)
    if not any(turn.role in ANSWER_ROLES for turn in turns):
        raise ValueError(f"expected an answer, found {', '.join(t.role for t in turns[:9]) or 'no message'}")
    if turns[-1].role not in ANSWER_ROLES and not _is_blank(row.get("chosen")):
        raise ValueError("chosen: rejected is missing; add it, or write the chosen answer as the last message")
    return turns


def _record(name: str, row: Any, place: str) -> Record:
    turns = _read(name, row)
    rejected: Conversation = ()
    if name == "preference":
        rejected = _preference(row)[1]
        rejected = (*_system(row, rejected), *rejected)
    return Record(turns, place, name, {} if name == "text" else _variables(row), rejected)


def _is_blank(value: Any) -> bool:
    """True for an empty value, and for a string of empty JSON, which LLaMA-Factory writes for missing tools."""
    return value is None or value in ("", [], {}, "[]", "{}", "null")


def _check_usable(values: dict[str, Any], unusable: Iterable[_Unusable]) -> None:
    for keys, asks, reason in unusable:
        if found := [key for key in keys if not _is_blank(values.get(key)) and asks(values[key])]:
            raise ValueError(f"{found[0]}: {reason}")


def _one(values: Mapping[str, Any], keys: Iterable[str], noun: str) -> str | None:
    """The first key with a value; None if there is none. Raises ValueError if two keys have different values."""
    given = [key for key in keys if not _is_blank(values.get(key))]
    if any(values[key] != values[given[0]] for key in given):
        raise ValueError(f"{' and '.join(given)}: two different {noun}; leave one of them out")
    return next(iter(given), None)


def _system(row: dict[str, Any], turns: Conversation) -> Conversation:
    """The system message from a field of the row; empty if there is none, or if the conversation has one."""
    texts = {key: text for key in SYSTEM_KEYS if (text := _text(row, key, "")).strip()}
    own = [turn.text for turn in turns[:1] if EQUAL_ROLES.get(turn.role, turn.role) == "system"]
    given = texts | dict(zip(["the system message"], own, strict=False))
    key = _one(given, given, "system prompts")
    return () if own or key is None else (Turn("system", texts[key]),)


def _variables(row: dict[str, Any]) -> dict[str, Any]:
    value = {} if _is_blank(row.get(VARIABLES)) else _typed(row[VARIABLES], dict, VARIABLES)
    variables = {name: item for name, item in value.items() if item is not None}
    if tools := _tools(row):
        if "tools" in variables:
            raise ValueError(f"tools and the tools of {VARIABLES}: leave one of them out")
        variables["tools"] = tools
    return variables


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of a row's tools in OpenAI's form; empty if it has none."""
    key = _one(row, TOOL_KEYS, "lists of tools")
    return _functions(key, _parse(key, row[key]), "tool") if key else []


def _functions(key: str, entries: Any, noun: str) -> list[dict[str, Any]]:
    """The tools or tool calls under a key of a row or message, in OpenAI's form.

    An entry may be a string of JSON, or only the function, without its enclosing object.
    """
    if not _typed(entries, list, key):
        raise ValueError(f"{key}: expected {noun}s, found an empty list")
    return [_at(f"{key}: {noun} {i}", _function, entry, noun) for i, entry in enumerate(entries, 1)]


def _function(entry: Any, noun: str) -> dict[str, Any]:
    entry = _typed(_parse(noun, entry), dict)
    if "function" not in entry:
        outer = {"type": "function"} | {key: entry[key] for key in ("id", "type") if key in entry}
        entry = outer | {"function": {key: value for key, value in entry.items() if key not in outer}}
    function = _typed(entry["function"], dict, "function")
    if not _text(function, "name"):
        raise ValueError("name: expected the name of a function, found an empty one")
    if noun == "call":  # OpenAI has JSON here, and templates expect an object
        if "arguments" not in function:
            raise ValueError(f"arguments: expected an object, or its JSON, found {_keys(function)}")
        arguments = _typed(_parse("arguments", function["arguments"] or "{}"), dict, "arguments")
        function = function | {"arguments": arguments}
    return {**entry, "function": function}


def _parse(key: str, value: Any) -> Any:
    """The value, decoded if it is a string of JSON."""
    try:
        return DECODER.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: not JSON: {error}; found {value[:40]!r}") from None


def _ignored_fields(name: str, row: dict[str, Any]) -> Iterator[str]:
    """Names of fields of a row, and of its messages, that have a value but no effect."""
    record_format, weights = RECORD_FORMATS[name], ("weight", "mask")
    used = {*record_format.fields, *(weights if name != "text" else ())}
    yield from (key for key, value in row.items() if key not in used and not _is_blank(value))
    parts = [row.get(key) for key in (*record_format.keys, *record_format.options)]
    for message in chain.from_iterable(part if isinstance(part, list) else [part] for part in parts):
        if isinstance(message, dict):
            is_result = "tool" in (ROLES.get(str(message.get(key))) for key in ("role", "from"))
            used = {"role", "from", "content", "value", *LOSS_KEYS, *CALL_KEYS, *REASONING_KEYS, "mask"}
            used.update(RESULT_KEYS if is_result else ())
            yield from (
                f"{key} (of messages)" for key, v in message.items() if key not in used and not _is_blank(v)
            )


def ignored_line(files: Iterable[Records]) -> list[str]:
    """A list with one line that names the ignored fields of all files; empty if no field is ignored."""
    names = ", ".join(dict.fromkeys(key for records in files for key in records.ignored))[:400]
    return [f"ignored fields: {''.join(c if c.isprintable() else ' ' for c in names)}"] if names else []


def _typed(value: Any, kind: type[T], key: str = "") -> T:
    """Return the value. Raises ValueError for another type, and for a string with a lone surrogate."""
    place = f"{key}: " if key else ""
    if not isinstance(value, kind):
        raise ValueError(f"{place}expected {TYPES[kind]}, found {_type(value)}")
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}lone surrogate at character {error.start}") from None
    return value


def _text(row: dict[str, Any], key: str, default: str | None = None) -> str:
    """The text under the key, or the default if the row has no value for the key."""
    value = row.get(key)
    return default if value is None and default is not None else _typed(value, str, key)


TYPES: Mapping[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number",
    type(None): "nothing",
}  # fmt: skip


def _type(value: Any) -> str:
    return TYPES.get(type(value), type(value).__name__)


def _task(keys: Sequence[str], row: dict[str, Any]) -> Conversation:
    """A task and its answer. `keys` are those of the task, of its input if it may have one, and of the answer."""
    task, *inputs, answer = keys
    turn = Turn("user", _text(row, task), "".join(_text(row, key, "") for key in inputs))
    return *_history(row), turn, Turn("assistant", _text(row, answer))


def _gather_threads(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield a row with `messages` for each of OASST's message trees with an answer, and the place of its root.

    From the root, the conversation goes on with the reply of the lowest rank, up to the last answer, as in QLoRA
    (https://arxiv.org/abs/2305.14314, appendix B). Replies without a rank come last.
    Raises ValueError for a reply to a message that is not in the file.
    """
    known, replies = set[str](), dict[str, list[tuple[float, int, str, dict[str, Any]]]]()
    for number, (place, row) in enumerate(rows):
        known.add(_at(place, _text, _at(place, _typed, row, dict), "message_id"))
        rank = inf if row.get("rank") is None else _at(place, float, str(row["rank"]))
        replies.setdefault(_at(place, _text, row, "parent_id", ""), []).append((rank, number, place, row))
    if lost := replies.keys() - known - {""}:
        place = replies[min(lost)][0][2]
        raise ValueError(f"{place}: parent_id: no message {min(lost)!r}; add it, or leave its replies out")
    for _, _, place, root in replies.pop("", ()):
        thread = [root]
        while below := replies.pop(thread[-1]["message_id"], None):  # a message has one place, so this ends
            thread.append(min(below)[3])
        turns = [{"role": row.get("role"), "content": row.get("text")} for row in thread]
        if turns := turns[: len(turns) - (turns[-1]["role"] != "assistant")]:
            yield place, {**root, "messages": turns}


def _preference(row: dict[str, Any]) -> tuple[Conversation, Conversation]:
    """The prompt with the chosen answer, and the prompt with the rejected answer.

    `chosen` and `rejected` are answers (text, a message, or messages) to a prompt, or complete conversations. The
    prompt of complete conversations is their common beginning. If the row also has a prompt whose text is not in
    the common beginning, ValueError is raised. Answers inside the prompt are not trained on.
    """
    prompt, chosen, rejected = _prompt(row), _answer(row, "chosen"), _answer(row, "rejected")
    size = min(_shared(chosen, rejected), max(len(chosen), len(rejected)) - 1)  # equal pairs are skipped later
    if not any(answer[:1] and answer[0].role == "assistant" for answer in (chosen, rejected)):
        if bad := {turn.full_text.strip() for turn in prompt} - {turn.full_text.strip() for turn in chosen[:size]}:
            raise ValueError(f"chosen and rejected do not begin with the prompt {min(bad)[:40]!r}")
        prompt, chosen, rejected, size = chosen[:size], chosen[size:], rejected[size:], 0
    if not prompt:
        raise ValueError("chosen and rejected: expected a prompt field, or equal messages at their beginning")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        roles = [turn.role for turn in answer] or ["none"]
        if {roles[0], roles[-1]} != {"assistant"} or len(answer) == size:
            raise ValueError(f"{key}: expected an answer after the shared messages, found {', '.join(roles[:9])}")
        if not answer[-1].trained:
            raise ValueError(f"{key}: its last answer is excluded from the loss; remove the mark or the row")
    prompt = tuple(replace(turn, trained=turn.role not in ANSWER_ROLES) for turn in (*prompt, *chosen[:size]))
    return (*prompt, *chosen[size:]), (*prompt, *rejected[size:])


def _shared(chosen: Conversation, rejected: Conversation) -> int:
    """Number of equal messages at the beginning of both sides of a preference; `trained` is not compared."""
    equal = (a == replace(b, trained=a.trained) for a, b in zip(chosen, rejected, strict=False))
    return sum(takewhile(bool, equal))


def _prompt(row: dict[str, Any]) -> Conversation:
    """The prompt fields of a preference record, as messages; empty if absent."""
    key = _one(row, ("conversations", "instruction", "prompt"), "prompts") or "prompt"
    if isinstance(row.get(key), list | dict):
        _check_usable(row, [(("input", "history"), bool, f"expected in {key}")])
        return _listed(row, key)
    text, task_input = _text(row, key, ""), _text(row, "input", "")
    return *_history(row), *(Turn("user", text, task_input) for text in [text] if text)


def _answer(row: dict[str, Any], key: str) -> Conversation:
    if isinstance(row[key], dict | list):
        return _listed(row, key)
    if (text := _text(row, key)).lstrip().startswith(("Human:", "Assistant:")):
        raise ValueError(f"{key}: a transcript; divide it into messages")
    return (Turn("assistant", text),)


def _listed(row: dict[str, Any], key: str) -> Conversation:
    """The messages under a key, in OpenAI's or ShareGPT's form; in a preference, also a single message."""
    messages = [row[key]] if isinstance(row[key], dict) and "chosen" in row else _typed(row[key], list, key)
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    sharegpt = "from" in first or (key == "conversations" and "role" not in first)
    keys = ("from", "value") if sharegpt else ("role", "content")
    return tuple(read_message(m, f"{key}, message {i}", *keys) for i, m in enumerate(messages, 1))


def _history(row: dict[str, Any]) -> Conversation:
    """The turns in LLaMA-Factory's field `history`, whose answers are also trained on."""
    pairs = [] if _is_blank(value := row.get("history")) else _typed(value, list, "history")
    if any(not isinstance(pair, list | tuple) or [*map(type, pair)] != [str, str] for pair in pairs):
        raise ValueError("history: expected pairs of strings, [user, assistant]")
    texts = (_typed(text, str, "history") for text in chain.from_iterable(pairs))
    return tuple(map(Turn, cycle(("user", "assistant")), texts))


def read_message(message: Any, place: str, role: str = "role", content: str = "content") -> Turn:
    """The turn of a message in OpenAI's or ShareGPT's format. Raises ValueError that names the place."""
    return _at(place, _turn, message, role, content)


def _turn(message: Any, role_key: str, content_key: str) -> Turn:
    _check_usable(_typed(message, dict), UNUSABLE_IN_MESSAGES)
    role = _role(message, role_key)
    trained = _is_trained(message, role)
    call_keys = (*CALL_KEYS, *[content_key] * (message[role_key] in CALL_ROLES))
    fields = _fields(message, role, call_keys)
    if "tool_calls" in fields and (content_key in call_keys or message.get(content_key) is None):
        return Turn(role, "", trained=trained, fields={**fields, "content": None})
    return Turn(role, _content(message, content_key), trained=trained, fields=fields or NO_FIELDS)


def _fields(message: dict[str, Any], role: str, call_keys: Sequence[str]) -> dict[str, Any]:
    """The additional fields of a message for a chat template; tool calls may be under any of `call_keys`."""
    given = [key for key in (*call_keys, *REASONING_KEYS) if not _is_blank(message.get(key))]
    if given and role != "assistant":
        raise ValueError(f"{given[0]}: expected in an assistant message, found in a {role} message")
    texts = [key for key in REASONING_KEYS if key in given]
    texts += [key for key in RESULT_KEYS if role == "tool" and not _is_blank(message.get(key))]
    fields: dict[str, Any] = {key: _text(message, key) for key in texts}
    if role == "assistant":
        _one(fields, fields, "reasonings")
    keys = [key for key in call_keys if key in given or key not in CALL_KEYS]
    _one(message, keys, "lists of calls")
    for key in keys:
        calls = _parse(key, message.get(key))
        fields["tool_calls"] = _functions(key, calls if isinstance(calls, list) else [calls], "call")
    return fields


def _role(message: dict[str, Any], key: str) -> str:
    role = message.get(key)
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{key}: expected one of {', '.join(ROLES)}, found {str(role)[:40]!r}")
    return ROLES[role]


def _content(message: dict[str, Any], key: str) -> str:
    """The message's text, which is a string or OpenAI's list of text parts."""
    if not isinstance(value := message.get(key), list):
        return _text(message, key)
    if bad := [part for part in value if not isinstance(part, dict) or part.get("type") != "text"]:
        raise ValueError(f"{key}: expected parts of type 'text', found {str(bad[0])[:40]!r}")
    return "".join(_text(part, "text") for part in value)


def _is_trained(message: dict[str, Any], role: str) -> bool:
    """False if a key of LOSS_KEYS excludes the message from the loss.

    A `weight` or `loss` of 1 on a prompt is accepted without effect. Raises ValueError for a prompt whose `train`
    or `training` is true.
    """
    values = {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            expected = "0 or 1" if key == "weight" else "true or false"
            raise ValueError(f"{key}: expected {expected}, found {str(value)[:40]}")
    _one(values, values, "marks")
    if role not in ANSWER_ROLES and (marks := [key for key in ("train", "training") if values.get(key)]):
        raise ValueError(f"{marks[0]}: {role} messages are trained on only with --train-on all; expected false")
    return all(values.values())


def _ultrachat(row: dict[str, Any]) -> Conversation:
    texts = (_typed(text, str, f"data, text {i}") for i, text in enumerate(_typed(row["data"], list, "data"), 1))
    return tuple(map(Turn, cycle(("user", "assistant")), texts))


def _plain_text(row: dict[str, Any]) -> Conversation:
    if not (text := _text(row, "text")):
        raise ValueError("text: expected a string, found an empty one")
    return (Turn("text", text),)


RECORD_FORMATS = {
    "preference": RecordFormat(
        "preferences (chosen, rejected)",
        ("chosen", "rejected"),
        lambda row: _preference(row)[0],
        ("prompt", "conversations", "instruction", "input", "history"),
        (),
    ),
    "messages": RecordFormat("chats (messages)", ("messages",), partial(_listed, key="messages")),
    "sharegpt": RecordFormat(
        "ShareGPT (conversations)", ("conversations",), partial(_listed, key="conversations")
    ),
    "alpaca": RecordFormat(
        "Alpaca (instruction, input, output)", ALPACA[::2], partial(_task, ALPACA), ("input", "history"), ()
    ),
    "completion": RecordFormat("prompts and completions", PAIR, partial(_task, PAIR), ("history",), ("suffix",)),
    "ultrachat": RecordFormat("UltraChat (data)", ("data",), _ultrachat),
    "oasst": RecordFormat("message trees", TREE, partial(_listed, key="messages"), gather=_gather_threads),
    "text": RecordFormat("plain text", ("text",), _plain_text),
    "dolly": RecordFormat("Dolly (instruction, context, response)", DOLLY[::2], partial(_task, DOLLY), DOLLY[1:2]),
    "qa": RecordFormat("questions and answers", QUESTION, partial(_task, QUESTION)),
}
"""Formats of records, in the order in which they are tried."""


def split_records(rows: Sequence[Record], share: float = 0.1) -> tuple[list[Record], list[Record]]:
    """Split records into training and validation.

    About `share` of the records are for validation, and each side has at least one record. The split is by
    `record_hashes`, so that a record and its copies are on the same side in every run and with every tokenizer. If
    all records are equal, or `share` is 0, no record is for validation.
    """
    if not 0 <= share < 1:
        raise ValueError(f"--val-fraction is {share}; it must be at least 0 and below 1")
    hashes = record_hashes(rows)
    distinct = sorted(set(hashes))
    if not share or len(distinct) < 2:
        return list(rows), []
    limit = validation_limit(distinct[0], distinct[-1], share)
    train = [row for row, value in zip(rows, hashes, strict=True) if value >= limit]
    return train, [row for row, value in zip(rows, hashes, strict=True) if value < limit]


def record_hashes(rows: Sequence[Record]) -> list[float]:
    """Hashes of the records' words, which `split_records` uses; they are in [0, 1), except for large groups.

    Near-duplicate texts share a hash, as do preferences with equal prompts, and records whose examples have equal
    words (`seen`). If a group of near-duplicates has more than the fraction LARGE of the records, 1 is added to
    its hash, so that it is selected for validation last.
    """
    hashes = [split_hash(_split_by(row)) for row in rows]
    texts = [i for i, row in enumerate(rows) if row.format == "text"]
    texts.sort(key=lambda i: (len(rows[i].turns[-1].text), hashes[i]))  # independent of the order of records
    firsts = group_duplicates(line_parts(rows[i].turns[-1].text) for i in texts)
    sizes, own = Counter(firsts), [hashes[i] for i in texts]
    for i, first in zip(texts, firsts, strict=True):
        if sizes[first] > 1:
            hashes[i] = own[first] + (sizes[first] > LARGE * len(rows))
    joined, keys = list[float](), (hashes, [row.seen for row in rows])
    while joined != hashes:
        joined = hashes
        for each in keys:  # the dict keeps the last, least hash of each key
            least: dict[Any, float] = dict(sorted(zip(each, hashes, strict=True), key=itemgetter(1), reverse=True))
            hashes = [least[key] if key != b"" else value for key, value in zip(each, hashes, strict=True)]
    return hashes


def _split_by(row: Record) -> Conversation:
    """The turns that `split_hash` reads: all turns, or a preference's prompt."""
    return row.turns[: _shared(row.turns, row.rejected)] if row.rejected else row.turns


def count_leaked(train: Sequence[Record], valid: Sequence[Record]) -> int:
    """Number of validation records that share their hash (`record_hashes`) with a training record."""
    hashes = record_hashes([*train, *valid]) if valid else []
    train_hashes = {*hashes[: len(train)]}
    return sum(value in train_hashes for value in hashes[len(train) :])


def validation_limit(least: float, most: float, share: float) -> float:
    """The hash below which records are for validation: `share`, adjusted to leave a record on each side."""
    return min(max(share, float(np.nextafter(least, np.inf))), most) if least < most else 0.0


def split_hash(turns: Conversation) -> float:
    """Hash of a conversation in [0, 1), computed from JSON with one list per turn.

    A turn's additional fields, such as tool calls, come last in its list.
    """
    hasher = blake2b(digest_size=6)
    for i, turn in enumerate(turns):
        hasher.update(f"{', ' if i else '['}[{json.dumps(EQUAL_ROLES.get(turn.role, turn.role))}".encode())
        for part in chain(line_parts(turn.text), (None,), line_parts(turn.input)):
            words = [None] if part is None else part.split()
            hasher.update(f", {json.dumps(words)[1:-1]}".encode() if words else b"")
        hasher.update(f", {json.dumps(turn.fields)}".encode() if turn.fields else b"")
        hasher.update(b"]")
    hasher.update(b"]" if turns else b"[]")
    return int.from_bytes(hasher.digest()) / 2**48


def tokenize_records(
    rows: Sequence[Record], template: Template, tokenizer: Tokenizer, train_on: str = "answers"
) -> Iterator[Example]:
    """Encode records as ids. Targets are answers with their stop tokens; for `train_on` "all", all ids except BOS.

    Answers that a record excludes from the loss are never trained on. Raises ValueError if the tokenizer lacks
    special tokens, if the template does not support a record, or if a record excludes a prompt from the loss
    although `train_on` is "all".
    """
    if train_on not in ("answers", "all"):
        raise ValueError(f"train_on is 'answers' or 'all', not {train_on!r}")
    template.check_tokenizer(tokenizer)
    for row in rows:
        yield _at(row.place, _example, row, template, tokenizer, train_on)


def _example(row: Record, template: Template, tokenizer: Tokenizer, train_on: str) -> Example:
    if row.turns[-1].role == "text":
        # Plain text may be large, so only an empty text is rendered, to check the template.
        template.render((Turn("text", ""),), variables=row.variables)
        return _text_example(row, tokenizer)
    segments = template.render(row.turns, variables=row.variables)
    if train_on == "all" and (excluded := [t for t in row.turns if not (t.trained or t.role in ANSWER_ROLES)]):
        raise ValueError(
            f"a {excluded[0].role} message is excluded from the loss, but --train-on all covers prompts; train on "
            "answers, or remove the mark"
        )
    ids, trained = encode_segments(segments, tokenizer, train_on == "all")
    other, rejected = replace(row, turns=row.rejected, rejected=(), place=f"{row.place}, rejected"), None
    if other.turns:
        rejected = _example(other, template, tokenizer, train_on)
        segments = [*takewhile(lambda segment: not segment.trained, segments)]
    seen = " ".join("".join(segment.text for segment in segments).split()).encode()
    digest = blake2b(seen, digest_size=16).digest()
    return Example(np.array(ids, np.int32), np.array(trained, bool), row.place, None, rejected, digest)


def _text_example(row: Record, tokenizer: Tokenizer) -> Example:
    """The example of a plain text, encoded as by `encode_segments` but without Python lists of all ids."""
    parts = tokenizer.encode_document(line_parts(row.turns[-1].text))
    begin, end = (np.array(ids, np.int32) for ids in (tokenizer.document_start, [tokenizer.eos]))
    ids = np.concatenate([begin, *(np.array(part, np.int32) for part in parts), end])
    return Example(ids, np.arange(len(ids)) >= len(begin), row.place, 0)


def trained_spans(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Spans of an example's text as (text, True if trained on). Special tokens are spelled out."""
    edges = np.flatnonzero(np.diff(example.loss_mask)) + 1
    runs = np.split(example.ids, edges)
    return [
        (_spell_out(ids.tolist(), tokenizer), bool(flag))
        for ids, flag in zip(runs, example.loss_mask[[0, *edges]], strict=True)
        if len(ids)
    ]


def _spell_out(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of the ids, with special tokens spelled out."""
    special = {i: t.content for i, t in tokenizer.inner.get_added_tokens_decoder().items() if t.special}
    runs = groupby(ids, special.__contains__)
    texts = ("".join(special[i] for i in run) if known else tokenizer.decode([*run]) for known, run in runs)
    return "".join(texts)
