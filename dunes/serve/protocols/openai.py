"""The paths of OpenAI's API, with `suffix`, `echo` and log-probabilities.

https://platform.openai.com/docs/api-reference/completions
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dunes.serve.fields import CHOICES, Fields
from dunes.serve.protocols.protocol import Check, Endpoint, Protocol
from dunes.serve.requests import Answer, Answers, Asked, TokenText, choices, line_or_texts, prompts, read_text

REASONS = {"stop": "stop", "length": "length", "word": "stop", "": None}
DEFAULT_TOKENS = 16
"""Default maximum number of new tokens, as in OpenAI's API."""
LOGPROBS = 20
"""Maximum alternatives per token."""


def read_completions(fields: Fields) -> Asked:
    """Requests to continue prompts as texts; or to complete lines, if the body or a prompt has a suffix."""
    count, after = fields.integer("n", 1, 1, CHOICES), fields.text("suffix") if fields.has("suffix") else None
    fields.integer("best_of", count, 1, count)  # `best_of` cannot exceed `n`, since all choices are returned
    logprobs = fields.integer("logprobs", 0, 0, LOGPROBS) if fields.has("logprobs") else None
    limit, echo = fields.first("max_tokens", "max_completion_tokens", "n_predict"), fields.flag("echo")
    text = read_text(fields, {}, limit, DEFAULT_TOKENS, logprobs=logprobs, echo=echo)
    requests = [request for prompt in prompts(fields) for request in line_or_texts(text, prompt, after, count)]
    _wants_usage(fields)
    return Asked(fields, requests, "cmpl-", count=count)


def read_chat(fields: Fields) -> Asked:
    """Requests for the model's next turn in a chat, or for the rest of its last turn."""
    limit = fields.first("max_completion_tokens", "max_tokens", "n_predict")
    _wants_usage(fields)
    logprobs = fields.integer("top_logprobs", 0, 0, LOGPROBS) if fields.flag("logprobs") else None
    messages, count = fields.messages(), fields.integer("n", 1, 1, CHOICES)
    if not messages:
        raise fields.refusal("messages", "missing; expected a list of messages")
    continues = fields.flag("continue_final_message")
    if fields.flag("add_generation_prompt", not continues) == continues:
        raise fields.refusal("add_generation_prompt", "expected true, or false with continue_final_message")
    variables = fields.object("chat_template_kwargs")
    values = {name: variables.get(name) for name in variables.body}
    text = read_text(fields, {}, limit, logprobs=logprobs, messages=messages, variables=values)
    return Asked(fields, choices(replace(text, continues=continues), count), "chatcmpl-", count=count)


def _wants_usage(fields: Fields) -> bool:
    """True if the client requests numbers of tokens at the end of a stream."""
    return fields.object("stream_options").flag("include_usage")


def endpoint(
    read: Callable[[Fields], Asked], full: str, chunk: str, choice: Callable[[Asked, Answer, bool], dict[str, Any]]
) -> Endpoint:
    """An endpoint of OpenAI's API, which replies with choices. In a stream, the last chunk of a choice has no
    text."""

    def reply(request: Asked, name: str, choices: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": request.id, "object": name, "created": request.created, "model": request.model}
        return {**head, "system_fingerprint": "dunes", "choices": choices, **usage}

    def write(request: Asked, answers: Answers, streams: bool) -> Any:
        listed = []
        for i, answer in answers.items():
            part = Answer(reason=answer.reason, first=answer.first) if streams and answer.reason else answer
            content = choice(request, part, streams)
            listed.append({"index": i, **content, "finish_reason": REASONS[answer.reason]})
        return reply(request, chunk if streams else full, listed, {} if streams else usage(request, answers))

    def end(request: Asked, answers: Answers) -> Sequence[Any]:
        return [reply(request, chunk, [], usage(request, answers))] if _wants_usage(request.fields) else []

    return Endpoint(read, write, end=end)


def usage(request: Asked, answers: Answers) -> dict[str, dict[str, int]]:
    """The numbers of tokens of a request; a prompt with several choices counts once."""
    longest_last = sorted(answers.items(), key=lambda item: item[1].prompt_tokens)  # an empty one has 0 tokens
    prompt = sum({i // request.count: answer.prompt_tokens for i, answer in longest_last}.values())
    new = sum(answer.new_tokens for answer in answers.values())
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}


def text_choice(request: Asked, answer: Answer, streams: bool) -> dict[str, Any]:
    """The text and the log-probabilities of a choice."""
    has_logprobs = answer.tokens if streams else request.fields.has("logprobs")
    return {"text": answer.text, "logprobs": legacy_logprobs(answer.tokens) if has_logprobs else None}


def legacy_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Log-probabilities of tokens as lists (OpenAI's older format)."""
    tops = [
        None if token.logprob is None else {data.decode(errors="replace"): p for _, data, p in token.top}
        for token in tokens
    ]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.offset for token in tokens],
    }


def chat_choice(request: Asked, answer: Answer, streams: bool) -> dict[str, Any]:
    """The message of a choice; in a stream, its delta."""
    message = {"role": "assistant"} if answer.first or not streams else {}
    message |= {} if streams and answer.reason and not answer.first else {"content": answer.text}
    logprobs = {"content": [token.entry(False) for token in answer.tokens]} if answer.tokens else None
    return {"delta" if streams else "message": message, "logprobs": logprobs}


def _zed(data: bytes) -> str:
    content = json.loads(data)
    missing = [name for name in ("id", "object", "created", "model", "choices", "usage") if name not in content]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    missing += [f"usage.{name}" for name in counts if name not in content["usage"]]
    if missing:
        raise ValueError(f"the reply lacks {', '.join(missing)}, so Zed drops it")
    return str(content["choices"][0]["text"])


def _events(data: bytes) -> str:
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    if lines[-1:] != [b"[DONE]"]:
        raise ValueError("the stream does not end with data: [DONE]")
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def checks(before: str, after: str, model: str) -> list[Check]:
    """The requests of Zed and minuet at a cursor."""
    fim = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    zed = {"model": model, "prompt": fim, "max_tokens": 64, "stop": ["<|endoftext|>"]}
    minuet = {"model": model, "prompt": before, "suffix": after, "stream": True, "max_tokens": 64}
    return [
        Check("Zed", "/v1/completions", zed, _zed),
        Check("Emacs and Neovim (minuet)", "/v1/completions", minuet, _events),
    ]


CHUNK = "chat.completion.chunk"
_CHAT = endpoint(read_chat, "chat.completion", CHUNK, chat_choice)
PROTOCOL = Protocol(
    "OpenAI",
    {
        "/v1/completions": endpoint(read_completions, "text_completion", "text_completion", text_choice),
        "/v1/chat/completions": _CHAT,
        "/chat/completions": _CHAT,
    },
    checks,
)
