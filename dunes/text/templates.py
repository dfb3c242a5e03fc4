"""Chat templates in Jinja: built-in named templates, and templates that come with a model.

A template turns a conversation into segments. Each segment is tokenized separately, and the ids are concatenated.
A prompt therefore has the same ids in training and in generation, whatever the answer starts with. Special tokens
are separate segments that are inserted as ids and never parsed from a user's text.

Sources of the templates: alpaca (both prompts) https://github.com/tatsu-lab/stanford_alpaca/blob/main/train.py;
llama2 https://github.com/meta-llama/llama/blob/main/llama/generation.py; llama3
https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py; mistral: the first version in
https://github.com/mistralai/mistral-common; chatml https://github.com/openai/openai-python/blob/v0.28.1/chatml.md.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from math import isfinite
from typing import Any

from dunes.files import json_file
from dunes.text import chat_template
from dunes.text.special_tokens import token_text
from dunes.text.tokenizer import Tokenizer

SURROGATES = range(0xDC00, 0xE000)
"""Lone surrogates, which valid text never contains. A pair of them replaces a special token in a user's text."""

MARKS = re.compile("[\ud810-\ud9ff][\uda00-\udbff]")
"""Matches pairs of surrogates below SURROGATES; a pair in a string marks where a template writes the string."""
MARKED_KEYS = ("content", "name", "arguments", *chat_template.REASONING_KEYS)

CUT = "\ufdd0"
"""A Unicode noncharacter that marks the end of a text to continue."""

MAX_DEPTH = 100
"""Maximum levels of nested data in tools and tool calls."""

NO_FIELDS: Mapping[str, Any] = {}

PROBE = "probed text"
"""Text of a test message that shows whether a template writes messages of a role."""
UNKNOWN_ROLE = "unheard-of"
"""A role that no template supports."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `input` is Alpaca's input field. A message that is not `trained` is excluded from the loss.

    `fields` are further fields for a model's own template: `tool_calls`, `tool_call_id`, `name`, reasoning (a key
    in REASONING_KEYS), and a `content` of None for an answer that consists of tool calls.
    """

    role: str
    text: str
    input: str = ""
    trained: bool = True
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS, hash=False)

    @property
    def full_text(self) -> str:
        """The text with its input, for templates without a separate input."""
        return f"{self.text}\n\n{self.input}" if self.input else self.text


Conversation = tuple[Turn, ...]
Messages = Sequence[Mapping[str, Any]]
ANSWER_ROLES = ("assistant", "text")
"""Roles of turns that a model generates."""
EQUAL_ROLES = {"developer": "system"}
"""Maps a role to its replacement in templates that lack a format for the role."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that is tokenized separately. If `special`, the text is the spelling of one special token.

    A `masked` segment belongs to an answer, but is excluded from the loss.
    """

    text: str
    trained: bool = False
    special: bool = False
    masked: bool = False


BEGIN = Segment("{begin}", special=True)
"""Placeholder for the tokenizer's `document_start`."""
END = Segment("{end}", special=True)
"""Placeholder for the tokenizer's `eos`."""


class Template(ABC):
    """A Jinja chat template, its special tokens, and `end`, the special token that ends an answer.

    If the template has `{% generation %}` tags, answers are exactly the bodies of these tags, as in transformers
    (https://huggingface.co/docs/transformers/chat_templating). An end token outside the tags is not trained on. In
    other templates, an answer starts after its prompt (the rendered messages before it and the generation prompt),
    and ends with `end`. If the prompt is rendered differently within a longer conversation, the answer starts
    after the prompt's last message and as much of the generation prompt as the text contains. A prompt is rendered
    even if the positions of earlier answers are unknown.

    ValueError is raised if the rendered text lacks a part of the record: a message, a tool call, or the name of a
    tool. The reasoning of an earlier answer may be missing, provided that the template writes the reasoning of a
    last answer. To distinguish equal strings, the text is rendered again with a mark in each string. If the marks
    change the rest of the text, the text is checked without marks. A missing string is then overlooked if the text
    contains an equal string.

    `special_tokens` maps each token to two flags, which are True if spaces to the left and to the right of the
    token are stripped. A `complete` template writes everything in a conversation, and needs no marks.
    """

    name: str
    earlier_end = ""
    """The special token after an answer that is not the last message, if it differs from `end`."""
    closing = ""
    """The text between an answer and `end`, if the template writes `end` only before the next message."""
    tagged = False
    complete = False
    source: str
    special_tokens: Mapping[str, tuple[bool, bool]]
    end: str

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError if this tokenizer lacks tokens that the template needs."""
        self.stop_id(tokenizer)

    def stop_id(self, tokenizer: Tokenizer) -> int:
        """The id that ends an answer."""
        return tokenizer.eos if self.end == END.text else tokenizer.token_id(self.end)

    def jinja(self, tokenizer: Tokenizer) -> str:
        """The template for chat_template.jinja, with this tokenizer's tokens spelled out."""
        return self.source

    def render(
        self, turns: Conversation, add_generation_prompt: bool = False, variables: Mapping[str, Any] | None = None
    ) -> list[Segment]:
        """Segments of a conversation; with `add_generation_prompt`, they end where the next answer starts.

        `variables` are additional variables of the template. Raises ValueError for a conversation that the
        template does not support, and for a variable that the template does not read.
        """
        values = {name: map_strings(value, self._escape) for name, value in (variables or {}).items()}
        if unread := [name for name in values if not self.reads(name)]:
            place = unread[0] if unread[0] == "tools" else "chat_template_kwargs"
            raise ValueError(
                f"{place}: the chat template ({self.name}) reads no {unread[0][:40]!r}; leave it "
                "out, or use a model whose own template reads it"
            )
        turns = tuple(replace(turn, role=self._roles.get(turn.role, turn.role)) for turn in turns)
        messages = [self._message(turn) for turn in turns]
        answers = [i for i, turn in enumerate(turns) if turn.role in ANSWER_ROLES]
        try:
            text = self._render_text(messages, add_generation_prompt, values)
        except ValueError as error:
            raise ValueError(f"{error}{self._unwritten(*(turn.role for turn in turns))}") from None
        if not self.complete:
            text, messages, values = self._mark(text, messages, add_generation_prompt, values)
        if not add_generation_prompt and turns and turns[-1].role in ANSWER_ROLES:
            text += self.closing

        def draw(count: int, is_open: bool = False) -> str:
            return self._render_text(messages[:count], is_open, values)

        try:
            pieces = (
                chat_template.MARKS.split(text) if self.tagged else self._pieces(text, messages, answers, draw)
            )
        except ValueError:
            if not add_generation_prompt:
                raise
            pieces = [text]
        plain, trained = "".join(pieces), [turns[i].trained for i in answers]
        for turn, message in zip(turns, messages, strict=True):
            texts = message["content"], self._commands.sub("", message["content"] or "")
            if turn.role not in ANSWER_ROLES and not any(_is_written(text, plain) for text in texts):
                subject = f"a {turn.role[:40]} message{self._unwritten(turn.role)}"
                self._check(subject, message["content"], plain)
        tools = values.get("tools")
        self._check("a tool", [_function(t).get("name") for t in tools] if isinstance(tools, list) else (), plain)
        if add_generation_prompt:
            return self._segments([MARKS.sub("", piece) for piece in pieces], [False] * len(answers))
        if len(pieces) == 2 * len(answers) + 1:
            # Parts of the answer that are not trained on may stand around a tag.
            near = int(self.tagged)
            windows = ["".join(pieces[k - near : k + 1 + near]) for k in range(1, len(pieces), 2)]
        elif all(trained):
            windows, trained = [plain] * len(answers), [True] * (len(pieces) // 2)
        else:
            raise ValueError(
                f"the chat template has {len(pieces) // 2} generation tags for {len(answers)} answers, so none of "
                "the answers can be excluded from the loss; remove the mark"
            )
        for i, window in zip(answers, windows, strict=True):
            self._check_answer(messages[i], window, partial(draw, i + 1))
        return self._segments([MARKS.sub("", piece) for piece in pieces], trained)

    def reads(self, variable: str) -> bool:
        """True if the template may read a variable of this name, besides its messages."""
        return False

    def writes(self, role: str) -> bool:
        """True if the template writes a message of this role (at its usual place) in a test conversation."""
        return PROBE in self._probe(role)

    @cached_property
    def _roles(self) -> dict[str, str]:
        """EQUAL_ROLES, but a role for which the template has its own format is mapped to itself."""
        # If the template only inserts the role's name, it has no format of its own for the role.
        unknown = self._probe(UNKNOWN_ROLE)
        own = (r for r in EQUAL_ROLES if self.writes(r) and self._probe(r) != unknown.replace(UNKNOWN_ROLE, r))
        return {**EQUAL_ROLES, **{role: role for role in own}}

    def _unwritten(self, *roles: str) -> str:
        """The end of an error message if the template never writes one of these roles; otherwise empty."""
        if (role := next((role for role in roles if not self.writes(role)), None)) is None:
            return ""
        written = filter(self.writes, ("system", *EQUAL_ROLES, "user", "assistant", "tool"))
        return f"; it writes no message of the role {role[:40]!r}, only of {', '.join(written)}"

    def _probe(self, role: str) -> str:
        """The rendered text of a short conversation with a message of this role; empty if rendering fails."""
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
        asked, called = Turn("user", "Q"), Turn("assistant", "", fields={"tool_calls": [call]})
        before = {"assistant": (asked,), "tool": (asked, called)}.get(role, ())
        after = () if before or role in ("user", "text") else (asked,)
        fields = {"name": "f", "tool_call_id": call["id"]} if role == "tool" else NO_FIELDS
        with suppress(ValueError):
            talk = map(self._message, (*before, Turn(role, PROBE, fields=fields), *after))
            return self._render_text([*talk], False, NO_FIELDS)
        return ""

    @abstractmethod
    def _render_text(self, messages: Messages, is_open: bool, variables: Mapping[str, Any]) -> str:
        """The text of the messages, with the generation prompt if `is_open`. Raises ValueError if this fails."""

    def _message(self, turn: Turn) -> dict[str, Any]:
        fields = map_strings(turn.fields, self._escape)
        return {"role": self._escape(turn.role), "content": self._escape(turn.full_text), **fields}

    def _mark(
        self, text: str, messages: list[dict[str, Any]], is_open: bool, values: dict[str, Any]
    ) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
        """The text, messages and variables with marks, or unchanged if marks would change the rest of the text."""
        marks = (chr(0xD810 + k // 496 % 496) + chr(0xDA00 + k % 496) for k in count())
        marked, asked = [], dict[str, dict[str, Any]]()
        for message in messages:
            other = _mark(message, marks)
            if message["role"] in ("user", "tool") and not message["content"].strip():
                other["content"] += next(marks)
            # Templates compare questions, so equal questions get the same mark.
            marked.append(asked.setdefault(message["content"], other) if message["role"] == "user" else other)
        variables = values | {key: _mark(values[key], marks) for key in ("tools",) if key in values}
        with suppress(ValueError):
            marked_text = self._render_text(marked, is_open, variables)
            if MARKS.sub("", marked_text) == text:
                return marked_text, marked, variables
        return text, messages, values

    def _check(self, subject: str, value: Any, text: str) -> None:
        """Raise ValueError if the text lacks this value of a record; `subject` names the value in the message."""
        if not _is_written(value, text):
            raise ValueError(
                f"the chat template ({self.name}) leaves out or changes {subject}; leave it out, or use a "
                "template that writes it"
            )

    def _check_answer(self, message: Mapping[str, Any], text: str, as_last: Callable[[], str]) -> None:
        """Raise ValueError if the text lacks a part of the answer, which `as_last` renders as the last message."""
        *thoughts, answer = re.split("</?think>", message["content"] or "")
        self._check("an answer", answer, text)
        for call in message.get("tool_calls") or ():
            self._check("a tool call", [_function(call).get(key) for key in ("name", "arguments")], text)
        thoughts += [message[key] for key in chat_template.REASONING_KEYS if key in message]
        if not _is_written(thoughts, text):
            self._check("reasoning, even of the last answer", thoughts, as_last())

    def _pieces(
        self, text: str, messages: Messages, answers: Sequence[int], draw: Callable[..., str]
    ) -> list[str]:
        """The text in pieces; every second piece is an answer with its end."""
        pieces: list[str] = []
        stop = start = 0
        for i in answers:
            prompt = draw(i, True)
            start = self._answer_start(text, prompt, start, stop)
            pieces.append(text[stop:start])
            end = self.end
            content = (messages[i]["content"] or "").strip()
            at = start if (place := text.find(content, start)) < 0 else place + len(content)
            if messages[i].get("tool_calls"):  # llama 3.1 ends some calls with another token
                tokens = self._pattern.findall(draw(i + 1)[len(prompt) :] + self.closing)
                end, at = end if end in tokens or not tokens else tokens[-1], start
            places = {e: place for e in (end, self.earlier_end) if e and (place := text.find(e, at)) >= 0}
            if not places:
                expected = "" if end == END.text else f", not even {end}"
                raise ValueError(
                    f"the chat template ({self.name}) ends an answer with no special token{expected}; write "
                    "{% generation %} tags around its answers, or name a template"
                )
            first = min(places, key=places.__getitem__)
            stop = places[first] + len(end) * (first == end)
            pieces.append(text[start:stop])
        return [*pieces, text[stop:]]

    def _answer_start(self, text: str, prompt: str, before: int, stop: int) -> int:
        """Index at which the answer to `prompt` starts; the previous answer spans `before` to `stop`."""
        if text.startswith(prompt) and len(prompt) >= stop:
            return len(prompt)
        # Some templates write tools only before the last question, or reasoning only in the last answer.
        marks = [match.start() for match in MARKS.finditer(prompt)]
        tail = prompt[marks[-1] :] if marks else ""
        bounds = [m.end() for m in re.finditer(rf"{self._pattern.pattern}|\n", tail)][1:]
        for part in (tail, re.sub(r"<think>\s*(</think>\s*)?\Z", "", tail), *(tail[:i] for i in reversed(bounds))):
            start = text.find(part, before) + len(part)
            if part and start >= max(stop, len(part)):
                return start
        raise ValueError(
            f"the chat template ({self.name}) renders the same messages differently in a longer conversation, so "
            "the start of an answer is unknown; write {% generation %} tags around answers in the template, or "
            "leave the row out"
        )

    @cached_property
    def _commands(self) -> re.Pattern[str]:
        """Matches words in the template such as `/no_think`, which the template may obey instead of writing."""
        words = re.findall(r"""(?<=["'])/\w+(?=["'])""", self.source)
        return re.compile("|".join(sorted(words, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _segments(self, pieces: Sequence[str], trained: Sequence[bool]) -> list[Segment]:
        """Split the pieces into segments. Every second piece is an answer; `trained` has one flag per answer."""
        segments: list[Segment] = []
        for i, piece in enumerate(pieces):
            is_answer = i % 2 == 1
            strips = bool(segments) and segments[-1].special and self.special_tokens[segments[-1].text][1]
            parts = self._split(piece, is_answer and trained[i // 2], strips)
            segments += (replace(part, masked=is_answer and not part.trained) for part in parts)
        return segments

    def _split(self, text: str, trained: bool, strip_left: bool) -> Iterator[Segment]:
        """Yield segments of a text, split at special tokens; with `strip_left`, leading spaces are stripped."""
        start = 0
        for match in self._pattern.finditer(text):
            left, right = self.special_tokens[match[0]]
            yield from self._text_segments(text[start : match.start()], trained, strip_left, left)
            yield Segment(match[0], trained, special=True)
            start, strip_left = match.end(), right
        yield from self._text_segments(text[start:], trained, strip_left, False)

    def _text_segments(self, text: str, trained: bool, strip_left: bool, strip_right: bool) -> Iterator[Segment]:
        text = text.lstrip() if strip_left else text
        text = text.rstrip() if strip_right else text
        text = re.sub("[\udc00-\udfff]{2}", lambda match: self._escapes[match[0]], text)
        if text:
            yield Segment(text, trained)

    def _escape(self, text: str) -> str:
        """The text with each spelling of a special token replaced by two lone surrogates."""
        if match := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"lone surrogate at character {match.start()}; remove it")
        return self._pattern.sub(lambda match: self._escapes[match[0]], text)

    @cached_property
    def _escapes(self) -> dict[str, str]:
        """Maps each special token to a pair of lone surrogates, and each of these pairs to its token."""
        surrogates = (chr(first) + chr(second) for first in SURROGATES for second in SURROGATES)
        escapes = dict(zip(self.special_tokens, surrogates, strict=False))
        return escapes | {pair: token for token, pair in escapes.items()}


class NamedTemplate(Template):
    """A built-in template, without tools and reasoning.

    `needs` are its special tokens; a tokenizer in which `words` are special tokens is refused. An answer ends with
    the last special token in `needs`, or with the tokenizer's EOS if `needs` is empty. BEGIN and END in the source
    stand for the tokenizer's `document_start` and `eos`. With `inputs`, a message has a separate key `input`.
    """

    complete = True

    def __init__(
        self,
        name: str,
        source: str,
        needs: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
        inputs: bool = False,
    ) -> None:
        self.name, self.source, self.needs, self.words, self.inputs = name, source, needs, words, inputs
        self.special_tokens = dict.fromkeys((BEGIN.text, END.text, *needs), (False, False))
        self.end = needs[-1] if needs else END.text

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        missing = [t for t in self.needs if tokenizer.inner.token_to_id(t) is None]
        if missing:
            raise ValueError(
                f"template {self.name}: the tokenizer has no {', '.join(missing)}; choose another template, or a "
                "tokenizer that has them"
            )
        special = [t for t in self.words if t in _special_tokens(tokenizer)]
        if special:
            raise ValueError(
                f"template {self.name} writes {', '.join(special)} as text, but they are special tokens of the "
                "tokenizer; use the model's own chat template"
            )
        super().check_tokenizer(tokenizer)

    def jinja(self, tokenizer: Tokenizer) -> str:
        begin = "".join(str(tokenizer.inner.id_to_token(i)) for i in tokenizer.document_start)
        return self._spell_out(begin, str(tokenizer.inner.id_to_token(tokenizer.eos)))

    def _render_text(self, messages: Messages, is_open: bool, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError  # late, since the import takes as long as loading a small model

        template = chat_template.compile_template(self._spell_out(BEGIN.text, END.text))
        try:  # a named template reads no further variables
            return str(template.render(messages=messages, add_generation_prompt=is_open))
        except TemplateError as error:
            raise ValueError(str(error)) from None

    def _message(self, turn: Turn) -> dict[str, Any]:
        if names := [*turn.fields, *["a tool's message"] * (turn.role == "tool")]:
            raise ValueError(
                f"{names[0]}: template {self.name} cannot express it; use a model whose own chat template can, "
                "or leave it out"
            )
        if not self.inputs:
            return super()._message(turn)
        return {"role": turn.role, "content": self._escape(turn.text), "input": self._escape(turn.input)}

    def _spell_out(self, begin: str, end: str) -> str:
        return self.source.replace("BEGIN", repr(begin)).replace("END", repr(end))  # jinja has Python's escapes


class ModelTemplate(Template):
    """The chat template that came with a model. An answer is rendered to determine the stop token.

    The stop token is the first special token after a last answer or, if there is none, the first special token
    between an answer and the next question. Tokens that are also between the generation prompt and the answer,
    such as the tags around an empty thought, do not count. If there is no such token, EOS is the stop token, and
    records cannot be trained on. Raises ValueError if the template fails on a question and an answer.
    """

    name = "the model's own"

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source, self.token_names = source, tokenizer.special_tokens_map | _token_names(tokenizer)
        self.special_tokens = _special_tokens(tokenizer)
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        marked = chat_template.render(source, probe, variables=self.token_names, marks=True)
        self.tagged = chat_template.OPEN in marked
        before, after = self._around("answer", probe[:1], chat_template.MARKS.sub("", marked))
        ends = [m for m in self._pattern.finditer(after) if m[0] not in self._pattern.findall(before)]
        longer = ""
        with suppress(ValueError):
            next_turn = {"role": "user", "content": "next"}
            longer = chat_template.render(source, [*probe, next_turn], False, self.token_names)
        _, followed = self._around("answer", probe[:1], longer)
        later = [m for m in self._pattern.finditer(followed) if m[0] not in self._pattern.findall(before)]
        self.end = ends[0][0] if ends else later[0][0] if later else END.text
        self.closing = followed[: later[0].end()] if later and not ends else ""
        self.earlier_end = later[0][0] if later and later[0][0] != self.end else ""

    def _around(self, answer: str, question: Messages, text: str) -> tuple[str, str]:
        """The text between the generation prompt and an answer to `question`, and the text after the answer."""
        prompt = chat_template.render(self.source, question, True, self.token_names)
        start = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
        at = text.rfind(answer)
        return ("", text) if at < 0 else (text[start:at], text[at + len(answer) :])

    def reads(self, variable: str) -> bool:
        reserved = variable in ("messages", "add_generation_prompt")
        return not reserved and re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def _render_text(self, messages: Messages, is_open: bool, variables: Mapping[str, Any]) -> str:
        values = {**self.token_names, **variables}
        return chat_template.render(self.source, messages, is_open, values, self.tagged)


def map_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Nested data with `change` applied to all strings and keys.

    Raises ValueError for more than MAX_DEPTH levels, and for infinity and NaN, which JSON lacks.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels of nested data")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{value} is no number in JSON; write null or a string")
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(each, change, depth + 1) for key, each in value.items()}
    return [map_strings(each, change, depth + 1) for each in value] if isinstance(value, list | tuple) else value


def _function(entry: Any) -> Mapping[str, Any]:
    """The function of a tool or a tool call; empty if there is none."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    return function if isinstance(function, Mapping) else NO_FIELDS


def _mark(value: Any, marks: Iterator[str]) -> Any:
    """Messages, tools or calls, with a mark in each nonblank string under MARKED_KEYS.

    A mark stands before the last word, or after a string's only word, since templates check the first and the last
    word. A string is split at `<think>` and `</think>`, and each part is marked.
    """

    def mark(text: str) -> str:
        parts = re.split("(</?think>)", text)
        for i, part in enumerate(parts[::2]):
            *head, last = part.rsplit(None, 1) or [""]
            stop = len(head[0] if head else part.rstrip())
            parts[2 * i] = part[:stop] + (next(marks) if last else "") + part[stop:]
        return "".join(parts)

    if isinstance(value, list | tuple):
        return [_mark(each, marks) for each in value]
    if not isinstance(value, Mapping):
        return value
    nested = {key: _mark(value[key], marks) for key in ("function", "tool_calls") if key in value}
    return {**value, **nested, **{key: map_strings(value[key], mark) for key in MARKED_KEYS if key in value}}


def _is_written(value: Any, text: str) -> bool:
    """True if the text has all strings, numbers and keys of nested data, as they are or as in JSON."""
    if isinstance(value, Mapping):
        return all(_is_written(each, text) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(_is_written(each, text) for each in value)
    if value is None or (plain := str(value).strip()) in text:
        return True
    return any(
        chat_template.to_json(plain if isinstance(value, str) else value, form).strip('"') in text
        for form in (False, True)
    )


def _token_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Special tokens by their keys in the config files, with `bos_token` even if texts do not start with it.

    As in transformers, special_tokens_map.json overrides a tokenizer_config.json without `added_tokens_decoder`.
    """
    names, vocab = dict[str, str](), tokenizer.inner.get_vocab()
    for name in (tokenizer.config_path.name, "special_tokens_map.json"):
        config = json_file.parse(tokenizer.extra_files.get(name, b"{}"), tokenizer.config_path.with_name(name))
        tokens = {key: token_text(config, key) for key in config if key.endswith("_token")}
        names |= {key: token for key, token in tokens.items() if token in vocab}
        if "added_tokens_decoder" in config:
            break
    return names


def _special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[bool, bool]]:
    """Maps each special token to two flags, True if spaces to its left and to its right are stripped."""
    added = tokenizer.inner.get_added_tokens_decoder().values()
    return {t.content: (t.lstrip, t.rstrip) for t in added if t.special}


def encode_segments(
    segments: Sequence[Segment], tokenizer: Tokenizer, train_all: bool = False
) -> tuple[list[int], list[bool]]:
    """The ids of the segments, and a mask of trained ids (with `train_all`, all but BOS and masked segments).

    Raises ValueError for a special token that the tokenizer lacks.
    """
    ids: list[int] = []
    trained: list[bool] = []
    continues = False
    for segment in segments:
        segment_ids = _encode_segment(segment, tokenizer, continues)
        ids += segment_ids
        is_trained = train_all and not segment.masked and segment_ids != tokenizer.document_start
        trained += [segment.trained or is_trained] * len(segment_ids)
        continues = not segment.special
    return ids, trained


def _encode_segment(segment: Segment, tokenizer: Tokenizer, continues: bool) -> list[int]:
    if not segment.special:
        encode = tokenizer.encode_continuation if continues else tokenizer.encode
        return encode(segment.text)
    if segment.text == BEGIN.text:
        return tokenizer.document_start
    return [tokenizer.eos if segment.text == END.text else tokenizer.token_id(segment.text)]


def encode_prompt(
    template: Template,
    turns: Conversation,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> list[int]:
    """The ids of a prompt, which are the same as the ids before its answer in training.

    With `continues`, the last message is the beginning of the answer; ValueError is raised unless it is a text of
    the assistant.
    """
    template.check_tokenizer(tokenizer)
    if continues and (not turns or turns[-1].role not in ANSWER_ROLES or "tool_calls" in turns[-1].fields):
        raise ValueError("continue_final_message: expected a text of the assistant as the last message")
    tail = ""
    if continues:  # after the text, a template may write more than the end token, even the same words again
        text = turns[-1].full_text
        tail = text[len(text.rstrip()) :]
        turns = (*turns[:-1], replace(turns[-1], text=text.rstrip() + CUT + tail))
    segments = template.render(turns, not continues, variables)
    if continues:
        last = max(i for i, segment in enumerate(segments) if CUT in segment.text)
        start, _, rest = segments[last].text.rpartition(CUT)
        start += tail * rest.startswith(tail)
        segments = [*segments[:last], *[Segment(start)] * bool(start)]
    return encode_segments(segments, tokenizer)[0]


def attach_template(template: Template, tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer whose extra files include the template and its stop token, for other tools.

    Raises ValueError if the tokenizer lacks tokens that the template needs.
    """
    template.check_tokenizer(tokenizer)
    result = tokenizer.with_stop(template.stop_id(tokenizer))
    result.extra_files[chat_template.JINJA] = template.jinja(tokenizer).encode()
    name = result.config_path.name
    if name in result.extra_files:  # the file may contain an older template
        config = json_file.parse(result.extra_files[name], result.config_path)
        if config.pop("chat_template", None) is not None:
            result.extra_files[name] = (json.dumps(config, indent=2) + "\n").encode()
    return result


def find_template(tokenizer: Tokenizer, card: Mapping[str, Any]) -> Template | None:
    """The template named in the model card, otherwise the model's own template; None if there is neither.

    Raises ValueError if the tokenizer lacks tokens that the template needs, or if the template has no stop token.
    """
    name = card.get("template")
    if isinstance(name, str) and name in TEMPLATES:
        TEMPLATES[name].check_tokenizer(tokenizer)
        return TEMPLATES[name]
    source = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    return None if source is None else ModelTemplate(source, tokenizer)


# The named templates


def _pair(name: str, *roles: str) -> str:
    """Jinja that raises unless the roles are "user", "user, assistant" or one of `roles`, and starts the loop."""
    return (
        "{% set roles = messages | map(attribute='role') | join(', ') %}"
        f"{{% if roles not in {('user', 'user, assistant', *roles)} %}}"
        f"{{{{ raise_exception('template {name} has one instruction and one answer, found ' + roles[:80]) }}}}"
        "{% endif %}{{ BEGIN }}{% for m in messages %}"
    )


_ALPACA = (
    "{% if m['role'] == 'assistant' %}{{ m['content'] + END }}{% else %}"
    "Below is an instruction that describes a task"
    "{% if m['input'] %}, paired with an input that provides further context{% endif %}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{{ m['content'] }}\n\n"
    "{% if m['input'] %}### Input:\n{{ m['input'] }}\n\n{% endif %}"
    "### Response:TAIL{% endif %}{% endfor %}"
)


def _open_messages(name: str) -> str:
    """Jinja that writes BEGIN, and starts the loop over the messages."""
    return (
        "{{ BEGIN }}{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
        f"{{{{ raise_exception('template {name}: expected messages, found plain text; its template is plain') }}}}"
        "{% endif %}"
    )


def _turns(name: str) -> str:
    """Jinja that separates the system message, and starts the loop over the other messages."""
    return (
        "{% if messages and messages[0]['role'] == 'system' %}"
        "{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% if messages and not rest %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
        f"{{{{ raise_exception('template {name}: expected perhaps a system, then user and assistant in turns, "
        "found ' + (messages | map(attribute='role') | join(', '))[:80]) }}{% endif %}"
    )


_PLAIN = (
    _pair("plain", "text", "") + "{{ m['content'] }}{% if m['role'] != 'user' %}{{ END }}{% endif %}{% endfor %}"
)

_CHATML = _open_messages("chatml") + (
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = _open_messages("llama3") + (
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_MISTRAL = (
    "{{ BEGIN }}" + _turns("mistral") + "{% if m['role'] == 'user' %}{{ '[INST] ' + "
    "(system + '\\n\\n' if system and loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + END }}{% endif %}{% endfor %}"
)

_LLAMA2 = (
    _turns("llama2") + "{% if m['role'] == 'user' %}{% set before = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' "
    "if system and loop.first else '' %}{{ BEGIN + '[INST] ' + (before + m['content']) | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + END }}{% endif %}{% endfor %}"
)

_WORDS = ("[INST]", "[/INST]")
_TEMPLATES = (
    NamedTemplate("plain", _PLAIN),
    NamedTemplate("alpaca", _pair("alpaca") + _ALPACA.replace("TAIL", ""), inputs=True),
    NamedTemplate("alpaca-newline", _pair("alpaca-newline") + _ALPACA.replace("TAIL", "\n"), inputs=True),
    NamedTemplate("mistral", _MISTRAL, words=_WORDS),
    NamedTemplate("llama2", _LLAMA2, words=_WORDS),
    NamedTemplate("llama3", _LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    NamedTemplate("chatml", _CHATML, ("<|im_start|>", "<|im_end|>")),
)
TEMPLATES = {template.name: template for template in _TEMPLATES}
"""The named templates, by name."""


def get_template(name: str) -> NamedTemplate:
    """The built-in template with this name. Raises ValueError for an unknown name."""
    if name not in TEMPLATES:
        raise ValueError(f"no template named {name!r}; available: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
