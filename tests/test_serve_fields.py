"""What requests to a server ask for: messages of every role, fields that change a text, and names of models."""

import json
import socket
from pathlib import Path

import pytest
import torch

from conftest import refuses
from dunes import checkpoint
from dunes.checkpoint import load_with_tokenizer
from dunes.cli.serve import serve
from dunes.serve import http as server_http
from dunes.serve.app import _headers
from dunes.serve.fields import NEUTRAL, Fields, Refused
from dunes.serve.protocols import ENDPOINTS, PROTOCOLS
from dunes.serve.protocols.openai import legacy_logprobs
from dunes.text.templates import Turn, encode_prompt, find_template
from test_adapter import pair
from test_adapter_folders import TOKENS
from test_chat_tools import ASKED, call, calls, result, source
from test_serve import reply_to, row_fed_with, server

USER = {"role": "user", "content": "ab"}
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/api/generate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model whose own template writes tools' messages and reasoning, and no messages of unknown roles."""
    folder, (_, model) = tmp_path_factory.mktemp("fields") / "model", pair("llama")
    with torch.no_grad():
        model.head.weight[TOKENS.token_id("<|endoftext|>") - 1 :] = 0  # so that the likeliest is a letter
    checkpoint.save(model, folder, TOKENS, 600)
    (folder / "chat_template.jinja").write_text(source("qwen3", False))
    return folder


@pytest.fixture(scope="module")
def port(folder):
    with server(folder, "--acceptance", 0) as port:
        yield port


def ask(port, path, body=None):
    """Status, headers and JSON of a reply, or the lines of a stream."""
    status, headers, data = reply_to(port, path, body)
    lines = [json.loads(line.removeprefix("data: ")) for line in data.decode().splitlines() if "{" in line]
    return status, headers, lines if len(lines) > 1 else lines[0]


def said(reply):
    error = reply[2]["error"]
    assert reply[0] == 400, reply
    return error if isinstance(error, str) else error["message"]


def chat(port, *messages, **fields):
    return ask(port, CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0} | fields)


def prompt_length(folder, *turns, **options):
    tokenizer = load_with_tokenizer(folder).require_tokenizer()
    return len(encode_prompt(find_template(tokenizer, {}), turns, tokenizer, **options))


# messages


def test_a_developers_message_is_read_as_the_systems(port, folder):
    for path, count in ((CHAT, "usage"), ("/api/chat", "prompt_eval_count")):
        lengths = []
        for role in ("developer", "system"):
            body = {"messages": [{"role": role, "content": "Be brief."}, USER], "max_tokens": 2, "stream": False}
            status, _, reply = ask(port, path, body | {"options": {"num_predict": 2}} if "api" in path else body)
            assert status == 200, reply
            lengths.append(reply[count]["prompt_tokens"] if count == "usage" else reply[count])
        assert lengths == [prompt_length(folder, Turn("system", "Be brief."), Turn("user", "ab"))] * 2


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", "/api/chat"])
def test_a_message_of_a_role_that_the_template_lacks_is_refused_by_name(port, path):
    for messages in (
        [{"role": "critic", "content": "ab"}, USER],
        [USER, {"role": "critic", "content": "b"}, USER],
    ):
        message = said(ask(port, path, {"messages": messages}))
        assert "of the role 'critic'," in message
        assert "only of system, user, assistant, tool" in message


def test_calls_results_and_reasoning_are_in_the_prompt(port, folder):
    asked = json.loads(json.dumps([ASKED, calls(call(), reasoning_content="I ask."), result()]))
    asked[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Rome"})
    turns = (Turn("user", ASKED["content"]), Turn("assistant", "", fields={
        "content": None, "reasoning_content": "I ask.",
        "tool_calls": [call(city="Rome")],
    }), Turn("tool", result()["content"], fields={"name": "weather", "tool_call_id": "abcdefghi"}))  # fmt: skip
    status, headers, reply = chat(port, *asked)
    assert (status, headers["X-Ignored-Fields"]) == (200, None), reply
    assert reply["usage"]["prompt_tokens"] == prompt_length(folder, *turns)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "image_url"),
        ({"role": "user", "content": "a", "images": ["iVBO"]}, "images"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": "a", "tool_calls": [call()]}, "tool_calls"),
        ({"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}, "reasoning"),
        ({"role": "user", "content": {"a": 1}}, "content"),
        ({"content": "a"}, "messages[0].role"),
    ],
)
def test_what_a_message_has_beside_text_is_refused_by_name(port, message, named):
    for path in (CHAT, "/api/chat"):
        assert named in said(ask(port, path, {"messages": [message, USER]}))


def test_empty_messages_and_parts_and_names(port):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "x"}}]
    assert chat(port, {"role": "user", "content": ""})[0] == 200
    two, one = (chat(port, {"role": "user", "content": content})[2]["usage"] for content in (parts, "ab"))
    assert two == one
    status, headers, _ = chat(
        port, USER | {"name": "Al"}, {"role": "user", "content": "\ud83d ok", "refusal": None}
    )
    assert (status, headers["X-Ignored-Fields"]) == (200, "messages[0].name")


def test_an_answers_beginning_is_continued(port, folder):
    begun = [USER, {"role": "assistant", "content": "It is"}]
    turns = (Turn("user", "ab"), Turn("assistant", "It is"))
    reply = chat(port, *begun, continue_final_message=True, add_generation_prompt=False)[2]
    assert reply["usage"]["prompt_tokens"] == prompt_length(folder, *turns, continues=True)
    assert chat(port, *begun)[2]["usage"]["prompt_tokens"] == prompt_length(folder, *turns)
    assert "continue_final_message" in said(chat(port, USER, continue_final_message=True))
    for continues in (True, False):
        fields = {"continue_final_message": continues, "add_generation_prompt": continues}
        assert "add_generation_prompt" in said(chat(port, *begun, **fields))


def test_variables_of_the_template_are_passed(port, folder):
    plain, other = (
        prompt_length(folder, Turn("user", "ab"), variables=v) for v in ({}, {"enable_thinking": False})
    )
    assert plain < other
    found = chat(port, USER, chat_template_kwargs={"enable_thinking": False})[2]["usage"]["prompt_tokens"]
    body = {"messages": [USER], "think": False, "stream": False, "options": {"num_predict": 1}}
    assert found == ask(port, "/api/chat", body)[2]["prompt_eval_count"] == other
    assert ask(port, "/api/chat", body | {"think": True})[2]["prompt_eval_count"] == plain
    for name, value in {"color": "red", "flag": False, "messages": [], "add_generation_prompt": False}.items():
        assert f"'{name}'" in said(chat(port, USER, chat_template_kwargs={name: value}))


# fields


OTHERS = {
    "response_format": {"type": "json_object"}, "logit_bias": {"3": 1}, "lora": [{"id": 0, "scale": 1}],
    "json_schema": {}, "guided_json": {}, "structured_outputs": {"regex": "a"}, "web_search_options": {},
    "tool_choice": "required", "modalities": ["text", "audio"], "chat_template_kwargs": {"a": 1},
}  # fmt: skip
PATHS = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "ab"},
    "/completion": {"prompt": "ab"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/fim/completions": {"prompt": "ab"},
    GENERATE: {"prompt": "ab"},
    "/api/chat": {"messages": [USER]},
}
READ = {
    CHAT: ("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    TEXT: ("prompt", "suffix", "echo", "best_of"),
    "/completion": ("prompt",),
    "/infill": ("prompt",),
    "/v1/fim/completions": ("prompt", "suffix"),
    GENERATE: ("prompt", "suffix", "system", "think"),
    "/api/chat": ("messages", "think"),
}
"""Fields in NEUTRAL that a path reads."""


def test_protocols_are_the_same_in_help_docs_and_code():
    page = (Path(__file__).parent.parent / "docs/serving.md").read_text()
    assert [p.name for p in PROTOCOLS if p.name not in page or p.name not in serve.__doc__] == []
    assert {path for path in ENDPOINTS if f"`{path}`" in page} == {*PATHS}
    assert {*map(id, ENDPOINTS.values())} == {id(ENDPOINTS[path]) for path in PATHS}, "others have another name"


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_changes_the_text_is_read_or_refused_by_name(path):
    for name, neutral in NEUTRAL.items():
        fields = Fields(
            PATHS[path] | {name: OTHERS.get(name, 7 if neutral and neutral[0] in (0, 1, -1) else ["x"])}
        )
        if name in READ[path]:
            continue
        ENDPOINTS[path].read(fields)
        with pytest.raises(Refused, match=f"'{name}'") as refused:
            fields.ignored()
        assert refused.value.status == 400
        for value in (None, *neutral):
            fields = Fields(PATHS[path] | {name: value})
            ENDPOINTS[path].read(fields)
            assert _headers(fields) == {}, "a neutral value is not ignored"


def test_a_text_has_what_its_fields_ask_for(port):
    def text(**fields):
        reply = ask(port, TEXT, {"prompt": "abcab", "max_tokens": 8, "temperature": 0} | fields)
        assert reply[1]["X-Ignored-Fields"] is None
        return reply[2]["choices"][0]["text"]

    llama = {"prompt": "abcab", "temperature": 0, "n_predict": 8}
    plain, penalised = text(), text(repeat_penalty=5)
    assert plain != penalised
    assert (
        text(repetition_penalty=5)
        == penalised
        == ask(port, "/completion", llama | {"repeat_penalty": 5})[2]["content"]
    )
    assert text(repeat_penalty=5, repeat_last_n=0) == plain
    assert text(repeat_penalty=5, repeat_last_n=99) == penalised
    seeded = {"temperature": 2.0, "seed": 5}
    assert text(**seeded) == text(**seeded, top_k=0) == text(**seeded, top_k=-1) != text(**seeded, top_k=1)
    assert text(**seeded, typical_p=1) == text(**seeded) != text(**seeded, typical_p=0)
    options = {"num_predict": 8, "repeat_penalty": 5, "temperature": 0, "repeat_last_n": -1}
    body = {"prompt": "abcab", "raw": True, "stream": False}
    assert ask(port, GENERATE, body | {"options": options})[2]["response"] == penalised
    assert "'options.mirostat'" in said(ask(port, GENERATE, body | {"options": {"mirostat": 2}}))
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert len(ask(port, TEXT, {"prompt": "a", "temperature": 0, name: 3})[2]["choices"][0]["text"]) == 3


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/api/show"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ignored_is_listed(port, path, stream):
    ignored = {"user": "u", "a\r\nSet-Cookie: é": 1, "nothing": None, **{f"x{i}" * 40: 1 for i in range(100)}}
    listed = ask(port, path, PATHS.get(path, {}) | ignored | {"stream": stream, "max_tokens": 1, "n_predict": 1})
    names = listed[1]["X-Ignored-Fields"].split(", ")
    assert listed[0] == 200
    assert "Set-Cookie" not in listed[1]
    assert {"user", "a??Set-Cookie???"} <= {name.strip() for name in names}
    assert "nothing" not in names
    assert all(len(name) <= 64 for name in names)
    assert len(names) == 64


# replies


def test_openais_stream_helper_and_models(port):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        asked = {"model": "model", "messages": [USER], "max_tokens": 9, "temperature": 0}
        asked["stop"] = [client.chat.completions.create(**asked).choices[0].message.content[5]]
        whole = client.chat.completions.create(**asked).choices[0].message
        for count in (1, 2):
            with client.chat.completions.stream(**asked, n=count) as stream:
                final = [choice.message for choice in stream.get_final_completion().choices]
            assert [(m.role, m.content) for m in final] == [("assistant", whole.content)] * count
        parts = [p.choices[0].delta for p in client.chat.completions.create(**asked, stream=True)]
        assert [part.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        (none,) = (p.choices[0] for p in client.chat.completions.create(**asked | {"max_tokens": 0}, stream=True))
        assert (none.delta.role, none.finish_reason) == ("assistant", "length")
        assert client.models.retrieve("model").id == "model"
        for name in ("other", "org/other", "model/"):
            with pytest.raises(openai.NotFoundError, match="model"):
                client.models.retrieve(name)
    for path in ("/v1/models/a%2Fb", "/v1/models/%F0%9F%98%80", "/v1/models/mode"):
        status, _, reply = ask(port, path)
        assert (status, reply["error"]["code"], reply["error"]["type"]) == (404, 404, "not_found_error")


def test_a_prompt_counts_once_for_all_of_its_choices(port):
    def prompt_tokens(prompt, path=TEXT, **fields):
        body = {"prompt": prompt} if path == TEXT else {"messages": [USER]}
        return ask(port, path, body | {"max_tokens": 2} | fields)[2]["usage"]["prompt_tokens"]

    one, other = prompt_tokens("ab"), prompt_tokens("abcdef")
    assert one < other
    assert prompt_tokens("ab", n=4) == prompt_tokens("ab", n=2, best_of=2) == one
    assert prompt_tokens(["ab", "abcdef", "ab"], n=2) == 2 * one + other
    assert prompt_tokens("", CHAT, n=3) == prompt_tokens("", CHAT)
    line = prompt_tokens("ab", suffix="\n")
    assert prompt_tokens(["ab", "ab"], suffix="\n", n=3) == 2 * line
    streamed = ask(port, CHAT, {
        "messages": [USER], "n": 3, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    assert streamed[2][-1]["usage"]["prompt_tokens"] == prompt_tokens("", CHAT)
    assert streamed[2][-1]["usage"]["completion_tokens"] <= 6
    assert "best_of" in said(ask(port, TEXT, {"prompt": "ab", "n": 2, "best_of": 3}))


def test_ollamas_prompts_are_chats_unless_raw(port, folder):
    def generated(**fields):
        status, _, reply = ask(port, GENERATE, {"prompt": "ab", "stream": False, "options": options} | fields)
        assert status == 200, reply
        return reply["response"], reply["prompt_eval_count"]

    options = {"num_predict": 5, "temperature": 0}
    assert generated() == generated(raw=False) == generated(system="")
    assert generated()[1] == prompt_length(folder, Turn("user", "ab"))
    assert generated(system="S")[1] == prompt_length(folder, Turn("system", "S"), Turn("user", "ab"))
    completion = ask(port, "/completion", {"prompt": "ab", "n_predict": 5, "temperature": 0})[2]
    assert generated(raw=True) == (completion["content"], completion["tokens_evaluated"])
    assert generated(suffix="x") == generated(suffix="x", raw=True)
    fim = "<|fim_prefix|>ab<|fim_suffix|>x<|fim_middle|>"
    assert generated(prompt=fim) == generated(prompt=fim, raw=True) == generated(suffix="x")
    for fields in ({"raw": True}, {"suffix": "x"}, {"prompt": fim}):
        for name, value in {"system": "S", "think": True}.items():
            assert f"'{name}'" in said(ask(port, GENERATE, {"prompt": "ab", name: value} | fields))


@pytest.mark.parametrize("stream", [False, True, None])
@pytest.mark.parametrize("path", [GENERATE, "/api/chat"])
def test_a_request_without_a_prompt_loads_the_model(port, path, stream):
    for body in ({}, {"messages": []} if "chat" in path else {"prompt": ""}, {"keep_alive": 0}):
        status, _, reply = ask(port, path, {"model": "model", "stream": stream, **body})
        assert (status, reply["done"], reply["done_reason"]) == (200, True, "load")
        assert not (reply["message"]["content"] if "chat" in path else reply["response"])
    assert "messages" in said(ask(port, CHAT, {"messages": []}))


@pytest.mark.parametrize("text", ["a🙂é日x", "\ufffd🙂\ufffd", "é" * 5, "\U0001f468\u200d\U0001f469 ok"])
def test_offsets_are_places_in_the_text_even_if_tokens_split_characters(text):
    row, parts = row_fed_with(text, logprobs=0)
    expected = [i for i, character in enumerate(text) for _ in character.encode()]
    assert legacy_logprobs(row.answer.tokens)["text_offset"] == expected
    assert [o for part in parts for o in legacy_logprobs(part.tokens)["text_offset"]] == expected


# addresses


def listening(*args):
    sockets = server_http.open_sockets(*args)
    names = [each.getsockname()[:2] for each in sockets]
    for each in sockets:
        each.close()
    return names


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6")
def test_all_of_ipv6_is_reached_by_ipv4_too():
    (listener,) = server_http.open_sockets("::", [0])
    with listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), 5).close()
    assert listening("[::1]", [0])[0][0] == "::1"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 99, "", "a b", "1.2.3.4.5"])
def test_an_unknown_name_is_refused_in_a_line(host):
    assert "\n" not in refuses("--host .*; name an address of this machine", server_http.open_sockets, host, [0])
