"""The paths of llama-server, which llama.vim and llama.vscode ask.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server; what its README says of `prompt` in `/infill` is
not what it does: it stands before the cursor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dunes.serve.asked import (
    PROMPTS,
    REFERENCE,
    Asked,
    Protocol,
    asked,
    choice_count,
    choices,
    line_or_text,
    open_files,
    refuse_unsupported,
    seed_of,
    token_limit,
)
from dunes.serve.fields import Fields
from dunes.serve.requests import ENDLESS, Answer, LineRequest, Request, TextRequest, TokenText, named

NEUTRAL = (
    "grammar", "logit_bias", "ignore_eos", "lora", "presence_penalty", "frequency_penalty", "typical_p",
    "mirostat", "dynatemp_range", "top_n_sigma", "xtc_probability", "dry_multiplier",
)  # fmt: skip
"""Settings that would change a text, and are refused unless they are neutral."""
REASONS = {"stop": "eos", "length": "limit", "word": "word"}


def read_infill(fields: Fields) -> Asked:
    """The rest of a line. With `n_predict` 0, which warms up other servers, none."""
    before = fields.text("input_prefix", None) + fields.text("prompt")
    after, limit = fields.text("input_suffix", None), token_limit(fields, "n_predict")
    count, stop, files = choice_count(fields, "n_cmpl"), fields.stops(), open_files(fields, "input_extra")
    fields.items("response_fields", 256)
    name = fields.path("filename", "path")
    request = LineRequest(before, after, name, files, count, limit or 1, stop, fields.text("model"))
    return asked(fields, [named(request)] if limit else [], "")


def read_completion(fields: Fields) -> Asked:
    """Texts after prompts, or the rest of a line where a prompt spells it."""
    text = text_request(fields)
    requests: list[Request] = []
    count = choice_count(fields, "n_cmpl")
    fields.items("response_fields", 256)
    for prompt in prompts(fields):
        if isinstance(prompt, str) and text.logprobs is None:
            requests += line_or_text(text, prompt, None, count)
        else:
            requests += choices(replace(text, prompt=prompt), count)
    return asked(fields, requests, "")


def text_request(fields: Fields) -> TextRequest:
    """The settings of a text."""
    refuse_unsupported(fields, "json_schema", *NEUTRAL)
    top = fields.integer("n_probs", 0, 0, 100)
    return TextRequest(
        "",
        token_limit(fields, "n_predict"),
        fields.number("temperature", 0.8, 0, 1e4),
        fields.integer("top_k", 40, -1, 2**31) if fields.integer("top_k", 40, -1, 2**31) > 0 else 0,
        fields.number("top_p", 0.95, 0, 1) or 1e-6,
        fields.number("min_p", 0.05, 0, 1),
        fields.number("repeat_penalty", 1.0, 1e-3, 1e3),
        seed_of(fields),
        fields.stops(),
        logprobs=top or None,
        model=fields.text("model"),
    )


def prompts(fields: Fields) -> list[str | list[int]]:
    """The prompts of a body: a text, ids, or several of either."""
    value = fields.body.get("prompt")
    if isinstance(value, str):
        return [fields.text("prompt", None)]
    if not isinstance(value, list):
        return [fields.text("prompt", None)]  # refuses it
    if value and all(_is_id(item) for item in value):
        return [value]
    if not 1 <= len(value) <= PROMPTS:
        raise fields.refused("prompt", f"{len(value)} prompts; expected 1 to {PROMPTS}")
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and item and all(map(_is_id, item))):
            raise fields.refused("prompt", "expected a string, token ids, or a list of these")
    return [Fields({"prompt": item}).text("prompt") if isinstance(item, str) else item for item in value]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def write(request: Asked, answers: Mapping[int, Answer], streams: bool) -> Any:
    """An object for one answer or a part of it, a list for several, and where several were asked for."""
    body = request.fields.body
    replies = [(write_reply if a.reason else write_part)(request, i, a) for i, a in answers.items()]
    if streams:
        reply, ended = replies[0], any(answer.reason for answer in answers.values())
        cleared = ("content", "tokens", PROBS) if ended else ()  # the parts had them
        return reply | {name: type(reply[name])() for name in cleared if name in reply}
    several = body.get("n_cmpl", 1) not in (None, 1) or isinstance(body.get("prompt"), list)
    return replies if several or len(replies) > 1 else replies[0]


def write_reply(request: Asked, index: int, answer: Answer) -> dict[str, Any]:
    """The object of an answer, or of it the fields that are asked for."""
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
        "timings": timings(answer),
    }
    if body.get("n_probs"):
        reply[PROBS] = [probabilities(token) for token in answer.tokens]
    wanted = request.fields.items("response_fields", 256)
    return flat_fields(reply, [name for name in wanted if isinstance(name, str)]) if wanted else reply


def flat_fields(reply: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The fields of these names, in which a slash leads into an object; unknown ones are left out."""
    flat: dict[str, Any] = {}
    for name in wanted:
        value: Any = reply
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            flat[name] = value
    return flat


def write_part(request: Asked, index: int, part: Answer) -> dict[str, Any]:
    """A part of a stream."""
    chunk: dict[str, Any] = {"index": index, "content": part.text, "tokens": part.ids}
    chunk |= {"stop": False, "id_slot": 0, "tokens_predicted": 0, "tokens_evaluated": 0}
    if part.tokens and request.fields.body.get("n_probs"):
        chunk[PROBS] = [probabilities(token) for token in part.tokens]
    return chunk


def probabilities(token: TokenText) -> dict[str, Any]:
    """A token with its log-probability and those of the most probable ones."""

    def entry(id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"id": id, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}

    top = [entry(*alternative) for alternative in token.top]
    return entry(token.id, token.data, token.logprob) | {"top_logprobs": top}


def timings(answer: Answer) -> dict[str, Any]:
    """Tokens and milliseconds of the prompt, and of what follows."""
    read, new = max(0, answer.prompt_tokens - answer.cached_tokens), answer.new_tokens
    prompt = 1e3 * (answer.prompt_seconds if answer.line is None else answer.seconds)
    more = max(0.0, 1e3 * answer.seconds - prompt)
    return {
        "cache_n": answer.cached_tokens,
        "prompt_n": read,
        "prompt_ms": prompt,
        "prompt_per_token_ms": _per(prompt, read),
        "prompt_per_second": _per(1e3 * read, prompt),
        "predicted_n": new,
        "predicted_ms": more,
        "predicted_per_token_ms": _per(more, new),
        "predicted_per_second": _per(1e3 * new, more),
    }


def _per(part: float, count: float) -> float:
    return part / count if count else 0.0


def settings(request: Request | None) -> dict[str, Any]:
    """The settings of a request under the reference server's names; what is not ours has its neutral value."""
    text = request if isinstance(request, TextRequest) else TextRequest("", temperature=0.0, seed=0)
    limit = text.max_tokens if text.max_tokens < ENDLESS else -1
    known: dict[str, Any] = REFERENCE["settings"]
    return known | {
        "seed": text.seed,
        "temperature": text.temperature,
        "top_k": text.top_k,
        "top_p": text.top_p,
        "min_p": text.min_p,
        "repeat_penalty": text.penalty,
        "stop": list(request.stop) if request else [],
        "max_tokens": limit,
        "n_predict": limit,
        "stream": False,
        "n_probs": text.logprobs or 0,
    }


PROBS = "completion_probabilities"


INFILL = Protocol(read_infill, write, "sse-bare")
COMPLETION = Protocol(read_completion, write, "sse-bare")
