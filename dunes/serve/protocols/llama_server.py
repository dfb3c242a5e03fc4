"""The HTTP paths of llama-server, which llama.vim and llama.vscode use.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server. Contrary to llama-server's README, the field
`prompt` of `/infill` is text between `input_prefix` and the cursor.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from dunes import __version__
from dunes.generate.sampling import RULES
from dunes.serve.fields import CHOICES, ENDLESS, REFERENCE, Fields
from dunes.serve.protocols import ollama
from dunes.serve.protocols.protocol import Check, Endpoint, Protocol
from dunes.serve.requests import (
    Answer,
    Answers,
    Asked,
    Facts,
    LineRequest,
    Named,
    Request,
    TextRequest,
    file_name,
    line_or_texts,
    prompts,
    read_text,
)

REASONS = {"stop": "eos", "length": "limit", "word": "word"}
PROBS = "completion_probabilities"
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Default settings of llama-server."""


def read_infill(fields: Fields) -> Asked:
    """Read a request for the rest of a line; `n_predict` 0, which clients send to warm up, requests no line."""
    before = fields.text("input_prefix", None) + fields.text("prompt")
    after, limit = fields.text("input_suffix", None), fields.limit("n_predict")
    count, stop = fields.integer(fields.first("n_cmpl", "n"), 1, 1, CHOICES), fields.stops()
    files, name = fields.open_files("input_extra"), file_name(fields.path("filename", "path"))
    fields.items("response_fields", 256)
    fields.flag("return_tokens")
    tokens = limit if 0 < limit < ENDLESS else None  # a KV cache has room for so many
    request = LineRequest(before, after, name, files, count, tokens, stop, fields.text("model"))
    asked = Asked(fields, [request] if limit else [], count=count)
    asked.files = [files]
    return asked


def read_completion(fields: Fields) -> Asked:
    """Requests for texts after prompts, or for the rest of a line if a prompt has fill-in-the-middle sentinels."""
    limit = fields.first("n_predict", "max_tokens")
    text = read_text(fields, SAMPLING, limit, logprobs=fields.integer("n_probs", 0, 0, 100) or None)
    count = fields.integer(fields.first("n_cmpl", "n"), 1, 1, CHOICES)
    fields.items("response_fields", 256)
    fields.flag("return_tokens")
    requests = [r for prompt in prompts(fields) for r in line_or_texts(text, prompt, None, count)]
    return Asked(fields, requests, count=count)


def write(request: Asked, answers: Answers, streams: bool) -> Any:
    """The reply as an object, or as a list of objects if several answers were requested. In a stream, the object
    for a part or the end of an answer."""
    replies = [(_reply if answer.reason else _part)(request, i, answer) for i, answer in answers.items()]
    if streams:
        reply, is_last = replies[0], any(answer.reason for answer in answers.values())
        cleared = ("content", "tokens", PROBS) if is_last else ()  # earlier parts had these
        return reply | {name: type(reply[name])() for name in cleared if name in reply}
    several = request.count > 1 or isinstance(request.fields.body.get("prompt"), list)
    return replies if several or len(replies) > 1 else replies[0]


def _reply(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The object for an answer, with all fields or only `response_fields`. The name "a/b" means field b of object
    a."""
    body = request.fields.body
    reply = {
        "index": index,
        "content": answer.text,
        "tokens": answer.ids if body.get("return_tokens") else [],
        "id_slot": 0,
        "stop": True,
        "model": request.model,
        "tokens_predicted": answer.new_tokens,
        "tokens_evaluated": answer.prompt_tokens,
        "generation_settings": settings(request.requests[0] if request.requests else None),
        "prompt": body.get("prompt", "") if isinstance(body.get("prompt", ""), str) else "",
        "has_new_line": "\n" in answer.text,
        "truncated": False,
        "stop_type": REASONS.get(answer.reason, "none"),
        "stopping_word": answer.stopped_at,
        "tokens_cached": answer.cached_tokens,
        "timings": _timings(answer),
    }
    if body.get("n_probs"):
        reply[PROBS] = [token.entry(True) for token in answer.tokens]
    if not (names := request.fields.items("response_fields", 256)):
        return reply
    # llama.vim would cache an empty `content`, and show it even after the model is loaded or a file has changed.
    if answer.line is not None and not answer.text:
        del reply["content"]
    values = {name: _field(reply, name) for name in names if isinstance(name, str)}
    return {name: value for name, value in values.items() if value is not None}


def _field(reply: Any, name: str) -> Any:
    """The value of a field; "a/b" is field b of object a. None if the field is missing."""
    for part in name.split("/"):
        reply = reply.get(part) if isinstance(reply, Mapping) else None
    return reply


def _part(request: Asked, index: int, part: Answer) -> dict[str, Any]:
    """The object for a part of an answer in a stream."""
    chunk: dict[str, Any] = {"index": index, "content": part.text, "tokens": part.ids}
    chunk |= {"stop": False, "id_slot": 0, "tokens_predicted": 0, "tokens_evaluated": 0}
    if part.tokens and request.fields.body.get("n_probs"):
        chunk[PROBS] = [token.entry(True) for token in part.tokens]
    return chunk


def _timings(answer: Answer) -> dict[str, Any]:
    """Numbers of tokens and times in ms, for prefill and decoding."""
    read, new_tokens = max(0, answer.prompt_tokens - answer.cached_tokens), answer.new_tokens
    prompt = 1e3 * (answer.prompt_seconds if answer.line is None else answer.seconds)
    decoding = max(0.0, 1e3 * answer.seconds - prompt)
    timings: dict[str, Any] = {"cache_n": answer.cached_tokens}
    for name, count, time in (("prompt", read, prompt), ("predicted", new_tokens, decoding)):
        timings |= {f"{name}_n": count, f"{name}_ms": time}
        timings[f"{name}_per_token_ms"] = time / count if count else 0.0
        timings[f"{name}_per_second"] = 1e3 * count / time if time else 0.0
    return timings


def settings(request: Request | None) -> dict[str, Any]:
    """A request's settings under llama-server's names; settings that this server lacks have their neutral
    values."""
    text = request if isinstance(request, TextRequest) else TextRequest(sampling=SAMPLING | {"temperature": 0.0})
    limit = text.max_tokens if text.max_tokens < ENDLESS else -1
    return REFERENCE["settings"] | {
        **{name: values[0] for name, values in REFERENCE["unsupported"].items()},
        "seed": text.seed,
        **{rule.names[0]: text.sampling.get(name, rule.neutral) for name, rule in RULES.items()},
        "stop": list(request.stop) if request else [],
        "max_tokens": limit,
        "n_predict": limit,
        "stream": False,
        "n_probs": text.logprobs or 0,
    }


def health(models: Named) -> dict[str, Any]:
    """The reply to llama-server's /health."""
    return {"status": "ok", "model": models[0][0]}


def list_models(models: Named) -> dict[str, Any]:
    """The reply to OpenAI's /v1/models, with additional fields for Ollama's clients."""
    return {"object": "list", "data": [_entry(*model) for model in models], **ollama.tags(models)}


def _entry(name: str, facts: Facts) -> dict[str, Any]:
    fields = {"n_vocab": "vocab", "n_ctx": "context_length", "n_ctx_train": "context_length", "n_embd": "dim"}
    fields |= {"n_params": "parameters", "size": "size", "ftype": "dtype"}
    return {
        "id": name,
        "aliases": [name],
        "tags": [],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": int(facts["modified"]),
        "owned_by": "dunes",
        "meta": {"vocab_type": 2, **{key: facts[name] for key, name in fields.items()}},
    }


def props(models: Named) -> dict[str, Any]:
    """The reply to llama-server's /props, from which llama.vscode reads the context length."""
    name, facts = models[0]
    return REFERENCE["props"] | {
        "default_generation_settings": {"params": settings(None), "n_ctx": facts["context_length"]},
        "model_alias": name,
        "model_ftype": facts["dtype"],
        "model_path": facts["folder"],
        "bos_token": facts["bos"],
        "eos_token": facts["eos"],
        "build_info": f"dunes-{__version__}",
    }


def slots(models: Named) -> list[dict[str, Any]]:
    """The reply to llama-server's /slots: a single slot, which is always reported as idle."""
    return [REFERENCE["slot"] | {"n_ctx": models[0][1]["context_length"], "params": settings(None)}]


def _vim(data: bytes) -> str:
    # llama.vim caches every reply of one line that contains `"content":"`, even if the text is empty. So a reply
    # without a suggestion has no `content`.
    if b"content" not in data and isinstance(json.loads(data), dict):
        return ""
    if not re.search(rb'"content"\s*:"', data) or b"\n" in data.strip():
        raise ValueError('the reply has no `"content":"` on a single line, so llama.vim drops it')
    return _vscode(data)


def _vscode(data: bytes) -> str:
    content = json.loads(data)
    return str((content[0] if isinstance(content, list) else content)["content"])


def checks(before: str, after: str, model: str) -> list[Check]:
    """The requests of llama.vim and llama-vscode at a cursor."""
    start = before.rfind("\n") + 1
    line = before[start:]
    infill = {"id_slot": 0, "input_prefix": before[:start], "prompt": line, "input_suffix": after}
    infill |= {"input_extra": [], "n_predict": 128, "stop": [], "top_k": 40, "top_p": 0.9, "stream": False}
    infill |= {"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_predict_ms": 250}
    infill |= {"n_indent": len(line) - len(line.lstrip()), "t_max_prompt_ms": 500}
    vim = infill | {"model": "", "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"]}
    return [
        Check("Vim and Neovim (llama.vim)", "/infill", vim, _vim),
        Check("VS Code (llama-vscode)", "/infill", infill | {"n_cmpl": 3}, _vscode),
    ]


_COMPLETION = Endpoint(read_completion, write, "sse-bare")
PROTOCOL = Protocol(
    "llama-server",
    {"/infill": Endpoint(read_infill, write, "sse-bare"), "/completion": _COMPLETION, "/completions": _COMPLETION},
    checks,
    {
        **dict.fromkeys(("/health", "/v1/health"), health),
        **dict.fromkeys(("/models", "/v1/models"), list_models),
        "/v1/models/{name:path}": lambda models: list_models(models)["data"][0],
        "/props": props,
        "/slots": slots,
    },
)
