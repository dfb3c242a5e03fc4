"""The paths of Ollama's API. https://github.com/ollama/ollama/blob/main/docs/api.md"""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from time import time
from typing import Any

from dunes.serve.fields import Fields
from dunes.serve.protocols.protocol import Check, Endpoint, Protocol
from dunes.serve.requests import Answer, Answers, Asked, Facts, Named, TextRequest, line_or_texts, read_text
from dunes.text.templates import Turn

SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Default settings of Ollama."""
REASONS = {"stop": "stop", "length": "length", "word": "stop"}
PORT = 11434
"""Default port of Ollama."""
VERSION = "0.12.0"
"""Reported version of Ollama's API; clients derive the supported features from it."""


def read_generate(fields: Fields) -> Asked:
    """A request for a text after a prompt, or for the rest of a line if a suffix is given. An empty prompt,
    which clients send to load a model, requests no text."""
    prompt, after = fields.text("prompt"), fields.text("suffix") or None
    system, is_raw = fields.text("system"), fields.flag("raw")
    requests = line_or_texts(_text_request(fields), prompt, after) if prompt or after else []
    for i, request in enumerate(requests):
        if is_raw or not isinstance(request, TextRequest):
            fields.disregard("system", "think")
        else:
            turns = [Turn("system", system)] if system else []
            requests[i] = replace(request, messages=(*turns, Turn("user", prompt)))
    return Asked(fields, requests, streams=True)


def read_chat(fields: Fields) -> Asked:
    """A request for the model's next turn in a chat. A request without messages only loads the model."""
    text = _text_request(fields, messages=fields.messages())
    return Asked(fields, [text] if text.messages else [], streams=True)


def _text_request(fields: Fields, **more: Any) -> TextRequest:
    variables = {"enable_thinking": fields.flag("think")} if fields.has("think") else {}
    return read_text(fields, SAMPLING, "num_predict", -1, fields.object("options"), variables=variables, **more)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _endpoint(read: Callable[[Fields], Asked], content: Callable[[str], dict[str, Any]]) -> Endpoint:
    """An endpoint of Ollama; `content` returns those fields of the reply that contain its text."""

    def write(request: Asked, answers: Answers, streams: bool) -> dict[str, Any]:
        answer = answers[0]
        head = {"model": request.fields.text("model"), "created_at": _format_time(time())}
        text = "" if streams and answer.reason else answer.text
        if not request.requests and not (request.fields.text("prompt") or request.fields.text("suffix")):
            return head | content(text) | {"done": True, "done_reason": "load"}
        return head | content(text) | (_end(answer) if answer.reason else {"done": False})

    return Endpoint(read, write, "ndjson")


def _end(answer: Answer) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": REASONS[answer.reason],
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
        about = {"modified_at": _format_time(facts["modified"]), "size": facts["size"], "digest": facts["digest"]}
        listed.append({"name": name, "model": name, **about, "details": _details(facts)})
    return {"models": listed}


def show(models: Named) -> dict[str, Any]:
    """The reply to /api/show for the first model. The reply's template has `.Suffix`, which clients look for."""
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
        "modified_at": _format_time(facts["modified"]),
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


def _shown(data: bytes) -> str:
    lines = [json.loads(line) for line in data.splitlines()]
    if not lines[-1]["done"]:
        raise ValueError("the stream does not end with done")
    return "".join(line["response"] for line in lines)


def checks(before: str, after: str, model: str) -> list[Check]:
    """The request of Ollama's clients at a cursor."""
    body = {"model": model, "prompt": before, "suffix": after}
    return [Check("clients of Ollama", "/api/generate", body, _shown)]


PROTOCOL = Protocol(
    "Ollama",
    {
        "/api/generate": _endpoint(read_generate, lambda text: {"response": text}),
        "/api/chat": _endpoint(read_chat, lambda text: {"message": {"role": "assistant", "content": text}}),
    },
    checks,
    {"/api/tags": tags, "/api/ps": tags, "/api/show": show, "/api/version": lambda models: {"version": VERSION}},
    "/api/",
    lambda refused: {"error": refused.message},
)
