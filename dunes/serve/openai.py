"""The paths of OpenAI's API, with `suffix`, `echo` and log-probabilities, and Mistral's path for filling in.

https://platform.openai.com/docs/api-reference/completions, https://docs.mistral.ai/api/#tag/fim
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from dunes.serve.asked import (
    Asked,
    Protocol,
    asked,
    choice_count,
    choices,
    line_or_text,
    refuse_unsupported,
    seed_of,
    token_limit,
)
from dunes.serve.fields import Fields
from dunes.serve.llama_cpp import prompts
from dunes.serve.requests import Answer, Request, TextRequest, TokenText

REASONS = {"stop": "stop", "length": "length", "word": "stop"}
DEFAULT_TOKENS = 16
"""New tokens of a text if the request does not say: as with OpenAI."""
LOGPROBS = 20
"""Alternatives of a token at most."""


def read_completions(fields: Fields) -> Asked:
    """Texts after prompts; the rest of a line where there is a suffix, or a prompt spells one."""
    count, after = choice_count(fields), fields.text("suffix") if fields.has("suffix") else None
    text = _text_request(fields, "max_tokens", DEFAULT_TOKENS)
    if fields.has("logprobs"):
        text = replace(text, logprobs=fields.integer("logprobs", 0, 0, LOGPROBS))
    text = replace(text, echo=fields.flag("echo"))
    requests: list[Request] = []
    for prompt in prompts(fields):
        if not isinstance(prompt, str) or (after is None and (text.echo or text.logprobs is not None)):
            requests += choices(replace(text, prompt=prompt), count)
        else:
            requests += line_or_text(text, prompt, after, count)
    fields.object("stream_options").flag("include_usage")
    return asked(fields, requests, "cmpl-")


def read_chat(fields: Fields) -> Asked:
    """A model's next turn in a chat."""
    refuse_unsupported(fields, "tools", "functions", "response_format")
    limit = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    fields.object("stream_options").flag("include_usage")
    if not fields.has(limit) and fields.has("n_predict"):
        limit = "n_predict"
    text = _text_request(fields, limit, -1)
    if fields.flag("logprobs"):
        text = replace(text, logprobs=fields.integer("top_logprobs", 0, 0, LOGPROBS))
    return asked(fields, choices(replace(text, messages=fields.messages()), choice_count(fields)), "chatcmpl-")


def read_mistral(fields: Fields) -> Asked:
    """The rest of a line between a prompt and a suffix."""
    text = replace(_text_request(fields, "max_tokens", -1), seed=seed_of(fields, "random_seed"))
    request = line_or_text(text, fields.text("prompt", None), fields.text("suffix"))
    return asked(fields, request, "fim-")


def _text_request(fields: Fields, limit: str, default: int) -> TextRequest:
    refuse_unsupported(fields, "logit_bias", "presence_penalty", "frequency_penalty")
    return TextRequest(
        "",
        token_limit(fields, limit, default),
        fields.number("temperature", 1.0, 0, 1e4),
        fields.integer("top_k", 0, 0, 2**31),
        fields.number("top_p", 1.0, 0, 1) or 1e-6,
        fields.number("min_p", 0.0, 0, 1),
        seed=seed_of(fields),
        stop=fields.stops(),
        model=fields.text("model"),
    )


Write = Callable[[Asked, Mapping[int, Answer], bool], Any]
Choice = Callable[[Asked, Answer, bool], dict[str, Any]]


def _writer(kind: str, chunk: str, choice: Choice) -> Write:
    """What writes choices in objects of a kind; in a stream in chunks, the last one without text."""

    def write(request: Asked, answers: Mapping[int, Answer], streams: bool) -> dict[str, Any]:
        listed = []
        for i, answer in answers.items():
            shown = Answer(reason=answer.reason) if streams and answer.reason else answer
            reason = REASONS[answer.reason] if answer.reason else None
            listed.append({"index": i, **choice(request, shown, streams), "finish_reason": reason})
        if streams:
            return _object(request, chunk, listed)
        return _object(request, kind, listed) | usage(answers)

    return write


def _end(chunk: str) -> Callable[[Asked, Mapping[int, Answer]], Sequence[Any]]:
    """What writes the usage at the end of a stream, where it is asked for."""

    def end(request: Asked, answers: Mapping[int, Answer]) -> Sequence[Any]:
        wanted = request.fields.object("stream_options").flag("include_usage")
        return [_object(request, chunk, []) | usage(answers)] if wanted else []

    return end


def _object(request: Asked, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
    head = {"id": request.id, "object": kind, "created": request.created, "model": request.model}
    return head | {"system_fingerprint": "dunes", "choices": choices}


def usage(answers: Mapping[int, Answer]) -> dict[str, dict[str, int]]:
    """The tokens of a request; its prompts count once for each choice."""
    read, new = (sum(getattr(a, name) for a in answers.values()) for name in ("prompt_tokens", "new_tokens"))
    return {"usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}}


def text_choice(request: Asked, answer: Answer, streams: bool) -> dict[str, Any]:
    """The text of a choice."""
    wanted = answer.tokens if streams else request.fields.has("logprobs")
    return {"text": answer.text, "logprobs": legacy_logprobs(answer.tokens, answer.offset) if wanted else None}


def legacy_logprobs(tokens: Sequence[TokenText], offset: int = 0) -> dict[str, Any]:
    """The log-probabilities of tokens as lists, `offset` characters into a text, whose first one has none."""
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
    """The message of a choice; in a stream what it grows by."""
    message = {} if streams and answer.reason else {"role": "assistant", "content": answer.text}
    logprobs = {"content": [chat_logprob(token) for token in answer.tokens]} if answer.tokens else None
    return {"delta" if streams else "message": message, "logprobs": logprobs}


def chat_logprob(token: TokenText) -> dict[str, Any]:
    """A token with its log-probability and those of the most probable ones."""

    def entry(data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}

    return entry(token.data, token.logprob) | {"top_logprobs": [entry(data, p) for _, data, p in token.top]}


CHUNK = "chat.completion.chunk"
write_chat, end_chat = _writer("chat.completion", CHUNK, chat_choice), _end(CHUNK)
write_text, end_text = _writer("text_completion", "text_completion", text_choice), _end("text_completion")
COMPLETIONS = Protocol(read_completions, write_text, end=end_text)
CHAT = Protocol(read_chat, write_chat, end=end_chat)
MISTRAL = Protocol(read_mistral, write_chat, end=end_chat)
