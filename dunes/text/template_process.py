"""The process in which `chat_template.render` renders a chat template, within limits. Imports nothing of dunes.

A template comes with a model, so it is untrusted. jinja2's sandbox protects Python's objects, the limits of this
process protect the machine's time and memory. The request is JSON on standard input, the answer JSON on standard
output: {"answers": [...]}, each {"text": ...} or {"error": ...}.
https://jinja.palletsprojects.com/en/stable/sandbox/
"""

import json
import sys
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any


def set_limits(limits: dict[str, int]) -> None:
    """Set this process's limits by their names in `resource`; unsupported ones are ignored."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError, AttributeError):
            continue


def render(template: str, variables: dict[str, Any], limit: int) -> str:
    """The text that the template renders with these variables."""
    parts, length = [], 0
    for part in compile_template(template).generate(variables):
        length += len(part)
        if length > limit:
            raise ValueError(f"it writes more than {limit} characters")
        parts.append(part)
    return "".join(parts)


@cache
def compile_template(template: str) -> Any:
    """The template in the environment that transformers provides to chat templates; compiled once."""
    from jinja2 import TemplateError, ext, nodes, sandbox, utils
    from jinja2.exceptions import SecurityError

    class Generation(ext.Extension):
        """`{% generation %}` marks the assistant's text; it renders its body."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Any) -> str:
            return str(caller())

    class Namespace(utils.Namespace):
        """A namespace without names that begin with an underscore, which give access to Python's objects."""

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

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": fail,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": Namespace,
        # A function, since a class would expose its attributes.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment.from_string(template)


def render_or_error(template: str, variables: dict[str, Any], limit: int) -> dict[str, str]:
    """The text, or the error."""
    try:
        return {"text": render(template, variables, limit)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def main() -> None:
    """Read a request from standard input, write the answer to standard output."""
    request = json.load(sys.stdin)
    sys.path += request["path"]
    # No file can be opened under the limits, so modules that jinja2 imports late, also on errors, are imported
    # now.
    for name in ("jinja2.debug", "pprint", "encodings.unicode_escape"):
        import_module(name)
    render("{{ 'ö' }}{{ strftime_now('%d %b') }}{{ [1] | tojson }}", {}, 99)
    set_limits(request["limits"])
    answers = [
        render_or_error(request["template"], variables, request["output"]) for variables in request["variables"]
    ]
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
