"""The paths of Ollama's API. https://github.com/ollama/ollama/blob/main/docs/api.md"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dunes.serve.fields import Fields
from dunes.serve.requests import (
    Answer,
    Answers,
    Asked,
    Facts,
    Named,
    Protocol,
    Settings,
    TextRequest,
    line_or_texts,
    read_text,
)

SETTINGS: Settings = {
    "temperature": (0.8, 0, 1e4),
    "top_k": (40, 0, 2**31),
    "top_p": (0.9, 0, 1),
    "min_p": (0.0, 0, 1),
    "repeat_penalty": (1.0, 1e-3, 1e3),
}
REASONS = {"stop": "stop", "length": "length", "word": "stop"}
VERSION = "0.12.0"
"""Version of Ollama's API that is reported; clients check it for supported features."""


def read_generate(fields: Fields) -> Asked:
    """A request for a text after a prompt, or for the rest of a line if a suffix is given. No request for an empty
    prompt, which clients send to load a model."""
    text = _text_request(fields, "images")
    prompt, after = fields.text("prompt"), fields.text("suffix") or None
    requests = line_or_texts(text, prompt, after) if prompt or after else []
    return Asked(fields, requests, "", fields.flag("stream", True))


def read_chat(fields: Fields) -> Asked:
    """A request for the model's next turn in a chat."""
    text = _text_request(fields, "tools", messages=fields.messages())
    return Asked(fields, [text], "", fields.flag("stream", True))


def _text_request(fields: Fields, unsupported: str, **more: Any) -> TextRequest:
    fields.refuse_unsupported(unsupported, "format")
    return read_text(fields, SETTINGS, "num_predict", options=fields.object("options"), **more)


def format_time(time: datetime) -> str:
    """A time in Ollama's format."""
    return time.isoformat().replace("+00:00", "Z")


def _protocol(read: Callable[[Fields], Asked], content: Callable[[str], dict[str, Any]]) -> Protocol:
    """A protocol whose replies have their text in the fields that `content` returns."""

    def write(request: Asked, answers: Answers, streams: bool) -> dict[str, Any]:
        answer = answers[0]
        head = {"model": request.fields.text("model"), "created_at": format_time(datetime.now(UTC))}
        text = "" if streams and answer.reason else answer.text
        return head | content(text) | (_end(answer) if answer.reason else {"done": False})

    return Protocol(read, write, "ndjson")


def _end(answer: Answer) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": REASONS.get(answer.reason, "load"),
        "total_duration": int(1e9 * answer.seconds),
        "load_duration": 0,
        "prompt_eval_count": answer.prompt_tokens,
        "prompt_eval_duration": int(1e9 * answer.prompt_seconds),
        "eval_count": answer.new_tokens,
        "eval_duration": int(1e9 * max(0.0, answer.seconds - answer.prompt_seconds)),
    }


def tags(models: Named) -> dict[str, Any]:
    """The reply to /api/tags: the models by name, with their facts."""
    listed = []
    for name, facts in models:
        about = {key: facts[key] for key in ("modified_at", "size", "digest")}
        listed.append({"name": name, "model": name, **about, "details": _details(facts)})
    return {"models": listed}


def show(models: Named) -> dict[str, Any]:
    """The reply to /api/show for the first model. Its template has `.Suffix`, which clients look for."""
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


def _details(facts: Facts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "dunes",
        "family": facts["family"],
        "families": [facts["family"]],
        "parameter_size": f"{facts['parameters'] / 1e6:.1f}M",
        "quantization_level": facts["dtype"],
    }


GENERATE = _protocol(read_generate, lambda text: {"response": text})
CHAT = _protocol(read_chat, lambda text: {"message": {"role": "assistant", "content": text}})
