"""Chat templates: from messages to the text that a model was trained on.

The template is a stranger's program that comes with the model, so it is rendered in a short-lived
process of its own, in jinja2's sandbox and within limits of time, memory and output
(https://huggingface.co/docs/transformers/chat_templating). The words in it are only ever data.
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

JINJA, CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_TEMPLATE, MAX_OUTPUT = 1 << 18, 1 << 20
"""The largest template, and the most that it may write, in characters."""

SECONDS = 5
"""How long a template may take, by the clock."""

Request: TypeAlias = tuple[Sequence[Mapping[str, Any]], bool]
"""Messages, and whether the text is to end where an answer begins."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Under which names a message brings what its writer thought; templates read the first two."""

LIMITS = {
    "RLIMIT_CPU": 2,
    "RLIMIT_AS": 1 << 28,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_NOFILE": 3,
    "RLIMIT_NPROC": 0,
    "RLIMIT_CORE": 0,
}
"""What the process that renders may use: seconds, bytes, no file, no process; as far as the system can."""


def read_template(folder: Path | str) -> str | None:
    """The chat template of a model folder: chat_template.jinja, else the default of tokenizer_config.json.

    None if it has none. Raises ValueError that names the file for what is not a template, or too large.
    """
    path = next((p for name in (JINJA, CONFIG) if (p := Path(folder) / name).is_file()), None)
    if path is None:
        return None
    if (size := path.stat().st_size) > json_file.MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {json_file.MAX_CONFIG_BYTES} are read")
    return template_from_files({path.name: path.read_bytes()}, path.parent)


def template_from_files(files: Mapping[str, bytes], folder: Path) -> str | None:
    """The same from the contents of these files, of which messages say that they lie in `folder`."""
    if (content := files.get(JINJA)) is not None:
        try:
            return _check_size(content.decode("utf-8"), str(folder / JINJA))
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / JINJA}: not UTF-8: {error}") from None
    if CONFIG not in files:
        return None
    found = json_file.parse(files[CONFIG], folder / CONFIG).get("chat_template")
    return None if found is None else _check_size(_default_template(found, folder / CONFIG), str(folder / CONFIG))


def _default_template(found: Any, path: Path) -> str:
    """A template is a text, or several with names."""
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    names = [each.get("name") if isinstance(each, dict) else None for each in named]
    chosen = named[names.index("default")].get("template") if "default" in names else None
    if not isinstance(chosen, str):
        raise ValueError(
            f"{path}: chat_template is no text, nor a list with the name 'default' in it: {names[:9]}"
        )
    return chosen


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
    """The text that the template makes of the messages, as transformers' `apply_chat_template` makes it.

    `variables` are more names for the template, such as `bos_token` or `tools`. Raises ValueError if the
    template refuses the messages, fails, or passes a limit.
    """
    (found,) = render_many(template, [(messages, add_generation_prompt)], variables)
    if isinstance(found, ValueError):
        raise found
    return found


def render_many(
    template: str,
    asked: Sequence[Request],
    variables: Mapping[str, Any] | None = None,
) -> list[str | ValueError]:
    """`render` of many conversations, each with its `add_generation_prompt`, in one process.

    What the template refuses is a ValueError in its place. The limits are those of one conversation:
    when all of them together pass these, halves are tried.
    """
    words = [
        {
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [_normalize_message(m) for m in messages],
        }
        | {"add_generation_prompt": opened}
        for messages, opened in asked
    ]
    if not words:
        return []
    try:
        return _render_in_process(template, words)
    except ValueError as error:
        if len(asked) == 1:
            return [error]
    half = len(asked) // 2
    return render_many(template, asked[:half], variables) + render_many(template, asked[half:], variables)


def _render_in_process(template: str, words: Sequence[dict[str, Any]]) -> list[str | ValueError]:
    """A text or what went wrong for each. Raises ValueError if it went wrong for all of them together."""
    request = {
        "template": _check_size(template, "the chat template"),
        "words": words,
        "path": sorted({str(Path(_module_path(name)).parents[1]) for name in ("jinja2", "markupsafe")}),
        "limits": LIMITS,
        "output": MAX_OUTPUT,
    }
    try:
        answer = _run_process(json.dumps(request, default=dict))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat template cannot be given these messages: {error}") from None
    if "answers" not in answer:
        raise _render_error(answer)
    return [str(each["text"]) if "text" in each else _render_error(each) for each in answer["answers"]]


def _render_error(answer: Mapping[str, Any]) -> ValueError:
    text = "".join(c if c.isprintable() else " " for c in str(answer.get("error")))
    return ValueError(f"the chat template fails: {text[:300]}")


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates get it: nothing is missing rather than None, and reasoning has both of its names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a mapping with 'role' and 'content', found {type(message).__name__}")
    told = {k: v for k, v in message.items() if v is not None}
    reasoning = next((told[k] for k in REASONING_KEYS if k in told), None)
    return told if reasoning is None else {"thinking": reasoning, **told, "reasoning_content": reasoning}


def _run_process(request: str) -> dict[str, Any]:
    """The answer of `template_process.py`, run without site-packages, environment and anything else of ours."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_process.py"))]
    kept = {k: v for k, v in os.environ.items() if k in ("SYSTEMROOT", "TZ")}
    try:
        done = subprocess.run(
            command, input=request.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=SECONDS, env=kept, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"it was stopped after {SECONDS} s"}
    except ValueError:
        limit = f"{LIMITS['RLIMIT_CPU']} s of work and {LIMITS['RLIMIT_AS'] >> 20} MiB are what it may use"
        return {"error": f"it was stopped (exit code {done.returncode}); {limit}"}
    return answer


def _module_path(module: str) -> str:
    found = find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"chat templates need {module}, which comes with torch; pip install jinja2")
    return found.origin
