"""How a conversation is written for a model: named templates, and the model's own, all of them in Jinja.

A template turns a conversation into pieces. Each piece is tokenized alone and the ids are put in a row, so
that a prompt has the same ids in training and afterwards, whatever the answer begins with. Special tokens
are pieces of their own, put in by their ids: what a user wrote is never searched for them.

A named template is rendered in this process, since it is ours; a model's own in a process with limits.

Sources: Alpaca's two prompts are quoted from https://github.com/tatsu-lab/stanford_alpaca/blob/main/train.py,
llama2 follows https://github.com/meta-llama/llama/blob/main/llama/generation.py, llama3
https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py, mistral the first version in
https://github.com/mistralai/mistral-common, chatml https://github.com/openai/openai-python/blob/v0.28.1/chatml.md.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from dunes.text import chat_template, json_file
from dunes.text.template_process import compile_template
from dunes.text.tokenizer import Tokenizer

PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALONE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
"""Alpaca's prompts, with and without an input."""

MAX_TEXTS, MAX_CHARS = 2048, 1 << 19
"""How many texts one process renders, and of how many characters: its limits of time are those of one text."""

SURROGATE, SURROGATES = 0xDC00, 1024
"""Two halves of surrogate pairs from here on are in no text: they stand for a special token that a user wrote."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. `input` is Alpaca's second field of a task; an answer with not `trained` is context."""

    role: str
    text: str
    input: str = ""
    trained: bool = True

    @property
    def whole(self) -> str:
        """The text with its input, where a template has no place of its own for that."""
        return f"{self.text}\n\n{self.input}" if self.input else self.text


Talk = tuple[Turn, ...]
ANSWERS = ("assistant", "text")
"""The roles of what a model is to write."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A text to be tokenized alone or, if `special`, the spelling of one token."""

    text: str
    trained: bool = False
    special: bool = False


BEGIN, END = Piece("{begin}", special=True), Piece("{end}", special=True)
"""What the tokenizer puts before a text, and the token that ends one, whatever these are."""


class Template(ABC):
    """What writes conversations: a Jinja template, its special tokens, and the one of them that ends an answer.

    An answer begins where the text before it, with the generation prompt, ends, and goes to the token that
    ends it. Of each special token `specials` says whether it takes the spaces to its left and right.
    """

    name: str
    source: str
    specials: Mapping[str, tuple[bool, bool]]
    end: str

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError if this tokenizer cannot write what the template asks for."""
        self.stop(tokenizer)

    def stop(self, tokenizer: Tokenizer) -> int:
        """The token that ends an answer."""
        return tokenizer.eos if self.end == END.text else tokenizer.token_id(self.end)

    def jinja(self, tokenizer: Tokenizer) -> str:
        """The template for chat_template.jinja, with this tokenizer's tokens spelled out."""
        return self.source

    def write(self, talks: Sequence[Talk], opened: bool = False) -> Iterator[list[Piece]]:
        """The pieces of each conversation; if `opened`, up to where the model's answer begins.

        Raises ValueError at the conversation that the template has no form for.
        """
        for group in _groups(talks):
            yield from self._written(group, opened)

    @abstractmethod
    def _render(self, asked: Sequence[chat_template.Request]) -> Sequence[str | ValueError]:
        """The text of each conversation, or what is wrong with it."""

    def _message(self, turn: Turn) -> dict[str, str]:
        return {"role": turn.role, "content": self._guarded(turn.whole)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _order(self) -> list[str]:
        return list(self.specials)

    def _written(self, talks: Sequence[Talk], opened: bool) -> Iterator[list[Piece]]:
        asked: list[chat_template.Request] = []
        for talk in talks:
            messages = [self._message(turn) for turn in talk]
            answers = [i for i, turn in enumerate(talk) if turn.role in ANSWERS]
            asked += [(messages, opened), *((messages[:i], True) for i in answers)]
        texts = iter(self._render(asked))
        for talk in talks:
            turns = [turn for turn in talk if turn.role in ANSWERS]
            full, *before = islice(texts, 1 + len(turns))
            yield self._pieces(_given(full), [len(_prefix(b, full)) for b in before], turns)

    def _pieces(self, text: str, starts: Sequence[int], answers: Sequence[Turn]) -> list[Piece]:
        """The text in pieces, cut where answers begin and end."""
        pieces: list[Piece] = []
        at = 0
        for start, turn in zip(starts, answers, strict=True):
            said = text.find(self._guarded(turn.text).strip(), start)
            end = text.find(self.end, start)
            if not 0 <= said <= end:
                raise ValueError("the model's own chat template leaves out or changes an answer; name a template")
            pieces += self._cut(text[at:start], False, at > 0)
            at = end + len(self.end)
            pieces += self._cut(text[start:at], turn.trained, False)
        return [*pieces, *self._cut(text[at:], False, at > 0)]

    def _cut(self, text: str, trained: bool, ended: bool) -> Iterator[Piece]:
        """A part of the text, cut at special tokens; `ended` says that it stands after the end of an answer."""
        at, after = 0, ended and self.specials[self.end][1]
        for found in self._pattern.finditer(text):
            strips = self.specials[found[0]]
            yield from self._plain(text[at : found.start()], trained, after, strips[0])
            yield Piece(found[0], trained, special=True)
            at, after = found.end(), strips[1]
        yield from self._plain(text[at:], trained, after, False)

    def _plain(self, text: str, trained: bool, left: bool, right: bool) -> Iterator[Piece]:
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        text = re.sub("[\udc00-\udfff]{2}", lambda found: self._order[_number(found[0])], text)
        if text:
            yield Piece(text, trained)

    def _guarded(self, text: str) -> str:
        """The text with two halves of surrogate pairs for each spelling of a special token in it."""
        if found := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"half of a surrogate pair at character {found.start()}; remove it")
        return self._pattern.sub(lambda found: _halves(self._order.index(found[0])), text)


def _halves(number: int) -> str:
    return "".join(chr(SURROGATE + n) for n in divmod(number, SURROGATES))


def _number(halves: str) -> int:
    first, second = (ord(c) - SURROGATE for c in halves)
    return first * SURROGATES + second


class Named(Template):
    """A template of ours. `needs` are its special tokens and `never` spellings that have to be plain text.

    The last of `needs` ends an answer, or the tokenizer's own end where there is none; BEGIN and END in the
    source stand for what the tokenizer has there. With `inputs` a task's input is a key of its own.
    """

    def __init__(
        self,
        name: str,
        source: str,
        needs: tuple[str, ...] = (),
        never: tuple[str, ...] = (),
        inputs: bool = False,
    ) -> None:
        self.name, self.source, self.needs, self.never, self.inputs = name, source, needs, never, inputs
        self.specials = dict.fromkeys((BEGIN.text, END.text, *needs), (False, False))
        self.end = needs[-1] if needs else END.text

    def check(self, tokenizer: Tokenizer) -> None:
        missing = [t for t in self.needs if tokenizer.inner.token_to_id(t) is None]
        if missing:
            raise ValueError(f"template {self.name}: the tokenizer has no {', '.join(missing)}; {_OTHERS}")
        held = [t for t in self.never if t in _special(tokenizer)]
        if held:
            raise ValueError(
                f"template {self.name} writes {', '.join(held)} as words, and the tokenizer has them as tokens; "
                "use the model's own chat template"
            )
        super().check(tokenizer)

    def jinja(self, tokenizer: Tokenizer) -> str:
        begin = "".join(str(tokenizer.inner.id_to_token(i)) for i in tokenizer.document_start)
        return self._spelled(begin, str(tokenizer.inner.id_to_token(tokenizer.eos)))

    def _render(self, asked: Sequence[chat_template.Request]) -> Sequence[str | ValueError]:
        template = compile_template(self._spelled(BEGIN.text, END.text))
        return [_text_or_error(template, messages, opened) for messages, opened in asked]

    def _message(self, turn: Turn) -> dict[str, str]:
        if not self.inputs:
            return super()._message(turn)
        return {"role": turn.role, "content": self._guarded(turn.text), "input": self._guarded(turn.input)}

    def _spelled(self, begin: str, end: str) -> str:
        return self.source.replace("BEGIN", _quoted(begin)).replace("END", _quoted(end))


_OTHERS = "choose another template, or a tokenizer that has them"


class Own(Template):
    """The chat template that came with a model, found out about by rendering.

    Raises ValueError if the template fails on two words, or ends no answer with a special token.
    """

    name = "the model's own"

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.specials = _special(tokenizer)
        self.end = self._found_end()

    def _found_end(self) -> str:
        """The special token after the answer of a conversation of two words."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text = chat_template.render(self.source, probe, variables=self.tokenizer.special_tokens_map)
        found = self._pattern.search(text, text.rfind("answer"))
        if found is None:
            raise ValueError("the model's own chat template ends an answer with no special token; name a template")
        return found[0]

    def stop(self, tokenizer: Tokenizer) -> int:
        return tokenizer.token_id(self.end)

    def check(self, tokenizer: Tokenizer) -> None:
        if tokenizer is not self.tokenizer:
            tokenizer.token_id(self.end)

    def _render(self, asked: Sequence[chat_template.Request]) -> Sequence[str | ValueError]:
        return chat_template.render_many(self.source, asked, self.tokenizer.special_tokens_map)


def _text_or_error(template: Any, messages: Sequence[Mapping[str, Any]], opened: bool) -> str | ValueError:
    try:
        return str(template.render(messages=messages, add_generation_prompt=opened))
    except TemplateError as error:
        return ValueError(str(error))


def _groups(talks: Sequence[Talk]) -> Iterator[Sequence[Talk]]:
    """The conversations in groups that one process renders, each of one at least."""
    start, texts, byte_level = 0, 0, 0
    for i, talk in enumerate(talks):
        times = 1 + sum(turn.role == "assistant" for turn in talk)
        texts, byte_level = texts + times, byte_level + times * sum(len(turn.whole) for turn in talk)
        if i > start and (texts > MAX_TEXTS or byte_level > MAX_CHARS):
            yield talks[start:i]
            start, texts, byte_level = i, times, times * sum(len(turn.whole) for turn in talk)
    if start < len(talks):
        yield talks[start:]


def _given(found: str | ValueError) -> str:
    if isinstance(found, ValueError):
        raise found
    return found


def _prefix(before: str | ValueError, full: str | ValueError) -> str:
    before, full = _given(before), _given(full)
    if not full.startswith(before):
        raise ValueError(
            "the model's own chat template writes the beginning of a conversation differently once it is longer; "
            "name a template"
        )
    return before


def _special(tokenizer: Tokenizer) -> dict[str, tuple[bool, bool]]:
    """The special tokens, and whether each takes the spaces to its left and right."""
    added = tokenizer.inner.get_added_tokens_decoder().values()
    return {t.content: (t.lstrip, t.rstrip) for t in added if t.special}


def encoded(
    pieces: Sequence[Piece], tokenizer: Tokenizer, all_trained: bool = False
) -> tuple[list[int], list[bool]]:
    """The ids of the pieces in a row, and which of them are trained on.

    Raises ValueError for a special token that the tokenizer has not.
    """
    ids: list[int] = []
    trained: list[bool] = []
    follows = False
    for piece in pieces:
        made = _ids(piece, tokenizer, follows)
        ids += made
        trained += [piece.trained or (all_trained and made != tokenizer.document_start)] * len(made)
        follows = not piece.special
    return ids, trained


def _ids(piece: Piece, tokenizer: Tokenizer, follows: bool) -> list[int]:
    if not piece.special:
        return tokenizer.encode_continuation(piece.text) if follows else tokenizer.encode(piece.text)
    if piece.text == BEGIN.text:
        return tokenizer.document_start
    return [tokenizer.eos if piece.text == END.text else tokenizer.token_id(piece.text)]


def prompt(template: Template, talk: Talk, tokenizer: Tokenizer) -> list[int]:
    """The ids after which a model answers: the same with which the template begins such an answer in training."""
    template.check(tokenizer)
    (pieces,) = template.write([talk], opened=True)
    return encoded(pieces, tokenizer)[0]


def carried(template: Template, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the template and its stop token in the files beside it, as other tools look for them.

    Raises ValueError if it cannot write what the template asks for.
    """
    template.check(tokenizer)
    other = tokenizer.with_stop(template.stop(tokenizer))
    other.extra_files[chat_template.JINJA] = template.jinja(tokenizer).encode()
    name = other.config_path.name
    if name in other.extra_files:  # which may have a template of its own, or the one that was there before
        words = json_file.parse(other.extra_files[name], other.config_path)
        if words.pop("chat_template", None) is not None:
            other.extra_files[name] = (json.dumps(words, indent=2) + "\n").encode()
    return other


def of(tokenizer: Tokenizer, card: Mapping[str, Any]) -> Template | None:
    """The template that a model speaks: the one that its card names, else its own, if it came with one.

    Raises ValueError if the tokenizer cannot write it, or it ends no answer.
    """
    name = card.get("template")
    if isinstance(name, str) and name in TEMPLATES:
        TEMPLATES[name].check(tokenizer)
        return TEMPLATES[name]
    source = chat_template.template_from_files(tokenizer.extra_files, tokenizer.config_path.parent)
    return None if source is None else Own(source, tokenizer)


# The named templates


def _quoted(text: str) -> str:
    """The text as a string of jinja, which reads the same escapes as Python."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _pair(name: str, *roles: str) -> str:
    """Refuses what is not one instruction with or without its answer, or one of these."""
    return (
        "{% set roles = messages | map(attribute='role') | join(', ') %}"
        f"{{% if roles not in {('user', 'user, assistant', *roles)} %}}"
        f"{{{{ raise_exception('template {name} has one instruction and one answer, found ' + roles[:80]) }}}}"
        "{% endif %}{{ BEGIN }}{% for m in messages %}"
    )


def _alpaca(name: str, tail: str) -> str:
    first, second = (form.split("{instruction}") for form in (PAIRED, ALONE))
    middle, last = first[1].split("{input}")
    return (
        _pair(name) + "{% if m['role'] == 'assistant' %}{{ m['content'] + END }}"
        "{% elif m['input'] is defined and m['input'] %}"
        f"{{{{ {_quoted(first[0])} + m['content'] + {_quoted(middle)} + m['input'] + {_quoted(last + tail)} }}}}"
        f"{{% else %}}{{{{ {_quoted(second[0])} + m['content'] + {_quoted(second[1] + tail)} }}}}"
        "{% endif %}{% endfor %}"
    )


def _spoken(name: str) -> str:
    """Begins, and goes through the messages."""
    return (
        "{{ BEGIN }}{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
        f"{{{{ raise_exception('template {name}: expected messages, found plain text; its template is plain') }}}}"
        "{% endif %}"
    )


def _turns(name: str) -> str:
    """Takes the system off the messages, and goes through the others."""
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

_CHATML = _spoken("chatml") + (
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = _spoken("llama3") + (
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
_ALL = (
    Named("plain", _PLAIN),
    Named("alpaca", _alpaca("alpaca", ""), inputs=True),
    Named("alpaca-newline", _alpaca("alpaca-newline", "\n"), inputs=True),
    Named("mistral", _MISTRAL, never=_WORDS),
    Named("llama2", _LLAMA2, never=_WORDS),
    Named("llama3", _LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    Named("chatml", _CHATML, ("<|im_start|>", "<|im_end|>")),
)
TEMPLATES = {each.name: each for each in _ALL}
"""The named templates."""


def named(name: str) -> Named:
    """A template by its name. Raises ValueError if there is none."""
    if name not in TEMPLATES:
        raise ValueError(f"no template is called {name!r}; there are {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
