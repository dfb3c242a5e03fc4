"""A model folder's chat template: from messages to the text that the model was trained on.

The template is an untrusted program, so it is rendered in a short-lived process, in jinja2's sandbox and with
limits on time, memory and output (https://huggingface.co/docs/transformers/chat_templating). Limits on operators,
filters and loops would not suffice: nested lists with shared parts take exponential time to compare or to print.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from dunes.text import json_file
from dunes.text.lines import decode_text
from dunes.text.model_file import find_file, read_file

JINJA, CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_TEMPLATE, MAX_OUTPUT = 1 << 18, 1 << 20
"""The longest template and the longest rendered text, in characters."""

SECONDS = 5
"""Wall-clock limit of a rendering process."""

Request: TypeAlias = tuple[Sequence[Mapping[str, Any]], bool, Mapping[str, Any]]
"""Messages, whether to add the generation prompt, and variables of this conversation."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which messages hold reasoning; templates read the first two."""

LIMITS = {
    "RLIMIT_CPU": 2,
    "RLIMIT_AS": 1 << 28,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_NOFILE": 3,
    "RLIMIT_NPROC": 0,
    "RLIMIT_CORE": 0,
}
"""Limits of the rendering process: seconds, bytes, no files, no processes; as far as the system supports them."""


def read_template(folder: Path | str) -> str | None:
    """The chat template of a model folder: chat_template.jinja, else the default of tokenizer_config.json.

    None if it has none. Raises ValueError that names the file for an invalid or too large template.
    """
    path = next(filter(None, (find_file(Path(folder), name) for name in (JINJA, CONFIG))), None)
    if path is None:
        return None
    return template_from_files({path.name: read_file(path, json_file.MAX_CONFIG_BYTES)}, path.parent)


def template_from_files(files: Mapping[str, bytes], folder: Path) -> str | None:
    """The same from the contents of these files; errors name them as files in `folder`."""
    if (content := files.get(JINJA)) is not None:
        return _check_size(decode_text(content, str(folder / JINJA)), str(folder / JINJA))
    if CONFIG not in files:
        return None
    value = json_file.parse(files[CONFIG], folder / CONFIG).get("chat_template")
    return None if value is None else _check_size(_default_template(value, folder / CONFIG), str(folder / CONFIG))


def _default_template(value: Any, path: Path) -> str:
    """A chat_template is a string, or a list of named templates."""
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    names = [each.get("name") if isinstance(each, dict) else None for each in named]
    template = named[names.index("default")].get("template") if "default" in names else None
    if not isinstance(template, str):
        raise ValueError(
            f"{path}: chat_template is neither a string nor a list with one named 'default': {names[:9]}"
        )
    return template


def _check_size(text: str, place: str) -> str:
    if len(text) > MAX_TEMPLATE:
        raise ValueError(f"{place}: {len(text)} characters; a chat template has at most {MAX_TEMPLATE}")
    return text


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of the messages, as transformers' `apply_chat_template` renders it.

    `variables` are more variables for the template, such as `bos_token` or `tools`. Raises ValueError if the
    template refuses the messages, fails, or exceeds a limit.
    """
    (text,) = render_many(template, [(messages, add_generation_prompt, {})], variables)
    return checked_text(text)


def checked_text(text: str | ValueError) -> str:
    """The text; an error instead of one is raised."""
    if isinstance(text, ValueError):
        raise text
    return text


def render_many(
    template: str,
    requests: Sequence[Request],
    variables: Mapping[str, Any] | None = None,
) -> list[str | ValueError]:
    """`render` for many requests in one process; a refused conversation gives a ValueError.

    The limits are those of one conversation: if all together exceed them, they are rendered in halves.
    """
    contexts = [
        {
            "tools": None,
            "documents": None,
            **(variables or {}),
            **own,
            "messages": [_normalize_message(m) for m in messages],
        }
        | {"add_generation_prompt": add_generation_prompt}
        for messages, add_generation_prompt, own in requests
    ]
    if not contexts:
        return []
    try:
        return _render_in_process(template, contexts)
    except ValueError as error:
        if len(requests) == 1:
            return [error]
    half = len(requests) // 2
    return render_many(template, requests[:half], variables) + render_many(template, requests[half:], variables)


def _render_in_process(template: str, contexts: Sequence[dict[str, Any]]) -> list[str | ValueError]:
    """A text or an error for each. Raises ValueError if the process as a whole fails."""
    request = {
        "template": _check_size(template, "the chat template"),
        "variables": contexts,
        "path": sorted({str(Path(_module_path(name)).parents[1]) for name in ("jinja2", "markupsafe")}),
        "limits": LIMITS,
        "output": MAX_OUTPUT,
    }
    try:
        answer = _run_process(json.dumps(request, default=dict))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"these messages cannot be passed to the chat template: {error}") from None
    if "answers" not in answer:
        raise _render_error(answer)
    return [str(each["text"]) if "text" in each else _render_error(each) for each in answer["answers"]]


def _render_error(answer: Mapping[str, Any]) -> ValueError:
    text = "".join(c if c.isprintable() else " " for c in str(answer.get("error")))
    return ValueError(f"the chat template fails: {text[:300]}")


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for templates: without keys that are None, and with reasoning under both of its names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a mapping with 'role' and 'content', found {type(message).__name__}")
    present = {k: v for k, v in message.items() if v is not None}
    reasoning = next((present[k] for k in REASONING_KEYS if k in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _run_process(request: str) -> dict[str, Any]:
    """The answer of `template_process.py`, run without site-packages and environment."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_process.py"))]
    environment = {k: v for k, v in os.environ.items() if k in ("SYSTEMROOT", "TZ")}
    try:
        done = subprocess.run(
            command, input=request.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=SECONDS, env=environment, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"it was stopped after {SECONDS} s"}
    except ValueError:
        limit = f"its limits are {LIMITS['RLIMIT_CPU']} s of CPU time and {LIMITS['RLIMIT_AS'] >> 20} MiB"
        return {"error": f"it was stopped (exit code {done.returncode}); {limit}"}
    return answer


def _module_path(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"chat templates need {module}, which comes with torch; pip install jinja2")
    return spec.origin
