"""The paths of Ollama's API. https://github.com/ollama/ollama/blob/main/docs/api.md"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from dunes.serve.asked import (
    Asked,
    Protocol,
    asked,
    line_or_text,
    refuse_unsupported,
    seed_of,
    token_limit,
)
from dunes.serve.fields import Fields
from dunes.serve.llama_cpp import no_end
from dunes.serve.requests import Answer, Piece, TextRequest

REASONS = {"stop": "stop", "length": "length", "word": "stop"}
VERSION = "0.12.0"
"""The version of Ollama's API that is spoken; clients ask for it to know what they may send."""


def read_generate(fields: Fields) -> Asked:
    """A text after a prompt, or the rest of a line where there is a suffix; nothing for an empty prompt, with
    which clients load a model."""
    refuse_unsupported(fields, "images", "format")
    prompt, after = fields.text("prompt"), fields.text("suffix") or None
    requests = line_or_text(_text_request(fields), prompt, after) if prompt or after else []
    return asked(fields, requests, "", fields.flag("stream", True))


def read_chat(fields: Fields) -> Asked:
    """A model's next turn in a chat."""
    refuse_unsupported(fields, "tools", "format")
    request = replace(_text_request(fields), messages=fields.messages())
    return asked(fields, [request], "", fields.flag("stream", True))


def _text_request(fields: Fields) -> TextRequest:
    options = fields.object("options")
    return TextRequest(
        "",
        token_limit(options, "num_predict"),
        options.number("temperature", 0.8, 0, 1e4),
        options.integer("top_k", 40, 0, 2**31),
        options.number("top_p", 0.9, 0, 1) or 1e-6,
        options.number("min_p", 0.0, 0, 1),
        options.number("repeat_penalty", 1.0, 1e-3, 1e3),
        seed_of(options),
        options.stops(),
        model=fields.text("model"),
    )


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _head(request: Asked) -> dict[str, Any]:
    return {"model": request.fields.text("model"), "created_at": now()}


def _end(request: Asked, answer: Answer) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": REASONS.get(answer.reason, "load"),
        "total_duration": _nanoseconds(answer.seconds),
        "load_duration": 0,
        "prompt_eval_count": answer.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(answer.prompt_seconds),
        "eval_count": answer.new_tokens,
        "eval_duration": _nanoseconds(max(0.0, answer.seconds - answer.prompt_seconds)),
    }


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)


def write_generate(request: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """The text with its end."""
    return _head(request) | {"response": answers[0].text} | _end(request, answers[0])


def generate_piece(request: Asked, index: int, piece: Piece) -> dict[str, Any]:
    """A part of the text."""
    return _head(request) | {"response": piece.text, "done": False}


def generate_last(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The end of the text."""
    return _head(request) | {"response": ""} | _end(request, answer)


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def write_chat(request: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """The message with its end."""
    return _head(request) | _message(answers[0].text) | _end(request, answers[0])


def chat_piece(request: Asked, index: int, piece: Piece) -> dict[str, Any]:
    """A part of the message."""
    return _head(request) | _message(piece.text) | {"done": False}


def chat_last(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The end of the message."""
    return _head(request) | _message("") | _end(request, answer)


def listed(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A model in /api/tags; `facts` are those of `describe_model`."""
    return {
        "name": name,
        "model": name,
        "modified_at": facts["modified_at"],
        "size": facts["size"],
        "digest": facts["digest"],
        "details": _details(facts),
    }


def shown(facts: dict[str, Any]) -> dict[str, Any]:
    """A model in /api/show. The template says that a suffix is taken, which clients look for."""
    info = {"general.architecture": facts["family"], "general.parameter_count": facts["parameters"]}
    info[f"{facts['family']}.context_length"] = facts["context_length"]
    return {
        "modelfile": "",
        "parameters": "",
        "template": "{{ if .Suffix }}{{ .Prompt }}{{ .Suffix }}{{ else }}{{ .Prompt }}{{ end }}",
        "details": _details(facts),
        "model_info": info,
        "capabilities": ["completion", "insert"],
        "modified_at": facts["modified_at"],
    }


def _details(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "dunes",
        "family": facts["family"],
        "families": [facts["family"]],
        "parameter_size": f"{facts['parameters'] / 1e6:.1f}M",
        "quantization_level": facts["dtype"],
    }


GENERATE = Protocol(read_generate, write_generate, generate_piece, generate_last, no_end, "ndjson")
CHAT = Protocol(read_chat, write_chat, chat_piece, chat_last, no_end, "ndjson")
