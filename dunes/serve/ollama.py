"""The paths of Ollama's API. https://github.com/ollama/ollama/blob/main/docs/api.md"""

from collections.abc import Callable, Mapping, Sequence
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
from dunes.serve.requests import Answer, TextRequest

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


def _writer(content: Callable[[str], dict[str, Any]]) -> Callable[[Asked, Mapping[int, Answer], bool], Any]:
    """What writes a text in its content: with its end, or a part of it."""

    def write(request: Asked, answers: Mapping[int, Answer], streams: bool) -> dict[str, Any]:
        answer = answers[0]
        head = {"model": request.fields.text("model"), "created_at": now()}
        text = "" if streams and answer.reason else answer.text
        return head | content(text) | (_end(answer) if answer.reason else {"done": False})

    return write


def _end(answer: Answer) -> dict[str, Any]:
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


def tags(models: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The models in /api/tags, by their names and the facts of `describe_model`."""
    listed = []
    for name, facts in models:
        about = {key: facts[key] for key in ("modified_at", "size", "digest")}
        listed.append({"name": name, "model": name, **about, "details": _details(facts)})
    return {"models": listed}


def show(models: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The first model in /api/show. The template says that a suffix is taken, which clients look for."""
    _, facts = models[0]
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


def _details(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "dunes",
        "family": facts["family"],
        "families": [facts["family"]],
        "parameter_size": f"{facts['parameters'] / 1e6:.1f}M",
        "quantization_level": facts["dtype"],
    }


write_text = _writer(lambda text: {"response": text})
write_message = _writer(lambda text: {"message": {"role": "assistant", "content": text}})
GENERATE = Protocol(read_generate, write_text, "ndjson")
CHAT = Protocol(read_chat, write_message, "ndjson")
