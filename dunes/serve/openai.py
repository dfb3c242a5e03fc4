"""The paths of OpenAI's API, with `suffix`, `echo` and log-probabilities, and Mistral's path for filling in.

https://platform.openai.com/docs/api-reference/completions, https://docs.mistral.ai/api/#tag/fim
"""

from collections.abc import Sequence
from dataclasses import replace
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
from dunes.serve.requests import Answer, Piece, Request, TextRequest, TokenText

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


def _object(request: Asked, kind: str, choice_list: Sequence[Any], **more: Any) -> dict[str, Any]:
    head = {"id": request.id, "object": kind, "created": request.created, "model": request.model or "dunes"}
    return head | {"system_fingerprint": "dunes", "choices": choice_list} | more


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """The tokens of a request; its prompts count once for each choice."""
    read, new = sum(a.prompt_tokens for a in answers), sum(a.new_tokens for a in answers)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def write_completions(request: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """All choices. Of a line, an empty one among others is left out."""
    listed = [_text_choice(request, i, answer) for i, answer in enumerate(answers)]
    return _object(request, "text_completion", listed, usage=usage(answers))


def _text_choice(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    logprobs = legacy_logprobs(answer.tokens) if request.fields.has("logprobs") else None
    return {
        "text": answer.text,
        "index": index,
        "logprobs": logprobs,
        "finish_reason": REASONS[answer.reason],
    }


def legacy_logprobs(tokens: Sequence[TokenText], start: int = 0) -> dict[str, Any]:
    """The log-probabilities of tokens as lists; the first one of a text has none."""
    offsets, place = [], start
    for token in tokens:
        offsets.append(place)
        place += len(token.text)
    tops = [
        None if token.logprob is None else {data.decode(errors="replace"): p for _, data, p in token.top}
        for token in tokens
    ]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def completion_piece(request: Asked, index: int, piece: Piece) -> dict[str, Any]:
    """A part of a choice."""
    logprobs = legacy_logprobs(piece.tokens) if piece.tokens else None
    choice = {"text": piece.text, "index": index, "logprobs": logprobs, "finish_reason": None}
    return _object(request, "text_completion", [choice])


def completion_last(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The end of a choice."""
    choice = {"text": "", "index": index, "logprobs": None, "finish_reason": REASONS[answer.reason]}
    return _object(request, "text_completion", [choice])


def _usage_end(kind: str) -> Any:
    def end(request: Asked, answers: Sequence[Answer]) -> Sequence[Any]:
        wanted = request.fields.object("stream_options").flag("include_usage")
        return [_object(request, kind, [], usage=usage(answers))] if wanted else []

    return end


def write_chat(request: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """All choices of a chat."""
    listed = []
    for i, answer in enumerate(answers):
        message = {"role": "assistant", "content": answer.text}
        logprobs = {"content": [chat_logprob(token) for token in answer.tokens]} if answer.tokens else None
        reason = REASONS[answer.reason]
        listed.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason})
    return _object(request, "chat.completion", listed, usage=usage(answers))


def chat_logprob(token: TokenText) -> dict[str, Any]:
    """A token with its log-probability and those of the most probable ones."""

    def entry(data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}

    return entry(token.data, token.logprob) | {"top_logprobs": [entry(data, p) for _, data, p in token.top]}


def chat_piece(request: Asked, index: int, piece: Piece) -> dict[str, Any]:
    """A part of a choice."""
    logprobs = {"content": [chat_logprob(token) for token in piece.tokens]} if piece.tokens else None
    delta = {"role": "assistant", "content": piece.text}
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
    return _object(request, "chat.completion.chunk", [choice])


def chat_last(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The end of a choice."""
    choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": REASONS[answer.reason]}
    return _object(request, "chat.completion.chunk", [choice])


COMPLETIONS = Protocol(
    read_completions, write_completions, completion_piece, completion_last, _usage_end("text_completion")
)
CHAT = Protocol(read_chat, write_chat, chat_piece, chat_last, _usage_end("chat.completion.chunk"))
MISTRAL = Protocol(read_mistral, write_chat, chat_piece, chat_last, _usage_end("chat.completion.chunk"))
