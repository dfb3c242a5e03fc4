"""Requests and answers of a server, independent of the protocol."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from dunes.generate.sampling import RULES
from dunes.serve.fields import ENDLESS, SEEDS, Fields, Refused
from dunes.text.templates import Turn

PROMPTS = 48
"""Maximum total number of choices in a body with several prompts, so that the queue has room for other
requests."""
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<PRE> ", " <SUF>", " <MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)
"""Sentinels of prefix, suffix and middle in the prompts of Qwen, StarCoder, DeepSeek, CodeLlama and Codestral."""
FILE = re.compile(r"(?:<\|file_sep\|>|<file_sep>)([^\n]*)\n")
REPOSITORY = re.compile(r"^(?:<\|repo_name\|>|<repo_name>)[^\n]*\n")
HINTS = re.compile(r"\A\W{1,4} language: [^\n]*\n(?:\W{1,4} indentation: [^\n]*\n)?")
"""Lines that minuet puts before the text: https://github.com/milanglacier/minuet-ai.nvim."""
Settings = Mapping[str, float]
"""Settings of a sampler, by name; missing settings are neutral."""
UNNAMED = "filename"
"""Placeholder of llama-server for the name of the file in an `/infill` request."""


@dataclass(frozen=True)
class LineRequest:
    """A request for the rest of a line between two texts. `name` is the file's path, if known. Completion also
    copies from `files`, which are pairs (name, text)."""

    before: str
    after: str = ""
    name: str = ""
    files: Sequence[tuple[str, str]] = ()
    alternatives: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    model: str = ""
    shows_all: bool = False
    explains: bool = False
    """True if the answer explains the tokens of the first suggestion. If `shows_all` is true, improbable and short
    suggestions are kept."""
    beams: int | None = None
    """Number of beams of the search; None for the model's default."""


@dataclass(frozen=True)
class TextRequest:
    """A request to continue a prompt (text or ids) or a chat.

    `sampling` contains settings of the sampler; missing settings are neutral. `logprobs` is the number of
    alternatives per token; None means no log-probabilities. With `echo`, the answer starts with the prompt. If
    there are `messages`, the model's chat template turns them and `variables` into the prompt. A model without a
    template reads `prompt`. With `continues`, the last message is the beginning of the answer.
    """

    prompt: str | Sequence[int] = ""
    max_tokens: int = ENDLESS
    sampling: Settings = field(default_factory=dict)
    seed: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    messages: Sequence[Turn] = ()
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    batch: object = None
    """The batch whose tokenizer encoded `messages`; None without messages."""
    logprobs: int | None = None
    echo: bool = False
    model: str = ""


Request = LineRequest | TextRequest


class TokenText(NamedTuple):
    """A token: its id, bytes and log-probability (nats; None for a prompt's first token), and the most probable
    tokens at its position."""

    id: int
    data: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float]] = ()
    offset: int = 0
    """Number of characters that precede the token in the answer."""

    @property
    def text(self) -> str:
        """The token's text; U+FFFD for a part of a character."""
        return self.data.decode(errors="replace")

    def entry(self, has_id: bool) -> dict[str, Any]:
        """The token and the most probable tokens, with log-probabilities, in the clients' format."""

        def entry(id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
            fields = {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}
            return {"id": id, **fields} if has_id else fields

        top = [entry(*alternative) for alternative in self.top]
        return entry(self.id, self.data, self.logprob) | {"top_logprobs": top}


@dataclass
class Answer:
    """A complete answer, or a part of an answer if `reason` is empty. `first` marks the first part of a choice in
    a stream. Reasons: stop (end token), length (limit), word (stop string `stopped_at`)."""

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
    first: bool = False
    word: float | None = None
    """Probability of the first word of a completed line; None if the answer is not a line completion."""
    line: float | None = None
    """Probability of the entire completed line; None if the answer is not a line completion."""
    source: str = ""
    """Source of a completed line: model or copies."""
    explained: dict[str, Any] = field(default_factory=dict)


Facts = Mapping[str, Any]
Named = Sequence[tuple[str, Facts]]
"""Names of models and of their adapters, with their facts."""
Event = Answer | list[Answer] | Exception
"""A result of a request: part of a text, a complete text, the answers for a line, or an error."""
Answers = Mapping[int, Answer]
"""Answers, or parts of answers, keyed by the index of the choice in the reply."""


class Asked:
    """The requests in a body: one text request for each choice of the reply, or one line request for all choices
    of a prompt. Each prompt has `count` choices. The reply's id starts with `prefix`. `streams` is the default of
    the field `stream`. `files` are indexed before the requests. Raises Refused if one body asks for too many
    choices."""

    def __init__(
        self, fields: Fields, requests: Sequence[Request], prefix: str = "", count: int = 1, streams: bool = False
    ) -> None:
        self.fields, self.requests, self.model = fields, [*requests], fields.text("model")
        self.files = [request.files for request in requests if isinstance(request, LineRequest)]
        self.count, self.stream = count, fields.flag("stream", streams)
        if all(isinstance(request, LineRequest) for request in requests):  # lines are not sampled
            fields.disregard("seed", "random_seed", *chain(*(rule.names for rule in RULES.values())))
        self.id, self.created = prefix + uuid.uuid4().hex, int(time.time())
        if len(requests) > PROMPTS:
            raise fields.refusal("prompt", f"{len(requests)} choices of all prompts; at most {PROMPTS}")


def read_text(
    fields: Fields, defaults: Settings, limit: str, tokens: int = -1, options: Fields | None = None, **more: Any
) -> TextRequest:
    """Read a TextRequest from the fields; its settings are read from `options`, if given. A missing sampler
    setting is taken from `defaults`, or is neutral. `limit` is the name of the field for the maximum number of
    tokens; `tokens` is this field's default. `more` are additional attributes of the request."""
    options, sampling = options or fields, dict[str, float]()
    for name, rule in RULES.items():
        read: Any = options.integer if isinstance(rule.neutral, int) else options.number
        value = read(options.first(*rule.names), defaults.get(name, rule.neutral), *rule.requests)
        sampling[name] = max(value, rule.bounds[0])
    values = {"max_tokens": options.limit(limit, tokens), "seed": options.seed(), "stop": options.stops()}
    return TextRequest(**{"sampling": sampling, "model": fields.text("model"), **values, **more})


def choices(request: TextRequest, count: int) -> list[Request]:
    """`count` requests with different seeds."""
    return [replace(request, seed=(request.seed + i) % (SEEDS + 1)) for i in range(count)]


def line_or_texts(
    text: TextRequest, prompt: str | Sequence[int], after: str | None = None, count: int = 1
) -> list[Request]:
    """A line request if `after` is given, or if the prompt contains a suffix (`MARKS`); otherwise text requests.

    For a line with a maximum of 0 tokens, the list is empty.
    """
    line, has_tokens = None, text.echo or text.logprobs is not None
    if isinstance(prompt, str) and after is not None:
        line = LineRequest(prompt, after)
    elif isinstance(prompt, str) and not has_tokens:
        line = fill_in_the_middle(prompt)
    if line is None:
        return choices(replace(text, prompt=prompt), count)
    if has_tokens:
        raise Refused(400, "log-probabilities and echo are not supported for the rest of a line; leave them out")
    limit = text.max_tokens if text.max_tokens < ENDLESS else None
    if limit == 0:
        return []
    return [replace(line, alternatives=count, max_tokens=limit, stop=text.stop, model=text.model)]


def prompts(fields: Fields) -> list[str | list[int]]:
    """The prompts of a body: one text, one list of ids, or a list of texts and lists of ids."""
    value = fields.get("prompt")
    if not isinstance(value, list):
        return [fields.text("prompt", None)]
    if _are_ids(value):
        return [value]
    if not 1 <= len(value) <= PROMPTS:
        raise fields.refusal("prompt", f"{len(value)} prompts; expected 1 to {PROMPTS}")
    if not all(isinstance(item, str) or _are_ids(item) for item in value):
        raise fields.refusal("prompt", "expected a string, token ids, or a list of these")
    return [Fields({"prompt": item}).text("prompt") if isinstance(item, str) else item for item in value]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def fill_in_the_middle(prompt: str) -> LineRequest | None:
    """The line request of a prompt with fill-in-the-middle sentinels; None for other prompts."""
    for prefix, suffix, middle in MARKS:
        if prefix in prompt and suffix in prompt and (not middle or middle in prompt):
            places = {prefix: prompt.find(prefix), suffix: prompt.find(suffix)}
            places |= {middle: prompt.rfind(middle)} if middle else {}
            marks = sorted(places, key=lambda mark: places[mark])
            ends = [*(places[mark] for mark in marks[1:]), len(prompt)]
            parts = {m: prompt[places[m] + len(m) : end] for m, end in zip(marks, ends, strict=True)}
            name, files = _files(prompt[: places[marks[0]]])
            before = HINTS.sub("", parts[prefix] + parts.get(middle, ""))
            return LineRequest(before, parts[suffix], file_name(name), files)
    return None


def _files(head: str) -> tuple[str, Sequence[tuple[str, str]]]:
    """The name of the file with the cursor, and all other files, from the text before the sentinels. The last file
    contains the cursor if its text is blank."""
    parts = FILE.split(REPOSITORY.sub("", head))
    files = tuple(zip(parts[1::2], parts[2::2], strict=True))
    return (files[-1][0], files[:-1]) if files and not files[-1][1].strip() else ("", files)


def file_name(name: str) -> str:
    """The name of a file; empty for the placeholder UNNAMED."""
    return "" if name == UNNAMED else name
