"""Tools, their calls and reasoning in chat data: rendered, tokenized and masked as transformers does."""

# ruff: noqa: E501  (templates and rows of data)

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from conftest import refuses
from dunes.data import examples, read_records, tokenize_records, trained_spans
from dunes.data.examples import Record
from dunes.text import Tokenizer, chat_template
from dunes.text.templates import MAX_DEPTH, TEMPLATES, ModelTemplate, Turn, encode_prompt, get_template

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


CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A <b>'place'</b>"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": CITY}} for name in ("weather", "time")]
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Köln?"}
ANSWER = {"role": "assistant", "content": "7 degrees."}


def call(name="weather", identity="abcdefghi", **arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments or {"city": 'Köln "a"\n', "days": [1, 2.5, True, None]}}}


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
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [json.dumps(TOOLS), *(m["content"] or "" for _, talk in TALKS.values() for m in talk)]
    inner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
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
    own = ModelTemplate(source(name), tokenizer)
    asked = {"chat_template": source(name), "tools": tools}
    text = oracle.apply_chat_template(messages, tokenize=False, **asked)
    assert "".join(s.text for s in own.render(record.turns, variables=record.variables)) == text
    wanted = oracle.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **asked)
    assert sum(wanted["assistant_masks"]) > 5
    for tagged in (True, False):
        example = encoded(record, ModelTemplate(source(name, tagged), tokenizer), tokenizer)
        assert example.ids.tolist() == wanted["input_ids"]
        assert example.loss_mask.tolist() == [*map(bool, wanted["assistant_masks"])], tagged
    prompt = oracle.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False, **asked)
    assert encode_prompt(own, record.turns[:-1], tokenizer, record.variables) == prompt
    assert example.ids.tolist()[: len(prompt)] == prompt
