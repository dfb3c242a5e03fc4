"""How a conversation is written for a model: named templates, and the model's own.

A template turns a conversation into pieces. Each piece is tokenized alone and the ids are put in a row, so
that a prompt has the same ids in training and afterwards, whatever the answer begins with. Special tokens
are pieces of their own, put in by their ids: what a user wrote is never searched for them.

Sources: Alpaca's two prompts are quoted from https://github.com/tatsu-lab/stanford_alpaca/blob/main/train.py,
llama2 follows https://github.com/meta-llama/llama/blob/main/llama/generation.py, llama3
https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py, mistral the first version in
https://github.com/mistralai/mistral-common, chatml https://github.com/openai/openai-python/blob/v0.28.1/chatml.md.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from dunes.text import chat, json_file
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

ROLES = ("system", "user", "assistant")
TOGETHER, LETTERS = 2048, 1 << 19
"""How many texts one process renders, and of how many characters: its limits of time are those of one text."""

PRIVATE = 0xF0000
"""From here on, characters of private use stand for special tokens' spellings that somebody wrote."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A text to be tokenized alone or, if `special`, the spelling of one token."""

    text: str
    trained: bool = False
    special: bool = False


BEGIN, END = Piece("{begin}", special=True), Piece("{end}", special=True)
"""What the tokenizer puts before a text, and the token that ends one, whatever these are."""


class Template(Protocol):
    """What writes conversations."""

    @property
    def name(self) -> str: ...

    def stop(self, tokenizer: Tokenizer) -> int:
        """The token that ends an answer."""
        ...

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError if this tokenizer cannot write what the template asks for."""
        ...

    def write(self, talks: Sequence[Talk], opened: bool = False) -> Iterator[list[Piece]]:
        """The pieces of each conversation; if `opened`, up to where the model's answer begins.

        Raises ValueError at the conversation that the template has no form for.
        """
        ...


@dataclass(frozen=True)
class Named:
    """A template of ours: `pieces` writes a conversation, `jinja` says the same to other tools.

    `needs` are its special tokens and `never` spellings that have to be plain text; the last of `needs`
    ends an answer, or the tokenizer's own end where there is none.
    """

    name: str
    pieces: Callable[[Talk], Iterator[Piece]]
    source: str
    opening: tuple[Piece, ...] = ()
    needs: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def stop(self, tokenizer: Tokenizer) -> int:
        return tokenizer.special(self.needs[-1]) if self.needs else tokenizer.end

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
        self.stop(tokenizer)

    def write(self, talks: Sequence[Talk], opened: bool = False) -> Iterator[list[Piece]]:
        for talk in talks:
            yield [*self.pieces(talk), *(self.opening if opened else ())]

    def jinja(self, tokenizer: Tokenizer) -> str:
        """The template for chat_template.jinja, with this tokenizer's tokens spelled out."""
        begin = "".join(str(tokenizer.inner.id_to_token(i)) for i in tokenizer.begin)
        end = str(tokenizer.inner.id_to_token(tokenizer.end))
        return self.source.replace("BEGIN", _quoted(begin)).replace("END", _quoted(end))


_OTHERS = "choose another template, or a tokenizer that has them"


class Own:
    """The chat template that came with a model, found out about by rendering.

    An answer begins where the text before it, with the generation prompt, ends, and goes to the token that
    ends it. Raises ValueError if the template fails on two words, or ends no answer with a special token.
    """

    name = "the model's own"

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self._spelled = _special(tokenizer)
        self.end = self._found_end()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(self._spelled, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _order(self) -> list[str]:
        return list(self._spelled)

    @cached_property
    def _private(self) -> re.Pattern[str]:
        return re.compile(f"[{chr(PRIVATE)}-{chr(PRIVATE + len(self._order))}]")

    def _found_end(self) -> str:
        """The special token after the answer of a conversation of two words."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text = chat.render(self.source, probe, variables=self.tokenizer.named)
        found = self._pattern.search(text, text.rfind("answer"))
        if found is None:
            raise ValueError("the model's own chat template ends an answer with no special token; name a template")
        return found[0]

    def stop(self, tokenizer: Tokenizer) -> int:
        return tokenizer.special(self.end)

    def check(self, tokenizer: Tokenizer) -> None:
        if tokenizer is not self.tokenizer:
            tokenizer.special(self.end)

    def write(self, talks: Sequence[Talk], opened: bool = False) -> Iterator[list[Piece]]:
        for group in _groups(talks):
            yield from self._written(group, opened)

    def _written(self, talks: Sequence[Talk], opened: bool) -> Iterator[list[Piece]]:
        asked = []
        for talk in talks:
            told = [{"role": t.role, "content": self._guarded(t.whole)} for t in talk]
            places = [i for i, t in enumerate(talk) if t.role == "assistant"]
            asked += [(told, opened), *((told[:i], True) for i in places)]
        texts = iter(chat.render_many(self.source, asked, self.tokenizer.named))
        for talk in talks:
            answers = [t for t in talk if t.role == "assistant"]
            full, *before = islice(texts, 1 + len(answers))
            yield self._pieces(_given(full), [len(_prefix(b, full)) for b in before], answers)

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
        at, after = 0, ended and self._spelled[self.end][1]
        for found in self._pattern.finditer(text):
            strips = self._spelled[found[0]]
            yield from self._plain(text[at : found.start()], trained, after, strips[0])
            yield Piece(found[0], trained, special=True)
            at, after = found.end(), strips[1]
        yield from self._plain(text[at:], trained, after, False)

    def _plain(self, text: str, trained: bool, left: bool, right: bool) -> Iterator[Piece]:
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        text = self._private.sub(lambda found: self._order[ord(found[0]) - PRIVATE], text)
        if text:
            yield Piece(text, trained)

    def _guarded(self, text: str) -> str:
        """The text with a private character for each spelling of a special token in it."""
        if found := self._private.search(text):
            raise ValueError(f"the text holds the character U+{ord(found[0]):X}, of private use; remove it")
        return self._pattern.sub(lambda found: chr(PRIVATE + self._order.index(found[0])), text)


def _groups(talks: Sequence[Talk]) -> Iterator[Sequence[Talk]]:
    """The conversations in groups that one process renders, each of one at least."""
    start, texts, letters = 0, 0, 0
    for i, talk in enumerate(talks):
        times = 1 + sum(turn.role == "assistant" for turn in talk)
        texts, letters = texts + times, letters + times * sum(len(turn.whole) for turn in talk)
        if i > start and (texts > TOGETHER or letters > LETTERS):
            yield talks[start:i]
            start, texts, letters = i, times, times * sum(len(turn.whole) for turn in talk)
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
        trained += [piece.trained or (all_trained and made != tokenizer.begin)] * len(made)
        follows = not piece.special
    return ids, trained


def _ids(piece: Piece, tokenizer: Tokenizer, follows: bool) -> list[int]:
    if not piece.special:
        return tokenizer.follow(piece.text) if follows else tokenizer.encode(piece.text)
    if piece.text == BEGIN.text:
        return tokenizer.begin
    return [tokenizer.end if piece.text == END.text else tokenizer.special(piece.text)]


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
    other = tokenizer.stopping(template.stop(tokenizer))
    source = template.source if isinstance(template, Own) else named(template.name).jinja(tokenizer)
    other.beside[chat.JINJA] = source.encode()
    name = other.place.name
    if name in other.beside:  # which may have a template of its own, or the one that was there before
        words = json_file.parsed(other.beside[name], other.place)
        if words.pop("chat_template", None) is not None:
            other.beside[name] = (json.dumps(words, indent=2) + "\n").encode()
    return other


def of(tokenizer: Tokenizer, card: Mapping[str, Any]) -> Template | None:
    """The template that a model speaks: the one that its card names, else its own, if it came with one.

    Raises ValueError if the tokenizer cannot write it, or it ends no answer.
    """
    name = card.get("template")
    if isinstance(name, str) and name in TEMPLATES:
        TEMPLATES[name].check(tokenizer)
        return TEMPLATES[name]
    source = chat.template_of(tokenizer.beside, tokenizer.place.parent)
    return None if source is None else Own(source, tokenizer)


# The named templates


def _answer(turn: Turn, text: str, end: Piece = END) -> Iterator[Piece]:
    if text:
        yield Piece(text, turn.trained)
    yield Piece(end.text, turn.trained, special=True)


def _pair(talk: Talk, name: str) -> tuple[Turn, Turn | None]:
    """The one instruction and its answer, if there is one."""
    roles = [t.role for t in talk]
    if roles not in (["user"], ["user", "assistant"]):
        raise ValueError(f"template {name} has one instruction and one answer, found {_listed(roles)}")
    return talk[0], talk[1] if len(talk) > 1 else None


def _listed(roles: Sequence[str]) -> str:
    return ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "") if roles else "nothing"


def _alpaca(tail: str, name: str) -> Callable[[Talk], Iterator[Piece]]:
    def pieces(talk: Talk) -> Iterator[Piece]:
        task, answer = _pair(talk, name)
        yield BEGIN
        form = PAIRED if task.input else ALONE
        yield Piece(form.format(instruction=task.text, input=task.input) + tail)
        if answer is not None:
            yield from _answer(answer, answer.text)

    return pieces


def _plain(talk: Talk) -> Iterator[Piece]:
    task, answer = (None, talk[0]) if [t.role for t in talk] == ["text"] else _pair(talk, "plain")
    yield BEGIN
    if task is not None and task.whole:
        yield Piece(task.whole)
    if answer is not None:
        yield from _answer(answer, answer.text)


def _spoken(talk: Talk, name: str) -> None:
    if any(turn.role not in ROLES for turn in talk):
        raise ValueError(f"template {name}: expected messages, found plain text; its template is plain")


def _chatml(talk: Talk) -> Iterator[Piece]:
    _spoken(talk, "chatml")
    yield BEGIN
    for turn in talk:
        yield from _headed(turn, "<|im_start|>", f"{turn.role}\n")
        if turn.role == "assistant":
            yield from _answer(turn, turn.text, Piece("<|im_end|>", special=True))
            yield Piece("\n")
        else:
            yield from (Piece("<|im_end|>", special=True), Piece("\n"))


def _headed(turn: Turn, token: str, head: str) -> Iterator[Piece]:
    """The beginning of a turn, with its text if that is no answer: in one piece, tokenized as one."""
    yield Piece(token, special=True)
    yield Piece(head + ("" if turn.role == "assistant" else turn.whole))


def _llama3(talk: Talk) -> Iterator[Piece]:
    end = Piece("<|eot_id|>", special=True)
    _spoken(talk, "llama3")
    yield BEGIN
    for turn in talk:
        yield Piece("<|start_header_id|>", special=True)
        yield Piece(turn.role)
        yield Piece("<|end_header_id|>", special=True)
        if turn.role == "assistant":
            yield Piece("\n\n")
            yield from _answer(turn, turn.text.strip(), end)
        else:
            yield from (Piece("\n\n" + turn.whole.strip()), end)


def _in_turns(talk: Talk, name: str) -> tuple[str, Talk]:
    """What the system says, and the rest, which must alternate from the user on."""
    system = talk[0].text if talk and talk[0].role == "system" else ""
    rest = talk[1:] if talk and talk[0].role == "system" else talk
    roles = [t.role for t in rest]
    if not roles or roles != [ROLES[1 + i % 2] for i in range(len(roles))]:
        raise ValueError(
            f"template {name}: expected perhaps a system, then user and assistant in turns, "
            f"found {_listed([t.role for t in talk])}"
        )
    return system, rest


def _mistral(talk: Talk) -> Iterator[Piece]:
    system, rest = _in_turns(talk, "mistral")
    yield BEGIN
    for i, turn in enumerate(rest):
        if turn.role == "assistant":
            yield from _answer(turn, " " + turn.text)
        else:
            before = f"{system}\n\n" if system and not i else ""
            yield Piece(f"[INST] {before}{turn.whole} [/INST]")


def _llama2(talk: Talk) -> Iterator[Piece]:
    system, rest = _in_turns(talk, "llama2")
    for i, turn in enumerate(rest):
        if turn.role == "assistant":
            yield from _answer(turn, f" {turn.text.strip()} ")
        else:
            before = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system and not i else ""
            yield from (BEGIN, Piece(f"[INST] {(before + turn.whole).strip()} [/INST]"))


def _quoted(text: str) -> str:
    """The text as a string of jinja, which reads the same escapes as Python."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _alpaca_source(tail: str) -> str:
    first, second = (form.split("{instruction}") for form in (PAIRED, ALONE))
    middle, last = first[1].split("{input}")
    return (
        "{{ BEGIN }}{% for m in messages %}{% if m['role'] == 'user' and loop.first %}"
        "{% if m['input'] is defined and m['input'] %}"
        f"{{{{ {_quoted(first[0])} + m['content'] + {_quoted(middle)} + m['input'] + {_quoted(last + tail)} }}}}"
        f"{{% else %}}{{{{ {_quoted(second[0])} + m['content'] + {_quoted(second[1] + tail)} }}}}{{% endif %}}"
        "{% elif m['role'] == 'assistant' and loop.index == 2 %}{{ m['content'] + END }}"
        "{% else %}{{ raise_exception('one instruction and one answer') }}{% endif %}{% endfor %}"
    )


_TURNS = (
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set ns = namespace(system=messages[0]['content']) %}{% set rest = messages[1:] %}"
    "{% else %}{% set ns = namespace(system='') %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if m['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('user and assistant alternate') }}{% endif %}"
)

_HEADED = (
    "{{ BEGIN }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = (
    "{{ BEGIN }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_MISTRAL = (
    "{{ BEGIN }}" + _TURNS + "{% if m['role'] == 'user' %}{{ '[INST] ' + "
    "(ns.system + '\\n\\n' if ns.system and loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + END }}{% endif %}{% endfor %}"
)

_LLAMA2 = (
    _TURNS + "{% if m['role'] == 'user' %}{% set before = '<<SYS>>\\n' + ns.system + '\\n<</SYS>>\\n\\n' "
    "if ns.system and loop.first else '' %}{{ BEGIN + '[INST] ' + (before + m['content']) | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + END }}{% endif %}{% endfor %}"
)


def _starts(*pieces: tuple[str, bool]) -> tuple[Piece, ...]:
    return tuple(Piece(text, special=special) for text, special in pieces)


_CHATML_OPENS = _starts(("<|im_start|>", True), ("assistant\n", False))
_LLAMA3_OPENS = _starts(
    ("<|start_header_id|>", True), ("assistant", False), ("<|end_header_id|>", True), ("\n\n", False)
)
_LLAMA3_NEEDS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PLAIN = (
    "{{ BEGIN }}{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ END }}{% endif %}"
    "{% endfor %}"
)

_ALL = (
    Named("plain", _plain, _PLAIN),
    Named("alpaca", _alpaca("", "alpaca"), _alpaca_source("")),
    Named("alpaca-newline", _alpaca("\n", "alpaca-newline"), _alpaca_source("\n")),
    Named("mistral", _mistral, _MISTRAL, never=("[INST]", "[/INST]")),
    Named("llama2", _llama2, _LLAMA2, never=("[INST]", "[/INST]")),
    Named("llama3", _llama3, _LLAMA3, _LLAMA3_OPENS, _LLAMA3_NEEDS),
    Named("chatml", _chatml, _HEADED, _CHATML_OPENS, ("<|im_start|>", "<|im_end|>")),
)
TEMPLATES = {each.name: each for each in _ALL}
"""The named templates."""


def named(name: str) -> Named:
    """A template by its name. Raises ValueError if there is none."""
    if name not in TEMPLATES:
        raise ValueError(f"no template is called {name!r}; there are {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
