"""What a server is asked for, whatever the protocol, and what it answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dunes.data.document import NamedText

ENDLESS = 4096
"""New tokens of an answer at most, if the client asks for no limit or for more."""
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<PRE> ", " <SUF>", " <MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)
"""Before prefix, suffix and middle in the prompts of Qwen, StarCoder, DeepSeek, CodeLlama and Codestral."""
FILE = re.compile(r"(?:<\|file_sep\|>|<file_sep>)([^\n]*)\n")
REPOSITORY = re.compile(r"^(?:<\|repo_name\|>|<repo_name>)[^\n]*\n")
HINTS = re.compile(r"\A\W{1,4} language: [^\n]*\n(?:\W{1,4} indentation: [^\n]*\n)?")
"""Lines that minuet puts before the text: https://github.com/milanglacier/minuet-ai.nvim."""
UNNAMED = "filename"
"""The name that the reference server gives the file of an `/infill` request."""


@dataclass(frozen=True)
class LineRequest:
    """The rest of a line between two texts, in a file if its path is known. `files` are texts to copy from."""

    before: str
    after: str = ""
    name: str = ""
    files: Sequence[NamedText] = ()
    alternatives: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    model: str = ""
    shows_all: bool = False
    explains: bool = False
    """Whether suggestions are wanted however improbable or short, and the tokens of the first one."""


@dataclass(frozen=True)
class TextRequest:
    """The text after a prompt: a text, or the ids of one. `logprobs` alternatives of each token are wanted, none
    without log-probabilities; with `echo`, those of the prompt, too."""

    prompt: str | Sequence[int]
    max_tokens: int = ENDLESS
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    penalty: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    messages: Sequence[tuple[str, str]] = ()
    made_for: object = None
    """The batch of the model whose ids the prompt has, if it was made here."""
    logprobs: int | None = None
    echo: bool = False
    model: str = ""


Request = LineRequest | TextRequest


class TokenText(NamedTuple):
    """A token, its bytes, its log-probability (nats; None for the first of a text), and the most probable ones."""

    id: int
    data: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float]] = ()

    @property
    def text(self) -> str:
        """The token's text; U+FFFD for a part of a character."""
        return self.data.decode(errors="replace")


@dataclass
class Answer:
    """An answer, with a `reason`: stop, length or word (a string to stop at, `stopped_at`); or a part of one."""

    text: str = ""
    reason: str = ""
    stopped_at: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    tokens: list[TokenText] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    offset: int = 0
    """Characters of the tokens before a part."""
    word: float | None = None
    line: float | None = None
    """The probabilities of a line's first word and of all of it; None for other texts."""
    explained: dict[str, Any] = field(default_factory=dict)


Event = Answer | list[Answer] | Exception
"""What comes of a request: parts of a text and its answer, the answers of a line, or an error."""


def fill_in_the_middle(prompt: str) -> LineRequest | None:
    """The request that a raw prompt spells for fill-in-the-middle; None for other prompts."""
    for prefix, suffix, middle in MARKS:
        if prefix in prompt and suffix in prompt and (not middle or middle in prompt):
            places = {prefix: prompt.find(prefix), suffix: prompt.find(suffix)}
            places |= {middle: prompt.rfind(middle)} if middle else {}
            marks = sorted(places, key=lambda mark: places[mark])
            ends = [*(places[mark] for mark in marks[1:]), len(prompt)]
            parts = {m: prompt[places[m] + len(m) : end] for m, end in zip(marks, ends, strict=True)}
            name, files = _files(prompt[: places[marks[0]]])
            before = HINTS.sub("", parts[prefix] + parts.get(middle, ""))
            return named(LineRequest(before, parts[suffix], name, files))
    return None


def _files(head: str) -> tuple[str, Sequence[NamedText]]:
    """The name of the last file in a repository's header, which has the cursor, and the others."""
    parts = FILE.split(REPOSITORY.sub("", head))
    files = tuple(zip(parts[1::2], parts[2::2], strict=True))
    return (files[-1][0], files[:-1]) if files and not files[-1][1].strip() else ("", files)


def named(request: LineRequest) -> LineRequest:
    """The request without a name that names nothing."""
    return replace(request, name="") if request.name == UNNAMED else request
