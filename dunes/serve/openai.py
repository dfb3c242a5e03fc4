"""The paths of OpenAI's API (with `suffix`, `echo` and log-probabilities) and of Mistral's fill-in-the-middle API.
Tabby's requests use OpenAI's path.

https://platform.openai.com/docs/api-reference/completions, https://docs.mistral.ai/api/#tag/fim,
https://tabby.tabbyml.com/api
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from dunes.serve.fields import CHOICES, FILES, Fields
from dunes.serve.requests import (
    Answer,
    Answers,
    Asked,
    LineRequest,
    Protocol,
    Settings,
    TokenText,
    choices,
    line_or_texts,
    prompts,
    read_text,
)

SETTINGS: Settings = {
    "temperature": (1.0, 0, 1e4),
    "top_k": (0, 0, 2**31),
    "top_p": (1.0, 0, 1),
    "min_p": (0.0, 0, 1),
}
UNSUPPORTED = ("logit_bias", "presence_penalty", "frequency_penalty")
REASONS = {"stop": "stop", "length": "length", "word": "stop", "": None}
DEFAULT_TOKENS = 16
"""Default maximum number of new tokens, as in OpenAI's API."""
LOGPROBS = 20
"""Maximum alternatives per token."""


def read_completions(fields: Fields) -> Asked:
    """Requests for texts after prompts, or for the rest of a line if the body or a prompt has a suffix."""
    fields.refuse_unsupported(*UNSUPPORTED)
    count, after = fields.integer("n", 1, 1, CHOICES), fields.text("suffix") if fields.has("suffix") else None
    logprobs = fields.integer("logprobs", 0, 0, LOGPROBS) if fields.has("logprobs") else None
    echo = fields.flag("echo")
    text = read_text(fields, SETTINGS, "max_tokens", DEFAULT_TOKENS, logprobs=logprobs, echo=echo)
    requests = [request for prompt in prompts(fields) for request in line_or_texts(text, prompt, after, count)]
    _wants_usage(fields)
    return Asked(fields, requests, "cmpl-")


def read_chat(fields: Fields) -> Asked:
    """Requests for the model's next turn in a chat."""
    fields.refuse_unsupported("tools", "functions", "response_format", *UNSUPPORTED)
    limit = next(filter(fields.has, ("max_completion_tokens", "max_tokens", "n_predict")), "max_tokens")
    _wants_usage(fields)
    logprobs = fields.integer("top_logprobs", 0, 0, LOGPROBS) if fields.flag("logprobs") else None
    text = read_text(fields, SETTINGS, limit, logprobs=logprobs, messages=fields.messages())
    return Asked(fields, choices(text, fields.integer("n", 1, 1, CHOICES)), "chatcmpl-")


def read_mistral(fields: Fields) -> Asked:
    """A request for the rest of a line between a prompt and a suffix."""
    fields.refuse_unsupported(*UNSUPPORTED)
    text = read_text(fields, SETTINGS, "max_tokens", seed=fields.seed("random_seed"))
    return Asked(fields, line_or_texts(text, fields.text("prompt", None), fields.text("suffix")), "fim-")


def _wants_usage(fields: Fields) -> bool:
    """True if a stream ends with its usage."""
    return fields.object("stream_options").flag("include_usage")


def _protocol(
    read: Callable[[Fields], Asked], full: str, chunk: str, choice: Callable[[Asked, Answer, bool], dict[str, Any]]
) -> Protocol:
    """A protocol whose replies are objects with choices. A stream has chunks; the last chunk has no text."""

    def reply(request: Asked, name: str, choices: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": request.id, "object": name, "created": request.created, "model": request.model}
        return {**head, "system_fingerprint": "dunes", "choices": choices, **usage}

    def write(request: Asked, answers: Answers, streams: bool) -> Any:
        listed = []
        for i, answer in answers.items():
            part = Answer(reason=answer.reason) if streams and answer.reason else answer
            content = choice(request, part, streams)
            listed.append({"index": i, **content, "finish_reason": REASONS[answer.reason]})
        return reply(request, chunk, listed, {}) if streams else reply(request, full, listed, usage(answers))

    def end(request: Asked, answers: Answers) -> Sequence[Any]:
        return [reply(request, chunk, [], usage(answers))] if _wants_usage(request.fields) else []

    return Protocol(read, write, end=end)


def usage(answers: Answers) -> dict[str, dict[str, int]]:
    """The numbers of tokens of a request; a prompt counts once per choice."""
    prompt, new = (sum(getattr(a, name) for a in answers.values()) for name in ("prompt_tokens", "new_tokens"))
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}


def text_choice(request: Asked, answer: Answer, streams: bool) -> dict[str, Any]:
    """The text and the log-probabilities of a choice."""
    has_logprobs = answer.tokens if streams else request.fields.has("logprobs")
    logprobs = legacy_logprobs(answer.tokens, answer.offset) if has_logprobs else None
    return {"text": answer.text, "logprobs": logprobs}


def legacy_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """Log-probabilities as lists (OpenAI's older format) of tokens that start at character `offset`."""
    tops = [
        None if token.logprob is None else {data.decode(errors="replace"): p for _, data, p in token.top}
        for token in tokens
    ]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [*accumulate((len(token.text) for token in tokens), initial=offset)][: len(tokens)],
    }


def chat_choice(request: Asked, answer: Answer, streams: bool) -> dict[str, Any]:
    """The message of a choice; in a stream, its delta."""
    message = {} if streams and answer.reason else {"role": "assistant", "content": answer.text}
    logprobs = {"content": [token.entry(False) for token in answer.tokens]} if answer.tokens else None
    return {"delta" if streams else "message": message, "logprobs": logprobs}


def read_tabby(fields: Fields) -> Asked:
    """A request for the rest of a line in a file."""
    parts = fields.object("segments")
    extras = (*parts.objects("declarations", FILES), *parts.objects("relevant_snippets_from_changed_files", FILES))
    files = [(extra.text("filepath"), extra.text("body")) for extra in extras]
    line = LineRequest(parts.text("prefix"), parts.text("suffix"), parts.path("filepath"), files)
    return Asked(fields, [line], "cmpl-", False)


def write_tabby(request: Asked, answers: Answers, streams: bool) -> Any:
    """The reply with the best suggestion; without a choice if the suggestion is empty."""
    text = answers[0].text
    return {"id": request.id, "choices": [{"index": 0, "text": text}] if text else []}


CHUNK = "chat.completion.chunk"
COMPLETIONS = _protocol(read_completions, "text_completion", "text_completion", text_choice)
CHAT = _protocol(read_chat, "chat.completion", CHUNK, chat_choice)
MISTRAL = _protocol(read_mistral, "chat.completion", CHUNK, chat_choice)
TABBY = Protocol(read_tabby, write_tabby)
