"""Chat templates: the text that transformers writes, and templates that would do something else."""

import json

import pytest

from conftest import refuses
from dunes.text import chat_template

# ruff: noqa: E501  (templates)

MESSAGES = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    "turns": [
        {"role": "user", "content": " Two words "},
        {"role": "assistant", "content": "Fine: <b>&amp;</b> \"'"},
        {"role": "user", "content": "größer 漢字 😀\u2028\x00\ud800"},
    ],
    "long": [
        {"role": "system", "content": "S"},
        *({"role": r, "content": f"{r} {i}"} for i in range(4) for r in ("user", "assistant")),
        {"role": "user", "content": ""},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "no user": [{"role": "assistant", "content": "Hm"}],
    "template": [{"role": "user", "content": "{{ 7 * 7 }} {% raise %} {{ messages }}"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}],
    "thought": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning": "Hm", "x": None}],
    "call": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "at", "arguments": {"x": "<ü>"}}}],
        },
        {"role": "tool", "name": "at", "tool_call_id": "abcdefghi", "content": "7 °C"},
    ],
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {}}
FUNCTION = {"name": "at", "description": "A 'place' <ü>", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{% generation %}
    {% set inside = 'x' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endgeneration %}{{ inside }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' }}{% if message.content is string %}{{ message['content'] | trim }}
{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ '<image>' }}{% continue %}{% endif %}
{{ part['text'] | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "parts of the language": """{%- macro show(m, up=false) -%}{{ m.role | upper if up else m.role | title }}{%- endmacro -%}
  {#- a comment -#}
    {% for m in messages %}
        {%- if loop.index > 3 %}{% break %}{% endif %}
{{ show(m, up=loop.first) }}: {{ m.content | default('none', true) }} {{ m.get('x', 1) }} {{ m.missing }}|
    {%- endfor %}
{% set d = dict(a=1, b=[1.5, none, true]) %}{{ d | tojson }}{{ d.items() | list }}{{ messages | length }}
{{ messages | map(attribute='role') | join(',') }} {{ strftime_now("%Y") }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ tools | tojson(ensure_ascii=True) }} {{ '%05d' % 42 }} {{ "abc"[::-1] }} {{ "a-b".split("-") | last }}
{{ tools | tojson(indent=2, sort_keys=true) }} {{ range(3) | list }} {{ documents }} {{ '<' | e }} {{ messages[-1] | tojson }} {{ none }}
""",
}
"""Made up here, with all that the templates of these models do."""


def theirs(template, messages, **options):
    from transformers import PreTrainedTokenizerFast

    from dunes.text import Tokenizer

    oracle = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.train("bytes", []).inner, **VARIABLES)
    return oracle.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def ours(template, messages, prompt, tools):
    variables = VARIABLES | {"tools": tools}
    return chat_template.render(template, messages, add_generation_prompt=prompt, variables=variables)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(name, prompt):
    written = 0
    for which, messages in MESSAGES.items():
        tools = TOOLS if which in ("call", "turns") else None
        try:
            want = theirs(TEMPLATES[name], messages, add_generation_prompt=prompt, tools=tools)
        except Exception as error:
            said = " ".join(str(error).split())[:60]
            message = refuses("the chat template fails: ", ours, TEMPLATES[name], messages, prompt, tools)
            assert said in message
            continue
        assert ours(TEMPLATES[name], messages, prompt, tools) == want, which
        written += 1
    assert written >= 4


CANARY = """{{% set found = ({}) %}}{{{{ found }}}}"""
ATTACKS = [
    "''.__class__.__mro__[1].__subclasses__()",
    "lipsum.__globals__['os'].system('touch canary')",
    "self._TemplateReference__context.eval_ctx.environment",
    "namespace(__class__=1)",
    "raise_exception.__globals__",
    "'{0.__class__.__mro__}'.format('')",
    "messages.append(1)",
    "messages|map(attribute='__class__')|list",
    "open('canary', 'w')",
]
STATEMENTS = [
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "{% do messages.append(1) %}",
    "{% debug %}",
]


@pytest.mark.parametrize("attack", [CANARY.format(a) for a in ATTACKS] + STATEMENTS)
def test_a_template_reaches_nothing_but_its_messages(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("do not read")
    monkeypatch.setenv("API_KEY", "do not read")
    try:
        text = chat_template.render(attack, MESSAGES["system"])
    except ValueError as error:
        text = str(error)
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    for leak in ("<class", "<module", "<function", "<built-in", "do not read", "root:", "subclasses__", "[1]"):
        assert leak not in text.replace("__subclasses__", "")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "the chat template fails"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('a\nb\x1b[31m') }}", r"TemplateError: a b \[31m"),
    ],
)  # fmt: skip
def test_a_template_is_stopped_at_its_limits(template, said):
    message = refuses(said, chat_template.render, template, MESSAGES["one"])
    assert message.isprintable()
    assert len(message) < 400


def test_names_of_the_caller_do_not_hide_the_messages():
    variables = {"messages": 1, "x": "{{ 2 }}"}
    assert chat_template.render("{{ messages }}{{ x }}", [], variables=variables) == "[]{{ 2 }}"


@pytest.mark.parametrize("found", [7, {}, [], [{"name": "x", "template": "y"}], [1], [{"name": "default"}]])
def test_a_template_that_is_none_is_named(found, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    refuses(r"tokenizer_config\.json", chat_template.read_template, tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    refuses(r"chat_template\.jinja", chat_template.read_template, tmp_path)


def test_a_folder_has_a_template_in_one_of_three_ways(tmp_path):
    assert chat_template.read_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert chat_template.read_template(tmp_path) is None
    config.write_text(json.dumps({"chat_template": "a ö"}))
    assert chat_template.read_template(tmp_path) == "a ö"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert chat_template.read_template(tmp_path) == "c"
    (tmp_path / "chat_template.jinja").write_text("d ö\n", encoding="utf-8")
    assert chat_template.read_template(tmp_path) == "d ö\n"
