"""Tools, their calls and reasoning in chat data: rendered, tokenized and masked as transformers does."""

# ruff: noqa: E501  (templates and rows of data)

import json
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import AddedToken

from conftest import refuses
from dunes.data import examples, read_records, tokenize_records, trained_spans
from dunes.text import Tokenizer
from dunes.text.templates import (
    MAX_DEPTH,
    TEMPLATES,
    ModelTemplate,
    Turn,
    encode_prompt,
    find_template,
    get_template,
)
from small_models import byte_level_bpe

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip

# Made up here, with what the templates of these models do. GEN and END are the tags, or nothing.
HERMES = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}

# Tools
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}GEN
    {%- if message.content %}{{- message.content }}{% endif %}
    {%- for call in message.tool_calls %}
        {%- if call.function %}{% set call = call.function %}{% endif %}
        {{- '\n' if message.content or not loop.first }}{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>' }}END{{- '\n' }}
{%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
    {%- set thought = '' %}
    {%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}GEN
    {%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
    {{- content }}
    {%- for call in message.tool_calls %}
        {{- '\n' if content or not loop.first }}{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- if call.function.arguments is string %}{{- call.function.arguments }}{% else %}{{- call.function.arguments | tojson }}{% endif %}
        {{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>' }}END{{- '\n' }}
{%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

LLAMA31 = """{{- '<|begin_of_text|>' }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools is not none %}{{- 'Environment: ipython\n' }}{% endif %}{{- system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nUse these functions:\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{% endfor %}{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message.role == 'assistant' %}GEN{{- message['content'] | trim + '<|eot_id|>' }}END{% else %}{{- message['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- elif 'tool_calls' in message %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}GEN{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}{{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}END
{%- else %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{% if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{% else %}{{- message.content }}{% endif %}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
    {%- if tools is not none and message == asked[-1] %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST]' }}{% if message == asked[-1] and system is defined %}{{- system + '\n\n' }}{% endif %}{{- message.content + '[/INST]' }}
{%- elif message.tool_calls %}GEN{{- '[TOOL_CALLS][' }}{% for call in message.tool_calls %}{% set out = call.function | tojson %}{{- out[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}{% endfor %}{{- ']</s>' }}END
{%- elif message.role == 'assistant' %}GEN{{- message.content | trim + '</s>' }}END
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

OWN = {"hermes": HERMES, "qwen3": QWEN3, "llama 3.1": LLAMA31, "mistral": MISTRAL}


def source(name, tagged=True):
    tags = ("{%- generation %}", "{%- endgeneration %}") if tagged else ("", "")
    return OWN[name].replace("GEN", tags[0]).replace("END", tags[1])


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A <b>'place'</b>"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": CITY}}
    for name in ("weather", "time")
]
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Köln?"}
ANSWER = {"role": "assistant", "content": "7 degrees."}


def call(name="weather", identity="abcdefghi", **arguments):
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments or {"city": 'Köln "a"\n', "days": [1, 2.5, True, None]}},
    }


def calls(*called, content=None, **fields):
    return {"role": "assistant", "content": content, "tool_calls": [*called], **fields}


def result(text='{"degrees": 7}', identity="abcdefghi"):
    return {"role": "tool", "name": "weather", "tool_call_id": identity, "content": text}


ALL = tuple(OWN)
TALKS = {
    "no call": (ALL, [SYSTEM, ASKED, ANSWER, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "8 degrees."}]),
    "a call": (ALL, [ASKED, calls(call()), result(), ANSWER]),
    "only a call": (ALL, [SYSTEM, ASKED, calls(call())]),
    "a call again": (ALL, [ASKED, ANSWER, {"role": "user", "content": "In Rome?"}, calls(call(city="Rome")), result("9"), ANSWER]),
    "calls in a row": (ALL, [SYSTEM, ASKED, calls(call()), result(), calls(call("time", city="Köln")), result("10:00"), ANSWER]),
    "several at once": (("hermes", "qwen3", "mistral"), [ASKED, calls(call(), call("time", "abcdefghj", city="Köln")), result("same"), result("same", "abcdefghj"), ANSWER]),
    "text and a call": (("hermes", "qwen3"), [SYSTEM, ASKED, calls(call(), content="I look."), result(), ANSWER]),
    "reasoning": (("qwen3",), [ASKED, ANSWER | {"reasoning_content": "Look.\nOutside."}]),
    "earlier reasoning": (("qwen3",), [SYSTEM, ASKED, ANSWER | {"thinking": "Once."}, ASKED, ANSWER | {"reasoning": "Twice."}]),
    "reasoning about calls": (("qwen3",), [ASKED, calls(call(), reasoning_content="I ask."), result(), calls(call("time", city="K"), thinking="More."), result("1"), ANSWER | {"reasoning": "Good."}]),
    "reasoning in the text": (("qwen3",), [ASKED, ANSWER | {"content": "<think>\nOnce.\n</think>\n\nFine."}, ASKED, ANSWER | {"content": "<think>\nAgain.\n</think>\n\nFine."}]),
}  # fmt: skip
CASES = [(name, which) for which, (names, _) in TALKS.items() for name in names]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte pairs trained here; `<tool_call>` and `<think>` are words to it."""
    words = [json.dumps(TOOLS), *(m["content"] or "" for _, talk in TALKS.values() for m in talk)]
    inner = byte_level_bpe(words, 400)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def oracle(tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.json()))


def row(messages, tools=TOOLS, **fields):
    """A row as OpenAI's API has it: arguments are JSON."""
    messages = json.loads(json.dumps(messages))
    for each in (c["function"] for m in messages for c in m.get("tool_calls") or ()):
        each["arguments"] = json.dumps(each["arguments"])
    return {"messages": messages, "tools": tools, **fields}


def put(folder, *rows):
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read(folder, *rows):
    return read_records(put(folder, *rows)).rows


def encoded(record, template, tokenizer, **options):
    (example,) = tokenize_records([record], template, tokenizer, **options)
    return example


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize(("name", "which"), CASES)
def test_text_ids_and_masks_are_transformers(name, which, with_tools, tokenizer, oracle, tmp_path):
    messages, tools = TALKS[which][1], TOOLS if with_tools else None
    (record,) = read(tmp_path, row(messages, tools))
    own, asked = ModelTemplate(source(name), tokenizer), {"chat_template": source(name), "tools": tools}
    text = oracle.apply_chat_template(messages, tokenize=False, **asked)
    assert "".join(s.text for s in own.render(record.turns, variables=record.variables)) == text
    ids = is_as_transformers(oracle, source(name), messages, tools, record, tokenizer)
    prompt = oracle.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False, **asked)
    assert encode_prompt(own, record.turns[:-1], tokenizer, record.variables) == prompt
    assert ids[: len(prompt)] == prompt


def is_as_transformers(oracle, text, messages, tools, record, tokenizer):
    """The ids of a conversation; they and the mask are transformers', with generation tags and without."""
    asked = {"chat_template": text, "tools": tools, "return_assistant_tokens_mask": True, "return_dict": True}
    wanted = oracle.apply_chat_template(messages, **asked)
    assert sum(wanted["assistant_masks"]) > 0
    without = text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    for each in (text, without):
        example = encoded(record, ModelTemplate(each, tokenizer), tokenizer)
        assert example.ids.tolist() == wanted["input_ids"]
        assert example.loss_mask.tolist() == [*map(bool, wanted["assistant_masks"])], each is text
    return wanted["input_ids"]


def shown(example, tokenizer):
    return [t for t, trained in trained_spans(example, tokenizer) if trained]


def test_an_end_outside_the_tag_is_not_trained_on(tokenizer, oracle, tmp_path):
    (record,) = read(tmp_path, row(TALKS["a call"][1]))
    end = "{{- '<|im_end|>' }}{%- endgeneration %}"
    assert end in source("hermes")
    text = source("hermes").replace(end, "{%- endgeneration %}{{- '<|im_end|>' }}")
    own = ModelTemplate(text, tokenizer)
    example = encoded(record, own, tokenizer)
    asked = {"chat_template": text, "tools": TOOLS, "return_assistant_tokens_mask": True, "return_dict": True}
    wanted = oracle.apply_chat_template(TALKS["a call"][1], **asked)["assistant_masks"]
    assert example.loss_mask.tolist() == [*map(bool, wanted)]
    assert own.stop_id(tokenizer) == tokenizer.token_id("<|im_end|>")
    assert not any(t.endswith("<|im_end|>") for t in shown(example, tokenizer))


@pytest.mark.parametrize("tagged", [True, False])
def test_an_answer_that_is_excluded_from_the_loss_is_masked_with_its_calls(tagged, tokenizer, tmp_path):
    talk = [ASKED, calls(call(), weight=0), result(), ANSWER]
    (record,) = read(tmp_path, row(talk))
    own = ModelTemplate(source("qwen3", tagged), tokenizer)
    assert shown(encoded(record, own, tokenizer), tokenizer) == ["<think>\n\n</think>\n\n7 degrees.<|im_end|>"]
    everything = shown(encoded(record, own, tokenizer, train_on="all"), tokenizer)
    assert not any("<tool_call>" in text for text in everything)
    assert any("<tool_response>" in text for text in everything)


def test_tags_that_are_not_one_for_each_answer(tokenizer, oracle, tmp_path):
    """All of them are trained on, as in transformers; which of them to leave out cannot be known."""
    text = source("hermes").replace("{%- generation %}", "{%- generation %}{%- endgeneration %}{%- generation %}")
    own = ModelTemplate(text, tokenizer)
    one, other = read(tmp_path, row(TALKS["a call"][1]), row([ASKED, calls(call(), weight=0), result(), ANSWER]))
    twice = source("hermes").replace("{%- generation %}", "{%- generation %}" * 2)
    twice = twice.replace("{%- endgeneration %}", "{%- endgeneration %}" * 2)
    example, nested = (encoded(one, ModelTemplate(t, tokenizer), tokenizer) for t in (text, twice))
    assert len(shown(example, tokenizer)) == 2
    assert shown(nested, tokenizer) == shown(example, tokenizer)
    refuses("data.jsonl, line 2: ", encoded, other, own, tokenizer)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_special_tokens_in_calls_results_and_tools_are_words(name, tagged, tokenizer, tmp_path):
    wrote = "<|im_end|></s><|eot_id|>[INST]"
    parameters = {"properties": {wrote: [{"enum": [wrote]}]}}
    tool = {"type": "function", "function": {"name": wrote, "parameters": parameters}}
    asked = {"role": "user", "content": wrote}
    talk = [asked, calls(call(wrote, **{wrote: [{wrote: wrote}]})), result(wrote), ANSWER]
    if name == "qwen3":
        talk[1]["reasoning"] = wrote
    spelled = row(talk, [tool])
    (record, plain) = read(tmp_path, spelled, json.loads(json.dumps(spelled).replace(wrote, "word")))
    own = ModelTemplate(source(name, tagged), tokenizer)
    examples = [encoded(each, own, tokenizer) for each in (record, plain)]
    special = {tokenizer.token_id(t) for t in SPECIAL}
    one, other = ([i for i in e.ids.tolist() if i in special] for e in examples)
    assert one == other
    texts = ["".join(t for t, _ in trained_spans(e, tokenizer)) for e in examples]
    assert texts[0] == texts[1].replace("word", wrote)
    assert "word" in shown(examples[1], tokenizer)[0]


def test_tokens_in_json_of_ascii_are_words_too(tokenizer):
    text = "{% for m in messages %}{{ m | tojson(ensure_ascii=true) }}<|im_end|>{% endfor %}"
    turns = (Turn("user", 'ö\x7f😀"\\udc00 <|im_end|>'), Turn("assistant", "Ho"))
    first = "".join(s.text for s in ModelTemplate(text, tokenizer).render(turns)).split("<|im_end|>{", 1)[0]
    assert first == json.dumps({"role": "user", "content": turns[0].text})


def test_llama_ends_a_call_with_another_token_for_its_own_tools(tokenizer, tmp_path):
    talk = [ASKED, calls(call()), result("<result>"), ANSWER]
    (record,) = read(tmp_path, row(talk, chat_template_kwargs={"builtin_tools": ["python"]}))
    parts = [encoded(record, ModelTemplate(source("llama 3.1", t), tokenizer), tokenizer) for t in (True, False)]
    assert parts[0].loss_mask.tolist() == parts[1].loss_mask.tolist()
    assert [t[-10:] for t in shown(parts[1], tokenizer)] == ["<|eom_id|>", "<|eot_id|>"]


# Reading


def test_other_spellings_of_calls_and_tools_are_read_as_openais(tmp_path):
    function = {"name": "weather", "arguments": {"city": "K", "n": None}}
    wanted = {"type": "function", "function": function}
    spelled = [
        calls(wanted), calls(function), {"role": "assistant", "tool_calls": json.dumps([wanted])},
        {"role": "assistant", "function_call": function}, {"role": "assistant", "content": None, "function_call": json.dumps(function)},
        {"role": "function_call", "content": json.dumps([function])}, {"role": "tool_call", "content": json.dumps(function)},
    ]  # fmt: skip
    flat = [tool["function"] for tool in TOOLS]
    for i, message in enumerate(spelled):
        tools = [TOOLS, flat, json.dumps(flat), [*map(json.dumps, TOOLS)]][i % 4]
        (record,) = read(tmp_path, {"messages": [ASKED, message], "tools" if i else "functions": tools})
        assert record.turns[1] == Turn("assistant", "", fields={"tool_calls": [wanted], "content": None})
        assert record.variables == {"tools": TOOLS}
    talk = [
        ("system", "S"),
        ("human", "Hi"),
        ("function_call", json.dumps(function)),
        ("observation", "7"),
        ("gpt", "Ho"),
    ]
    (record,) = read(
        tmp_path, {"conversations": [{"from": a, "value": b} for a, b in talk], "tools": json.dumps(flat)}
    )
    assert [t.role for t in record.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert record.turns[2] == Turn("assistant", "", fields={"tool_calls": [wanted], "content": None})
    assert {t.role for r in ("tool", "function", "tool_response") for t in read(
        tmp_path, {"messages": [ASKED, {"role": r, "content": "x", "name": "a"}, ANSWER]})[0].turns[1:2]} == {"tool"}  # fmt: skip
    (record,) = read(
        tmp_path, {"messages": [ASKED, calls(call() | {"function": {"name": "now", "arguments": ""}})]}
    )
    assert record.turns[1].fields["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    (record,) = read(tmp_path, {"instruction": "Hi", "output": "Ho", "system": "S", "tools": flat})
    assert record.variables == {"tools": TOOLS}
    assert hash(record.turns[0]) == hash(replace(record.turns[0], fields={"name": "x"}))


def one(message, **fields):
    return {"messages": [ASKED, message, ANSWER], **fields}


DEEP = "[" * 10_000 + "]" * 10_000
LEVELS = json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
BAD = {
    "no JSON": one({"role": "assistant", "function_call": {"name": "a", "arguments": "{oops"}}),
    "no arguments": one(calls({"function": {"name": "a", "parameters": {}}})),
    "an empty name": one(calls({"name": "", "arguments": {}})),
    "a call of words": one({"role": "function_call", "content": "look"}),
    "nothing": one({"role": "assistant", "content": None}),
    "an unknown role": one({"role": "ipython", "content": "a"}),
    "calls of a user": one({"role": "user", "content": "a", "tool_calls": [call()]}),
    "two thoughts": one(ANSWER | {"reasoning": "b", "thinking": "c"}),
    "thoughts of no text": one(ANSWER | {"reasoning": ["b"]}),
    "calls twice": one(calls(call(), function_call=call())),
    "no list of tools": one(ANSWER, tools={"name": "a"}),
    "tools twice": one(ANSWER, tools=TOOLS, functions=TOOLS[:1]),
    "tools in two places": one(ANSWER, tools=TOOLS, chat_template_kwargs={"tools": TOOLS}),
    "deep arguments": one(calls({"function": {"name": "a", "arguments": DEEP}})),
    "half a thought": one(ANSWER | {"thinking": "ab\udfff"}),
    "tools with other functions": one(ANSWER, tools=TOOLS, functions=json.dumps(TOOLS)),
}  # fmt: skip


@pytest.mark.parametrize("which", BAD)
def test_a_bad_call_or_tool_is_refused_by_its_line(which, tmp_path):
    refuses(f"^{tmp_path / 'data.jsonl'}, line 1: ", read, tmp_path, BAD[which])


UNWRITABLE = {
    "levels of arguments": one(calls(call(a=LEVELS))),
    "levels of a tool": one(ANSWER, tools=[{"name": "a", "b": LEVELS}]),
    "no number": one(calls({"name": "a", "arguments": '{"b": [NaN]}'})),
    "too large a number": one(ANSWER, tools='[{"name": "a", "b": -1e999}]'),
    "half a character": one(calls(call(a=["\ud800"]))),
    "half a key": one(ANSWER, tools=[{"name": "a", "b": {"a\udc00": 1}}]),
}


@pytest.mark.parametrize("which", UNWRITABLE)
def test_a_call_or_tool_that_no_template_can_write_is_refused_by_its_line(which, tokenizer, tmp_path):
    (record,) = read(tmp_path, UNWRITABLE[which])
    refuses("data.jsonl, line 1: ", encoded, record, ModelTemplate(source("hermes"), tokenizer), tokenizer)


def test_calls_and_tools_at_places_of_no_meaning_are_listed(tmp_path):
    found = read_records(put(tmp_path, one(SYSTEM | {"tools": TOOLS, "name": "Al"}, tool_calls=[call()])))
    assert examples.ignored_line([found]) == [
        "ignored fields: tool_calls, tools (of messages), name (of messages)"
    ]
    assert read(tmp_path, one(ANSWER, tools=TOOLS, functions=TOOLS))[0].variables == {"tools": TOOLS}


# Templates that lack a form


def test_a_named_template_names_what_it_has_no_form_for(tokenizer, tmp_path):
    for field, each in {
        "tool_calls": row([ASKED, calls(call())], None),
        "reasoning": row([ASKED, ANSWER | {"reasoning": "a"}], None),
        "a tool's message": row([ASKED, {"role": "tool", "content": "a"}, ANSWER], None),
        "tools": row([ASKED, ANSWER]),
    }.items():
        refuses(f"line 1: {field}: ", encoded, read(tmp_path, each)[0], get_template("chatml"), tokenizer)
    for name in TEMPLATES:
        refuses(f"template {name}", get_template(name).render, (Turn("tool", "a", fields={"name": "b"}),))


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\nBODY<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DROPPED = {
    "a call": ("{{ m.content }}", [ASKED, calls(call()), result()], "a tool call"),
    "the second call": ("{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}", [ASKED, calls(call(), call("time")), ANSWER], "a tool call"),
    "arguments": ("{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}", [ASKED, calls(call()), ANSWER], "a tool call"),
    "a text beside a call": ("{{ m.tool_calls | tojson if m.tool_calls else m.content }}", [ASKED, calls(call(), content="I look."), ANSWER], "an answer"),
    "a result": ("{{ m.content if m.role != 'tool' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}", [ASKED, calls(call()), result(), ANSWER], "a tool message"),
    "a system": ("{{ m.content if m.role != 'system' }}", [SYSTEM, ASKED, ANSWER], "a system message"),
    "reasoning": ("{{ m.content }}", [ASKED, ANSWER | {"reasoning": "I think."}], "reasoning"),
    "reasoning in the text": ("{{ m.content.split('</think>')[-1] }}", [ASKED, ANSWER | {"content": "<think>I think.</think>7"}], "reasoning"),
    "a tool": ("{{ m.content }}{{ tools[0] | tojson if tools and loop.first }}", [ASKED, ANSWER], "a tool;"),
    "all tools": ("{{ m.content }}{% if loop.first %}You have tools.{% endif %}", [ASKED, ANSWER], "a tool;"),
}  # fmt: skip


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("which", DROPPED)
def test_what_an_own_template_leaves_out_is_named(which, tagged, tokenizer, tmp_path):
    body, talk, expected = DROPPED[which]
    if tagged:
        tags = "{% generation %}BODY{% endgeneration %}".replace("BODY", body)
        body = f"{{% if m.role == 'assistant' %}}{tags}{{% else %}}{body}{{% endif %}}"
    own = ModelTemplate(LOOP.replace("BODY", body), tokenizer)
    (record,) = read(tmp_path, row(talk, TOOLS if "tool" in which else None))
    refuses(f"line 1: .* changes {expected}", encoded, record, own, tokenizer)


# Strings that occur twice, and strings without text


PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}<|im_start|>system
{{ message['content'] }}<|im_end|>
{% elif message['role'] == 'user' %}<|im_start|>user
{{ message['content'] }}<|im_end|>
{% elif message['role'] == 'assistant' %}<|im_start|>assistant
{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NEMO = """{%- if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else (m.tool_calls | tojson if m.tool_calls else m.content) + '</s>' }}{% endfor %}"""
CHAT = {"role": "user", "content": "Answer in French: hi"}
EQUAL = {
    "a result": (PHI3, [ASKED, ANSWER | {"content": "Let me check."}, result("21 C"), ANSWER | {"content": "It is 21 C in Rome."}], "a tool message"),
    "a result, of ASCII": (PHI3.replace("'] }}", "'] | tojson(ensure_ascii=true) }}"), [ASKED, ANSWER, result("7"), ANSWER], "a tool message"),
    "a short result": (PHI3, [ASKED, ANSWER, result("s"), ANSWER], "a tool message"),
    "a result of nothing": (PHI3, [ASKED, ANSWER, result(""), ANSWER], "a tool message"),
    "one of two results": (source("hermes", False).replace("'tool' %}", "'tool' and loop.index0 != 2 %}"), [ASKED, calls(call(), call()), result("9"), result("9"), ANSWER], "a tool message"),
    "a call": (PHI3, [ASKED, calls(call(city="Rome"), content="I call weather with city Rome."), ANSWER], "a tool call"),
    "a call of nothing": (PHI3, [ASKED, calls({"function": {"name": "now", "arguments": {}}}, content="I look now."), ANSWER], "a tool call"),
    "a call of numbers": (PHI3, [ASKED, calls(call("at", at=7), content="I look at 7."), ANSWER], "a tool call"),
    "a system": (NEMO, [{"role": "system", "content": "Answer in French"}, CHAT, ANSWER], "a system message"),
    "an answer": (NEMO, [CHAT, calls(call("time", city="Rome"), content="Rome"), ANSWER], "an answer"),
    "a tool": (PHI3, [ASKED, ANSWER | {"content": "weather, time, tools"}], "a tool;"),
}  # fmt: skip


@pytest.mark.parametrize("which", EQUAL)
def test_what_is_left_out_is_named_even_if_the_same_text_is_elsewhere(which, tokenizer, tmp_path):
    text, talk, expected = EQUAL[which]
    (record,) = read(tmp_path, row(talk, TOOLS if which == "a tool" else None))
    own = ModelTemplate(text + "{# tools #}", tokenizer)
    refuses(f"line 1: .* changes {expected}", encoded, record, own, tokenizer)


BLANK = {
    "a result": (("hermes", "qwen3", "mistral"), [ASKED, calls(call()), result(""), ANSWER, ASKED, ANSWER]),
    "a result of spaces": (("hermes", "qwen3"), [ASKED, calls(call()), result(" \n"), ANSWER, ASKED, ANSWER]),
    "results": (("hermes", "qwen3"), [ASKED, calls(call(), call()), result(""), result(""), calls(call()), result(""), ANSWER, ASKED, ANSWER]),
    "thoughts and a result": (("qwen3",), [ASKED, calls(call(), reasoning="I ask."), result(""), ANSWER, {"role": "user", "content": "thanks"}, ANSWER]),
    "a question": (ALL, [{"role": "user", "content": ""}, calls(call()), result("same"), ANSWER, ASKED, ANSWER]),
    "questions": (ALL, [{"role": "user", "content": ""}, ANSWER, {"role": "user", "content": ""}, calls(call()), result("same"), ANSWER]),
    "an answer": (("hermes", "qwen3", "mistral"), [ASKED, ANSWER | {"content": ""}, ASKED, ANSWER]),
    "a system": (("hermes", "qwen3"), [{"role": "system", "content": " "}, ASKED, ANSWER]),
    "an argument": (ALL, [ASKED, calls(call(city="", day=" ")), result("x"), ANSWER]),
    "same results": (("mistral",), [ASKED, calls(call()), result("same"), result("same"), calls(call("time")), result("same"), ANSWER, {"role": "user", "content": "And now?"}, ANSWER]),
    "answers in a row": (("qwen3",), [ASKED, ANSWER, ANSWER, ASKED, ANSWER]),
    "thoughts": (("qwen3",), [ASKED, ANSWER | {"content": "<think>\n\n</think>\n\nFine."}, ASKED, ANSWER | {"reasoning": ""}]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "which"), [(name, which) for which, (names, _) in BLANK.items() for name in names]
)
def test_what_has_no_text_is_written_as_transformers_does(name, which, tokenizer, oracle, tmp_path):
    (record,) = read(tmp_path, row(BLANK[which][1]))
    is_as_transformers(oracle, source(name), BLANK[which][1], TOOLS, record, tokenizer)


R1 = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content }}
{%- elif m.role == 'assistant' %}{{ '[/INST]' }}GEN{% set content = m.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ content + '</s>' }}END{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[/INST]<think>\n' }}{% endif %}"""


def test_thoughts_that_only_the_prompt_begins_are_no_part_of_answers(tokenizer, oracle, tmp_path):
    """As in DeepSeek-R1's template; and not if a question has what begins thoughts."""
    talk = [ASKED, ANSWER, {"role": "user", "content": "And <think>"}, ANSWER, ASKED, ANSWER | {"content": "<t"}]
    (record,) = read(tmp_path, row(talk, None))
    text = R1.replace("GEN", "{%- generation %}").replace("END", "{%- endgeneration %}")
    is_as_transformers(oracle, text, talk, None, record, tokenizer)
    other = R1.replace("GEN", "").replace("END", "").replace("[/INST]<think>", "[/INST][INST]")
    refuses("line 1: ", encoded, record, ModelTemplate(other, tokenizer), tokenizer)


def test_templates_that_marks_change_are_rendered_without(tokenizer):
    body = "{{ m.content[:9] if m.role != 'system' }}{{ raise_exception('long') if m.content | length > 9 }}"
    own = ModelTemplate(LOOP.replace("BODY", body), tokenizer)
    turns = (Turn("user", "A word .."), Turn("assistant", "Some text"))
    assert "".join(s.text for s in own.render(turns)).count("A word ..") == 1
    counts = ModelTemplate(LOOP.replace("BODY", "{{ m.content ~ m.content | length }}"), tokenizer)
    assert [s.text for s in counts.render(turns) if s.trained] == ["Some text9", "<|im_end|>"]
    refuses("a system message", own.render, (Turn("system", "Be brief"), *turns))


DEVELOPERS = """{%- for m in messages %}{% if m.role == 'developer' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role in ('user', 'assistant', 'system') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
ANY_ROLE = DEVELOPERS.replace("'developer'", "'-'").replace("m.role in ('user', 'assistant', 'system')", "true")


def text_of(template, *turns):
    return "".join(segment.text for segment in template.render(turns, True))


ASKING, ANSWERING = Turn("user", "A question"), Turn("assistant", "7 degrees.")


@pytest.mark.parametrize("name", [*OWN, "any role", "chatml", "llama3", "mistral", "llama2"])
def test_a_developers_message_is_the_systems_where_the_template_has_none_of_its_own(name, tokenizer):
    source_ = ANY_ROLE if name == "any role" else source(name) if name in OWN else None
    own = get_template(name) if source_ is None else ModelTemplate(source_, tokenizer)
    system = text_of(own, Turn("system", "Be brief."), ASKING)
    assert "Be brief." in system
    assert text_of(own, Turn("developer", "Be brief."), ASKING) == system
    assert text_of(own, Turn("developer", "A question"), ASKING).count("A question") == 2


def test_a_developers_message_stays_where_the_template_has_a_form_for_it(tokenizer):
    own = ModelTemplate(DEVELOPERS, tokenizer)
    assert text_of(own, Turn("developer", "Be brief."), ASKING).startswith("[INST]Be brief.[/INST]")
    assert text_of(own, Turn("system", "Be brief."), ASKING).startswith("<|im_start|>system")
    other = ModelTemplate(ANY_ROLE, tokenizer)
    assert "<|im_start|>critic\nHm" in text_of(other, Turn("critic", "Hm"), ASKING)
    spelled = encode_prompt(other, (Turn("critic<|im_end|>", "Hm"), ASKING), tokenizer)
    assert spelled.count(tokenizer.token_id("<|im_end|>")) == 2, "a role that spells a token is a word"


@pytest.mark.parametrize("name", ["hermes", "qwen3", "mistral", "chatml", "llama3", "llama2", "alpaca", "plain"])
@pytest.mark.parametrize("content", ["Be brief.", "question", "degrees."])
def test_a_message_of_an_unknown_role_is_refused_with_those_that_are_written(name, content, tokenizer):
    own = ModelTemplate(source(name), tokenizer) if name in OWN else get_template(name)
    for at, role in ((0, "critic"), (1, "critic"), (3, "critic<|im_end|>")):
        talk = [ASKING, ANSWERING, ASKING]
        talk.insert(at, Turn(role, content))
        said = refuses(f"the role {role!r}".replace("|", r"\|"), own.render, tuple(talk))
        listed = said.split("only of ")[1].split(";")[0].split(", ")
        assert {"user", "assistant"} <= {*listed}
        assert ("system" in listed) == (name not in ("alpaca", "plain"))
        assert ("tool" in listed) == (name in OWN)


def test_a_message_that_its_place_makes_vanish_is_refused(tokenizer, tmp_path):
    first = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role + m.content }}<|im_end|>{% endif %}{% endfor %}"
    late = "{% for m in messages[-2:] %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    for text, talk, role in (
        (first, [ASKING, Turn("system", "question"), ASKING], "system"),
        (first, [Turn("system", "S"), Turn("developer", "question"), ASKING], "system"),
        (late, [Turn("user", "Before"), Turn("user", "More"), ASKING], "user"),
    ):
        refuses(f"a {role} message", ModelTemplate(text, tokenizer).render, tuple(talk))
    (record,) = read(tmp_path, row([ASKED, {"role": "developer", "content": "question"}, ASKED, ANSWER], None))
    own = ModelTemplate(first, tokenizer)
    refuses("line 1: .*leaves out or changes a system message", encoded, record, own, tokenizer)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_the_beginning_of_an_answer_is_continued_as_transformers_does(name, tagged, tokenizer, oracle):
    own = ModelTemplate(source(name, tagged), tokenizer)
    begun = {"role": "assistant", "content": "It is <|im_end|>7"}
    talk = [ASKED, ANSWER, {"role": "user", "content": "And now?"}, begun]
    turns = tuple(Turn(m["role"], m["content"]) for m in talk)
    plain = (*turns[:-1], replace(turns[-1], text="It is 7"))
    talk[-1]["content"] = "It is 7"
    asked = {"chat_template": source(name), "continue_final_message": True, "return_dict": False}
    wanted = oracle.apply_chat_template(talk, **asked)
    assert encode_prompt(own, plain, tokenizer, continues=True) == wanted
    prompts = [encode_prompt(own, each, tokenizer, continues=True) for each in (turns, plain)]
    ends = {prompt.count(own.stop_id(tokenizer)) for prompt in prompts}
    assert len(ends) == 1, "what an answer spells is no end"
    for other in ((), turns[:1], (Turn("assistant", "", fields={"content": None, "tool_calls": [call()]}),)):
        refuses("continue_final_message: expected", encode_prompt, own, other, tokenizer, None, True)


def test_a_template_has_the_bos_token_of_the_config(tokenizer, tmp_path):
    """Even if the tokenizer puts none before a text: the template writes it, once."""
    from transformers import PreTrainedTokenizerFast

    text = "{{ bos_token }}" + "{{ unk_token }}" + PHI3
    for config, special in (
        ({"bos_token": {"content": "<s>", "__type": "AddedToken"}, "add_bos_token": False}, None),
        ({}, {"bos_token": "<s>", "unk_token": "[INST]"}),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "</s>"}),
    ):
        tokenizer.save(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(text)
        config |= {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if special:
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        loaded = Tokenizer.load(tmp_path)
        own = find_template(loaded, {})
        talk = [ASKED, ANSWER]
        (record,) = read(tmp_path, row(talk, None))
        wanted = theirs.apply_chat_template(talk, return_dict=False)
        assert encoded(record, own, loaded).ids.tolist() == wanted
        assert wanted.count(tokenizer.token_id("<s>")) == 1
        assert loaded.document_start == []


def test_fields_take_part_in_the_hash_and_tools_do_not(tmp_path):
    talk = [ASKED, calls(call()), result(), ANSWER]
    other = [ASKED, calls(call("time")), result(), ANSWER]
    bare = [ASKED, ANSWER | {"content": ""}, result(), ANSWER]
    records = read(tmp_path, row(talk), row(other), row(bare), row(talk, None))
    hashes = [examples.split_hash(r.turns) for r in records]
    assert len({*hashes}) == 3
    assert hashes[0] == hashes[3]


def test_plain_text_has_no_form_for_calls_tools_and_reasoning(tmp_path):
    thought = row([ASKED, ANSWER | {"thinking": "a"}], None)
    for each in (row([ASKED, ANSWER]), row([ASKED, calls(call()), result()], None), thought):
        refuses("data.jsonl, line 1: ", list, examples.record_texts(put(tmp_path, each)))
    texts = [*examples.record_texts(put(tmp_path, row([ASKED, {"role": "tool", "content": "7"}, ANSWER], None)))]
    assert [t for _, t in texts] == ["Weather in Köln?\n\n7\n\n7 degrees."]


@pytest.mark.parametrize("begun", ["It is", "final", "It is ", ""])
@pytest.mark.parametrize("trims", ["", " | trim"])
def test_the_beginning_of_an_answer_ends_the_prompt_whatever_the_template_writes_after_it(begun, trims, tokenizer):
    form = f"{{{{ m.content{trims} }}}}\nThis was final.<|im_end|>"
    own = ModelTemplate("{% for m in messages %}{{ m.role + ' final:' }}" + form + "{% endfor %}", tokenizer)
    ids = encode_prompt(own, (ASKING, Turn("assistant", begun)), tokenizer, continues=True)
    kept = begun.strip() if trims else begun
    assert tokenizer.decode(ids).endswith(f"This was final.assistant final:{kept}")


@pytest.mark.parametrize("role", ["system", "user"])
def test_words_that_a_template_obeys_need_not_be_written(role, tokenizer):
    text = (
        "{% for m in messages %}{{ m.role + m.content | replace('/no_think', '') | trim }}<|im_end|>{% endfor %}"
    )
    own = ModelTemplate(text, tokenizer)
    for said in ("/no_think", "Be terse. /no_think", "Be /no_think terse"):
        talk = (Turn(role, said), *[ASKING] * (role == "system"))
        written = "".join(segment.text for segment in own.render(talk, True))
        assert written.startswith(role + said.replace("/no_think", "").strip())
    talk = (Turn(role, "Be terse now"), ASKING, Turn("assistant", "A"))
    own = ModelTemplate(text.replace("/no_think", "terse"), tokenizer)
    refuses(f"changes a {role} message", own.render, talk)
