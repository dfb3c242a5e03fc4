"""Read and render a model's chat template, which converts messages to the text format of the model's training.

The template comes with a model, so it is untrusted. It runs in jinja2's sandbox, which protects Python's objects
and the machine's files, and limits `range` (https://huggingface.co/docs/transformers/chat_templating,
https://jinja.palletsprojects.com/en/stable/sandbox/).
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from dunes.context import prefix_errors
from dunes.files import json_file
from dunes.files.model_file import find_file, read_file
from dunes.text.lines import decode_text

JINJA, CONFIG = "chat_template.jinja", "tokenizer_config.json"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of reasoning in messages; templates read the first two."""

OPEN, CLOSE = "\ud800", "\ud801"
"""Lone surrogates that `render` with `marks` writes around the body of each `{% generation %}` tag."""
MARKS = re.compile(f"[{OPEN}{CLOSE}]")


def read_template(folder: Path | str) -> str | None:
    """The chat template of a model folder: chat_template.jinja, or the default in tokenizer_config.json.

    None if there is no template. Raises ValueError that names the file for an invalid template.
    """
    path = next(filter(None, (find_file(Path(folder), name) for name in (JINJA, CONFIG))), None)
    if path is None:
        return None
    return template_from_files({path.name: read_file(path)}, path.parent)


def template_from_files(files: Mapping[str, bytes], folder: Path) -> str | None:
    """Like `read_template`, but from `files`, which maps names to contents; `folder` is for error messages."""
    if (content := files.get(JINJA)) is not None:
        return decode_text(content, str(folder / JINJA))
    if CONFIG not in files:
        return None
    value = json_file.parse(files[CONFIG], folder / CONFIG).get("chat_template")
    return None if value is None else _default_template(value, folder / CONFIG)


def _default_template(value: Any, path: Path) -> str:
    """The default template in the `value` of chat_template, which is a string or a list of named templates."""
    templates = value if isinstance(value, list) else [{"name": "default", "template": value}]
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in templates]
    template = templates[names.index("default")].get("template") if "default" in names else None
    if not isinstance(template, str):
        raise ValueError(
            f"{path}: chat_template is neither a string nor a list with one named 'default': {names[:9]}"
        )
    return template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    marks: bool = False,
) -> str:
    """The text of the messages, as transformers' `apply_chat_template` renders it.

    `variables` are additional variables for the template, such as `bos_token` or `tools`. With `marks`, OPEN and
    CLOSE enclose the body of each `{% generation %}` tag; transformers' `assistant_masks` cover the same text.
    Raises ValueError if the template refuses the messages or fails.
    """
    fields = {"messages": [*map(_normalize_message, messages)], "add_generation_prompt": add_generation_prompt}
    fields = {"tools": None, "documents": None, **(variables or {}), **fields}
    errors = TypeError, ValueError, RecursionError
    with prefix_errors("these messages cannot be passed to the chat template", errors):
        values = json.loads(json.dumps(fields, default=dict))
    with prefix_errors("the chat template fails", Exception, describe=_reason):  # a template may raise anything
        return str(compile_template(template, marks).render(values))


def _reason(error: Exception) -> str:
    return "".join(c if c.isprintable() else " " for c in f"{type(error).__name__}: {error}")[:300]


_NOT_ASCII = re.compile("[^\x00-\x7e\ud800-\udfff]+")


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter `tojson` of transformers' templates.

    Surrogates are never escaped, since they replace special tokens in a user's text, or mark strings.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


@cache
def compile_template(template: str, marks: bool = False) -> Any:
    """Compile the template in the environment that transformers provides to chat templates; cached."""
    from jinja2 import TemplateError, ext, nodes, sandbox, utils
    from jinja2.exceptions import SecurityError

    class Generation(ext.Extension):
        """The tag `{% generation %}` around the assistant's text; only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Any) -> str:
            text = str(caller())
            return f"{OPEN}{MARKS.sub('', text)}{CLOSE}" if marks else text

    class Namespace(utils.Namespace):
        """A namespace that refuses names with a leading underscore, which give access to Python's objects."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                check_name(name)
            utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    def fail(message: Any) -> None:
        raise TemplateError(message)

    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [Generation, ext.loopcontrols]}
    environment = sandbox.ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = to_json
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": fail,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": Namespace,
        # `dict` is a function here, since a class would expose its attributes.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment.from_string(template)


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: without None values, and with reasoning under two names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a mapping with 'role' and 'content', found {type(message).__name__}")
    present = {k: v for k, v in message.items() if v is not None}
    reasoning = next((present[k] for k in REASONING_KEYS if k in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}
