"""The server: what is read from bodies, the worker and its batch, HTTP as clients use it, and what it refuses."""

import asyncio
import http.client
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from starlette.testclient import TestClient

from conftest import display, eventually, raising, refuses_command, run_python, toy
from dunes import checkpoint, measure
from dunes.checkpoint import load_with_tokenizer
from dunes.cli.serve import Editor
from dunes.completion.completer import CopyNearest, FolderCompleter
from dunes.completion.search import CompleteOptions
from dunes.generate import Request, Token, sampler
from dunes.inference.text_generator import TextGenerator
from dunes.runs.train import train
from dunes.serve import app, follow
from dunes.serve.batch import Batch, Row
from dunes.serve.doctor import examine
from dunes.serve.editors import config, url
from dunes.serve.fields import Refused, parse
from dunes.serve.requests import Answer, LineRequest, TextRequest, fill_in_the_middle
from dunes.serve.served_model import FileFinder, ServedModel
from dunes.serve.worker import Worker
from dunes.text import Tokenizer
from small_models import random_model
from test_chat_verb import alone, three  # noqa: F401  (fixture)

LINE = "    return value_3 * {0} + limit if value_3 > {0} else other_{0}(value_3)"


def write_programs(folder):
    folder.mkdir(parents=True)
    for i in range(12):
        lines = [f"def task_{i}_{j}(value_3, limit={j}):\n{LINE.format(i)}\n" for j in range(8)]
        (folder / f"module_{i}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return write_programs(tmp_path_factory.mktemp("serve") / "programs")


@pytest.fixture(scope="module")
def run(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("PLACES", 100), ("CURSORS", 16)):
            patch.setattr(f"dunes.completion.fit.{name}", (0.0, count, count))
        assert train(toy(programs, complete=True, vocab_size=330, context_length=96), folder, display()[0]) == 0
    return folder


def started(*args, env=None):
    """A server's process and its port."""
    command = [sys.executable, "-m", "dunes", "serve", *map(str, args), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env={**os.environ, **(env or {})})
    first = process.stdout.readline()
    assert "serving" in first, process.stderr.read()
    return process, int(first.split("127.0.0.1:")[1].split()[0])


def ended(process, number=signal.SIGTERM):
    process.send_signal(number)
    status = process.wait(40)
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    return status, errors


@contextmanager
def server(*args, errors=""):
    """The port of a server, which ends well after the `with` block and writes this to stderr."""
    process, port = started(*args, "--no-follow")
    try:
        yield port
    finally:
        assert ended(process) == (0, errors)


@pytest.fixture(scope="module")
def port(run):
    process, port = started(run, "--acceptance", 0)
    assert f"{run} --port {port} --config" in process.stdout.readline(), "settings for this port"
    yield port
    assert ended(process) == (0, ""), "nothing was printed, and SIGTERM ends it well"


def reply_to(port, path, body=None, headers=()):
    """Status, headers and bytes of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, dict(headers))
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, reply.headers, content


def ask(*asked, **more):
    status, _, content = reply_to(*asked, **more)
    return status, content


def ok(port, path, body=None):
    status, content = ask(port, path, body)
    assert status == 200, content
    return json.loads(content)


def streamed(port, path, body):
    """The JSON of each event."""
    lines = ask(port, path, body | {"stream": True})[1].decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def infill(before, after="", **more):
    start = before.rfind("\n") + 1
    return {"input_prefix": before[:start], "prompt": before[start:], "input_suffix": after, **more}


BEFORE = "def task_1_3(value_3, limit=3):\n    return val"


# what is read


def test_a_body_is_one_object_with_each_field_once():
    for data, said in {
        b"[1]": "a list", b"{": "not JSON", b'{"n":1,"n":2}': "'n' occurs twice", b'{"a":NaN}': "NaN",
        b"[" * 100_000: "not JSON", b"\xff": "not JSON", b'"x"': "a string",
    }.items():  # fmt: skip
        with pytest.raises(Refused, match=said):
            parse(data)
    assert parse(b"").body == {}


@pytest.mark.parametrize(
    ("method", "args", "values"),
    [
        ("integer", (1, 0, 9), [True, "1", 1.5, [], {}, -1, 10, 1e308, 2**80]),
        ("number", (1.0, 0, 9), [True, "1", [], -1, 1e308, 10**400]),
        ("flag", (), [1, "true", []]),
        ("text", (), [1, True, ["a"], {}]),
        ("stops", (), [1, [1], ["a"] * 65, ["a" * 1001], {"a": 1}]),
        (
            "messages",
            (),
            ["x", [1], [{"content": "x"}], [{"role": 1}], [{"role": "user", "content": 3}], [{"role": "user"}]],
        ),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_named(method, args, values):
    for value in values:
        fields = parse(b"{}")
        fields.body["field"] = value
        with pytest.raises(Refused, match="field"):
            getattr(fields, method)("field", *args)


def test_lone_surrogates_are_replaced():
    assert parse(b'{"prompt": "a\\ud800b"}').text("prompt") == "a�b"


@pytest.mark.parametrize(
    "prompt",
    [
        "<|fim_prefix|>a\nb<|fim_suffix|>c\n<|fim_middle|>",
        "<|fim_suffix|>c\n<|fim_prefix|>a\nb<|fim_middle|>",
        "<|fim_prefix|><|fim_suffix|>c\n<|fim_middle|>a\nb",
        "<|fim_prefix|>a\n<|fim_suffix|>c\n<|fim_middle|>b",
        "<fim_prefix>a\nb<fim_suffix>c\n<fim_middle>",
        "<fim_prefix><fim_suffix>c\n<fim_middle>a\nb",
        "<\uff5cfim\u2581begin\uff5c>a\nb<\uff5cfim\u2581hole\uff5c>c\n<\uff5cfim\u2581end\uff5c>",
        "<PRE> a\nb <SUF>c\n <MID>",
        "[SUFFIX]c\n[PREFIX]a\nb",
        "<|fim_prefix|># language: python\n# indentation: use tabs\na\nb<|fim_suffix|>c\n<|fim_middle|>",
    ],
)
def test_a_prompt_that_spells_filling_in_is_a_line_between_two_texts(prompt):
    assert fill_in_the_middle(prompt) == LineRequest("a\nb", "c\n")


def test_a_prompts_header_has_the_file_and_others():
    head = "<|repo_name|>x\n<|file_sep|>other.py\nB = 2\n<|file_sep|>a/b.py\n"
    line = fill_in_the_middle(head + "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")
    assert line == LineRequest("a", "b", "a/b.py", (("other.py", "B = 2\n"),))
    unnamed = head.replace("a/b.py", "filename")
    unnamed = fill_in_the_middle(unnamed + "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")
    assert unnamed.name == ""
    assert fill_in_the_middle("def f(x):\n") is None
    assert fill_in_the_middle("<|fim_prefix|> alone") is None


def test_a_file_is_known_by_lines_that_only_it_has():
    finder = FileFinder([("a.py", "common_line = 1\n" + "".join(f"first_{i} = {i}\n" for i in range(9)))])
    finder.update({"b.py": "common_line = 1\n" + "".join(f"second_{i} = {i}\n" for i in range(9))})
    assert finder.find("common_line = 1\nfirst_1 = 1\nfirst_2 = 2\nfirst_3 = 3\nfir", "") == "a.py"
    assert finder.find("x\n", "\nsecond_1 = 1\nsecond_2 = 2\nsecond_3 = 3\n") == "b.py"
    assert finder.find("first_1 = 1\nfirst_2 = 2\n", "") == "", "two lines do not decide"
    mixed = "first_1 = 1\nfirst_2 = 2\nfirst_3 = 3\nsecond_1 = 1\nsecond_2 = 2\nsecond_3 = 3\nsecond_4 = 4\n"
    assert finder.find(mixed, "") == "b.py"
    assert finder.find("common_line = 1\n" * 5, "") == ""


# the batch


GREEDY = {"temperature": 0.0}
PROMPTS = ["def task_", "x = 1\n" * 12, "    return value", "def task_1_1(value_3, limit=1):\n"]
PROMPTS += ["é🙂日本語\n", "a"]


def generated(batch, requests):
    """The answers to requests that begin together, and the texts of their pieces."""
    answers, pieces = {}, dict.fromkeys(range(len(requests)), "")

    def emit(index, event):
        if isinstance(event, Answer) and not event.reason:
            pieces[index] += event.text
        else:
            answers[index] = event

    waiting = list(enumerate(requests))
    while waiting or batch.active:
        while waiting and not batch.is_full:
            index, request = waiting.pop(0)
            batch.add(request, lambda event, index=index: emit(index, event), lambda: False)
        batch.advance()
    return [answers[i] for i in range(len(requests))], pieces


def mixed_requests():
    settings = [GREEDY, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 5}]
    return [
        TextRequest(PROMPTS[i % 6], 3 + i % 11, settings[i % 3], seed=2 + i % 3, logprobs=0) for i in range(64)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("llama", 64), ("qwen3_next", 20)])
def test_texts_side_by_side_are_those_alone(family, count, run, tmp_path, monkeypatch):
    monkeypatch.setattr("dunes.generate.prefix_cache.FIRST", 8)  # prompts are read in pieces
    monkeypatch.setattr("dunes.generate.prefix_cache.LEAST", 4)
    if family == "qwen3_next":  # a recurrent state
        run, tokenizer = tmp_path, Tokenizer.train("bytes", [])
        model = random_model(family, 0.2, vocab=tokenizer.vocab, dim=64, depth=3, context=96)
        checkpoint.save(model, run, tokenizer, 96)
    loaded, requests = load_with_tokenizer(run), mixed_requests()[:count]
    together, pieces = generated(Batch(loaded), requests)
    for i, (request, answer) in enumerate(zip(requests, together, strict=True)):
        (alone,), _ = generated(Batch(loaded), [request])
        assert [t.id for t in answer.tokens] == [t.id for t in alone.tokens], i
        assert answer.text == alone.text == pieces[i]
        off = [abs(a.logprob - b.logprob) for a, b in zip(answer.tokens, alone.tokens, strict=True)]
        assert max(off, default=0) < 1e-4


def test_a_text_of_the_batch_is_that_of_the_generator(run):
    loaded = load_with_tokenizer(run)
    (answer,), _ = generated(Batch(loaded), [TextRequest("def task_", 20, GREEDY)])
    assert answer.text == TextGenerator(loaded).text("def task_", 20)
    for settings in ({"temperature": 0.7, "top_k": 9, "top_p": 0.9}, {"temperature": 1.5, "typical_p": 0.2}):
        choose = sampler(**settings, seed=11)
        (drawn,), _ = generated(Batch(loaded), [TextRequest("def task_", 20, settings, seed=11)])
        assert drawn.text == TextGenerator(loaded).text("def task_", 20, choose)


@pytest.mark.parametrize("stop", ["value", "ue_3", " ", "\n", "é", "🙂x"])
def test_a_stop_across_tokens_ends_the_text_before_it(run, stop):
    loaded = load_with_tokenizer(run)
    (whole,), _ = generated(Batch(loaded), [TextRequest("def task_", 40, GREEDY)])
    request = TextRequest("def task_", 40, GREEDY, stop=[stop, "never there"])
    (answer,), pieces = generated(Batch(loaded), [request])
    assert answer.text == pieces[0] == whole.text.partition(stop)[0]
    assert (answer.reason, answer.stopped_at) == (("word", stop) if stop in whole.text else (whole.reason, ""))


def row_fed_with(text, **settings):
    """A row that has got the bytes of a text as tokens, and what it emitted."""
    tokenizer, seen = Tokenizer.train("bytes", []), []
    row = Row(TextRequest("x", 99, **settings), Request([1], 99), tokenizer, seen.append, lambda: False)
    for id in tokenizer.encode(text):
        if row.request.unfinished:
            row.push(Token(id, 0.0))
            row.request.ids.append(id)
    row.finish()
    return row, [part for part in seen if not part.reason]


@pytest.mark.parametrize("stop", ["STOP", "日", "🙂é", " st", "zzz"])
def test_pieces_have_whole_characters_and_stops_are_exact_for_any_cut(stop):
    text = "a🙂é日 stop ab STO P STOP rest"
    _, parts = row_fed_with(text, stop=[stop])
    assert "".join(part.text for part in parts) == text.partition(stop)[0]
    assert all("�" not in part.text for part in parts)


def test_a_cancelled_text_frees_its_row(run):
    batch, cancelled = Batch(load_with_tokenizer(run)), threading.Event()
    batch.add(TextRequest("def", 50, GREEDY), lambda event: None, cancelled.is_set)
    batch.advance()
    cancelled.set()
    batch.advance()
    assert not batch.active


# the worker


@pytest.fixture
def worker(run):
    with closing(Worker([run], 0.0, (), lambda line: None, follows=False)) as models:
        yield models


def test_lines_come_between_the_tokens_of_texts_and_are_the_engines(worker, run):
    events, lines, order = [], {}, []
    done = threading.Event()

    def emit(event):
        events.append(event)
        order.append("token")
        if event.reason:
            done.set()

    worker.submit(TextRequest("def task_", 60, GREEDY, model="run"), emit)
    completer = FolderCompleter(run)
    for i, end in enumerate(range(20, len(BEFORE), 3)):
        got = threading.Event()

        def store(event, i=i, got=got):
            lines[i] = event
            order.append("line")
            got.set()

        worker.submit(LineRequest(BEFORE[:end], "", "new.py"), store)
        assert got.wait(20)
        expected = completer.complete(BEFORE[:end], "", "new.py")
        assert [answer.text for answer in lines[i]] == [expected.text]
    assert done.wait(20)
    assert "line" in order[: order.index("token") + 80], "no line waits for the end of a text"
    assert "".join(e.text for e in events if not e.reason) == events[-1].text


def test_a_cancelled_line_says_nothing_and_others_go_on(worker):
    events = []
    blocked, go = threading.Event(), threading.Event()
    worker.call(lambda: (blocked.set(), go.wait(20)))
    assert blocked.wait(20)
    task = worker.submit(LineRequest(BEFORE), events.append)
    task.cancel()
    got = threading.Event()
    worker.submit(LineRequest(BEFORE), lambda event: got.set())
    go.set()
    assert got.wait(20)
    assert events == []


def test_too_many_waiting_requests_are_refused_and_an_error_is_the_requests_own(worker, monkeypatch):
    go = threading.Event()
    worker.call(go.wait)
    time.sleep(0.05)
    for _ in range(64):
        worker.submit(LineRequest("a"), lambda event: None)
    with pytest.raises(Refused, match="64 requests") as refused:
        worker.submit(LineRequest("a"), lambda event: None)
    assert (refused.value.status, refused.value.retry) == (503, 1)
    monkeypatch.setattr(worker.models["run"].current.completer, "alternatives", lambda *args: 1 / 0)
    go.set()
    assert eventually(lambda: not worker._lines)
    got = []
    worker.submit(LineRequest("a"), got.append)
    worker.call(lambda: None).result(20)
    assert eventually(lambda: got)
    assert isinstance(got[0], ZeroDivisionError)


def test_an_error_of_one_text_is_its_own_and_changes_no_other(run, monkeypatch):
    loaded, original = load_with_tokenizer(run), sampler

    def broken(*args, seed=0, **more):
        choose = original(*args, seed=seed, **more)
        return replace(choose, choose=lambda logits: 1 / 0) if seed == 666 else choose

    monkeypatch.setattr("dunes.serve.batch.sampler", broken)
    asked = [TextRequest("x", 9, {"temperature": 0.5}, seed=666), TextRequest("a", 9, GREEDY)]
    asked += [TextRequest("def", 9, seed=3)]
    together, _ = generated(Batch(loaded), asked)
    assert isinstance(together[0], ZeroDivisionError)
    for i in (1, 2):
        (alone,), _ = generated(Batch(loaded), [asked[i]])
        assert together[i].text == alone.text


def test_an_error_in_a_forward_ends_the_texts_and_not_the_worker(worker, monkeypatch, capsys):
    model = worker.models["run"]
    before = Batch.__dict__["_read_piece"]
    monkeypatch.setattr(Batch, "_read_piece", raising(RuntimeError("no memory left")))
    events = []
    worker.submit(TextRequest("def", 5, GREEDY), events.append)
    assert eventually(lambda: events)
    assert isinstance(events[0], RuntimeError)
    monkeypatch.setattr(Batch, "_read_piece", before)
    later = []
    worker.submit(TextRequest("def", 5, GREEDY), later.append)
    assert eventually(lambda: later and later[-1].reason)
    assert model.current.batch is not None


# HTTP


def test_infill_is_what_the_engine_completes(port, run):
    completer, text = FolderCompleter(run), (BEFORE + "\n") * 2
    options = CompleteOptions(alternatives=1)
    for end in range(1, len(text), 2):
        before, after = text[:end], "\n\nx = 1\n"
        expected = completer.alternatives(before, after, "", options)[0].text
        if len(expected) >= 3:
            assert ok(port, "/infill", infill(before, after))["content"] == expected, end


def test_infill_speaks_as_the_reference(port):
    reply = ok(port, "/infill", infill(BEFORE, "\n"))
    names = (
        "index content tokens id_slot stop model tokens_predicted tokens_evaluated generation_settings prompt "
        "has_new_line truncated stop_type stopping_word tokens_cached timings"
    )
    assert [*reply] == names.split()
    assert reply["content"].startswith("ue_3 * ")
    status, data = ask(port, "/infill", infill(BEFORE, "\n"))
    assert status == 200
    assert b'"content":"' in data, "llama.vim looks for these bytes"
    assert b"\n" not in data
    wanted = ["content", "timings/prompt_n", "truncated", "nothing/like", "tokens_cached"]
    short = ok(port, "/infill", infill(BEFORE, "\n", response_fields=wanted))
    assert [*short] == ["content", "timings/prompt_n", "truncated", "tokens_cached"]
    extra = [{"text": "a", "filename": "b"}]
    warm = infill("", "", n_predict=0, samplers=[], response_fields=[""], input_extra=extra)
    assert ok(port, "/infill", warm) == {}
    assert ok(port, "/infill", infill(BEFORE, "", n_predict=0))["content"] == ""
    several = ok(port, "/infill", infill("def task_1_3(value_3, l", "\n", n_cmpl=3))
    assert isinstance(several, list)
    assert len(several) == len({each["content"] for each in several}) <= 3
    assert ok(port, "/infill", infill(BEFORE, "\n", stop=["value", "3"]))["content"] == "ue_"
    status, data = ask(port, "/infill", {"input_prefix": ""})
    error = {"code": 400, "message": "key 'input_suffix' not found", "type": "invalid_request_error"}
    assert (status, json.loads(data)) == (400, {"error": error})


def test_open_files_of_a_request_are_copied_from_in_it_alone(port):
    before = "x = compute_all_"
    extra = [{"text": "y = compute_all_the_things(1, 2)\n", "filename": "o.py", "time": [1, 2]}]
    assert ok(port, "/infill", infill(before, "\n", input_extra=extra))["content"] == "the_things(1, 2)"
    assert "things" not in ok(port, "/infill", infill(before, "\n"))["content"]


def test_all_ways_to_a_line_give_the_same(port):
    expected = ok(port, "/infill", infill(BEFORE, "\n"))["content"]
    assert expected
    fim = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>\n<|fim_middle|>"
    assert ok(port, "/completion", {"prompt": fim})["content"] == expected
    assert ok(port, "/v1/completions", {"prompt": fim, "max_tokens": 99})["choices"][0]["text"] == expected
    body = {"prompt": BEFORE, "suffix": "\n"}
    assert ok(port, "/v1/completions", body | {"max_tokens": 99})["choices"][0]["text"] == expected
    assert ok(port, "/v1/fim/completions", body)["choices"][0]["message"]["content"] == expected
    assert ok(port, "/api/generate", body | {"stream": False})["response"] == expected
    streamed = ask(port, "/v1/completions", body | {"stream": True, "max_tokens": 99})[1].decode()
    chunks = [line[6:] for line in streamed.splitlines() if line]
    assert chunks[-1] == "[DONE]"
    assert "".join(json.loads(c)["choices"][0]["text"] for c in chunks[:-1]) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 30, "temperature": 0.9, "seed": 5, "stop": ["zz"]},
        {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1},
    ],
)
def test_a_streamed_completion_is_the_whole_one(port, options):
    body = {"prompt": "def task_"} | options
    whole = ok(port, "/v1/completions", body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in streamed(port, "/v1/completions", body)]
    assert "".join(p["text"] for p in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    tokens = [t for p in parts if p["logprobs"] for t in p["logprobs"]["tokens"]]
    assert tokens == (whole["logprobs"]["tokens"] if "logprobs" in options else [])


def test_other_streams_are_the_whole_text(port):
    plain = {"prompt": "def task_", "n_predict": 30, "temperature": 0, "n_probs": 2}
    reply = ok(port, "/completion", plain)
    chunks = streamed(port, "/completion", plain)
    assert "".join(c["content"] for c in chunks) == reply["content"]
    assert chunks[-1]["stop"] is True
    assert len(reply["completion_probabilities"]) == reply["tokens_predicted"] == 30
    ollama = {"model": "any", "prompt": "def task_", "options": {"num_predict": 9, "temperature": 0}}
    lines = [json.loads(line) for line in ask(port, "/api/generate", ollama)[1].splitlines()]
    assert reply["content"].startswith("".join(line["response"] for line in lines))
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] == 9


def test_echo_and_logprobs_are_the_models(port, run):
    loaded = load_with_tokenizer(run)
    ids = loaded.tokenizer.encode("def task_1_1(value_3")
    body = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}
    choice = ok(port, "/v1/completions", body)["choices"][0]
    logprobs = choice["logprobs"]
    with torch.no_grad():
        expected = loaded.model(torch.tensor([ids]))[0].float().log_softmax(-1)
    assert logprobs["token_logprobs"][0] is None
    for i, id in enumerate(ids[1:]):
        assert abs(logprobs["token_logprobs"][i + 1] - float(expected[i, id])) < 1e-4
        assert abs(max(logprobs["top_logprobs"][i + 1].values()) - float(expected[i].max())) < 1e-4
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert choice["text"].startswith("def task_1_1(value_3")
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    none = ok(port, "/v1/completions", body | {"max_tokens": 0})["choices"][0]
    assert none["text"] == "def task_1_1(value_3"
    body |= {"max_tokens": 5}
    whole = ok(port, "/v1/completions", body)["choices"][0]["logprobs"]["text_offset"]
    chunks = [chunk["choices"][0] for chunk in streamed(port, "/v1/completions", body)]
    assert [o for chunk in chunks for o in (chunk["logprobs"] or {}).get("text_offset", [])] == whole


def test_choices_and_prompts_are_listed_in_order(port):
    body = {"prompt": ["def a", "x = "], "n": 2, "max_tokens": 4, "seed": 1}
    reply = ok(port, "/v1/completions", body)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["completion_tokens"] <= 16
    lines = ok(port, "/v1/completions", {"prompt": ["zzz = ", BEFORE], "n": 3, "suffix": "\n", "max_tokens": 1})
    texts = [c["text"] for c in lines["choices"]]
    assert [c["index"] for c in lines["choices"]] == [*range(len(texts))]
    alone = ok(port, "/v1/completions", {"prompt": BEFORE, "suffix": "\n", "max_tokens": 1})["choices"][0]["text"]
    assert texts[3] == alone
    again = ok(port, "/v1/completions", body)["choices"]
    assert [c["text"] for c in again] == [c["text"] for c in reply["choices"]]


def test_what_a_server_says_of_itself(port, run):
    assert ok(port, "/health")["status"] == "ok"
    listed = ok(port, "/v1/models")
    assert [m["id"] for m in listed["data"]] == ["run"] == [m["name"] for m in listed["models"]]
    assert ok(port, "/props")["default_generation_settings"]["n_ctx"] == 96
    assert ok(port, "/slots")[0]["n_ctx"] == 96
    assert "insert" in ok(port, "/api/show", {"name": "run"})["capabilities"]
    assert ok(port, "/api/tags")["models"][0]["name"] == "run"
    ids = ok(port, "/tokenize", {"content": "é = 1"})["tokens"]
    assert ids == load_with_tokenizer(run).tokenizer.encode("é = 1")
    assert ok(port, "/detokenize", {"tokens": ids})["content"] == "é = 1"
    pieces = ok(port, "/tokenize", {"content": "é", "with_pieces": True})["tokens"]
    spelled = (bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert b"".join(spelled) == "é".encode()
    assert ask(port, "/")[0] == 200
    assert ok(port, "/suggest", {"before": BEFORE, "tokens": True})["suggestions"][0]["text"].startswith("ue_3")


def test_explained_tokens_have_the_probabilities_of_the_suggestion(port):
    for typed, after in itertools.product(range(len(BEFORE) - 12, len(BEFORE) + 1), ["", "\n    return 3\n"]):
        told = ok(port, "/suggest", {"before": BEFORE[:typed], "after": after, "tokens": True})
        best, tokens = told["suggestions"][0], told["tokens"]
        assert "".join(token["text"] for token in tokens).startswith(best["text"])
        assert all(token["text"] for token in tokens)
        product = math.prod(token["probability"] for token in tokens)
        assert product == pytest.approx(best["line"], rel=1e-3) or not best["text"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/infill", infill("a", "b", n_predict="3"), 400, "n_predict"),
        ("/infill", infill("a", "b", n_cmpl=5), 400, "n_cmpl"),
        ("/infill", infill("a", "b", input_extra=[{"text": 3}]), 400, "input_extra[0].text"),
        ("/v1/completions", {"prompt": "a", "n": 99}, 400, "'n'"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": [1, -3]}, 400, "token -3"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "logprobs": 1}, 400, "log-probabilities"),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": 3}, 400, "stream_options"),
        ("/completion", {"prompt": ["x"] * 40, "n_cmpl": 4}, 400, "160 choices"),
        ("/completion", {"prompt": "x = 1\n" * 500_000}, 400, "exceeds the available context size"),
        ("/infill", infill("a", "b", filename="/" + "a/" * 200_000), 400, "filename"),
        ("/infill", infill("a", "b", filename="a\0b"), 400, "filename"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 400, "no chat template"),
        ("/v1/responses", {}, 404, "File Not Found"),
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", b'{"prompt":"' + b"x" * (4 << 20) + b'"}', 413, "4194304 bytes"),
    ],
)
def test_a_bad_request_is_refused_and_says_why(port, path, body, status, said):
    found, content = ask(port, path, body)
    error = json.loads(content)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert found == status
    assert said in message


def test_unlimited_is_the_servers_own_limit(port):
    for limit in (-1, 10**9):
        assert ok(port, "/infill", infill(BEFORE, "\n", n_predict=limit))["content"].startswith("ue_3")


def test_hosts_and_origins_of_this_machine_alone_are_answered(port):
    foreign = ("evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "", "evil.com:8012", "0.0.0.0", "[::2]")
    for host in (*foreign, "localhost@evil.com"):
        assert ask(port, "/health", headers={"Host": host})[0] in (400, 403)
        assert ask(port, "/health", headers={"Origin": f"http://{host}"})[0] == 403
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8012", "localhost."):
        assert ask(port, "/health", headers={"Host": host})[0] == 200
    for origin, status in {"http://localhost:3000": 200, "vscode-webview://abc": 200, "null": 403}.items():
        assert ask(port, "/health", headers={"Origin": origin})[0] == status


@pytest.mark.slow
def test_a_key_is_required_where_one_is_set(run):
    """And a server that is ended while it streams ends well."""
    process, port = started(run, "--no-follow", env={"DUNES_API_KEY": "secret"})
    headers = lambda key: {"Authorization": f"Bearer {key}"}
    assert ask(port, "/v1/models")[0] == ask(port, "/v1/models", headers=headers("secre"))[0] == 401
    assert ask(port, "/v1/models", headers=headers("secret"))[0] == 200
    body = {"prompt": "def task_", "max_tokens": 300, "stream": True, "temperature": 0}
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(ask, port, "/v1/completions", body, headers("secret"))
        time.sleep(0.5)
        assert ended(process) == (0, "")


def test_doctor_says_what_each_client_shows(port, run, command):
    assert ok(port, "/infill", infill(BEFORE, "\n", **VIM))["content"]
    lines = [*examine(f"http://127.0.0.1:{port}", before=BEFORE, after="\n")]
    assert "".join(line.problem for line in lines) == ""
    assert all("shows 'ue_3 * " in line.text for line in lines[-5:])
    assert any("an editor" in line.client and "return val" in line.client for line in lines[1:-5])
    assert len([*examine(f"http://127.0.0.1:{port}")]) == len(lines), "doctor's own requests are not an editor's"
    assert ask(port, "/recent")[0] == 403, "other users of this machine do not see what is being written"
    refuses_command("http://127.0.0.1:9: no server answers", command("doctor", 9))
    with pytest.raises(ValueError, match="expected an address"):
        [*examine("127.0.0.1:9")]


def test_a_start_that_cannot_work_is_refused_at_once(run, tmp_path, command, monkeypatch):
    monkeypatch.delenv("DUNES_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, *arguments in (
            ("address already in use", run, "--port", taken.getsockname()[1]),
            ("DUNES_API_KEY", run, "--host", "0.0.0.0"),
            ("--acceptance is 2.0", run, "--acceptance", 2),
            (str(tmp_path), tmp_path, "--port", 0),
        ):
            refuses_command(words, command("serve", *arguments))


@pytest.mark.parametrize("folder", ["/m/it's", '/m/a"b\\c', "/m/plain"])
def test_each_editor_has_lines_that_quote_the_folder(folder):
    for editor in get_args(Editor):
        lines = config(editor, url("::1", 9000), folder)
        assert "http://[::1]:9000" in lines or "'dunes', 'lsp', '" in lines or '"lsp", "' in lines
    server = tomllib.loads(config("helix", "http://x", folder))["language-server"]["dunes"]
    assert server["args"] == ["lsp", folder]
    line = next(line for line in config("nvim", "http://x", folder).splitlines() if "cmd" in line)
    assert line.count("'") - line.count("\\'") == 8, "Lua's strings are closed"
    assert (url("0.0.0.0", 1), url("localhost", 1)) == ("http://127.0.0.1:1", "http://localhost:1")


# it follows the work


def request_of(application, path, body=None, agent="curl"):
    """The JSON of an application's answer, without a server."""
    answer = TestClient(application, "http://localhost").post(path, json=body, headers={"user-agent": agent})
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_training(run, copy):
    """A copy of a run as it is while it trains."""
    (copy / "completion").mkdir(parents=True)
    for name in ("files.json", "index.safetensors"):
        (copy / "completion" / name).write_bytes((run / "completion" / name).read_bytes())
    return copy


def end_training(run, copy):
    for path in sorted(run.rglob("*"), key=lambda p: p.name == "config.json"):
        if path.is_file() and "state" not in path.parts:
            target = copy / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


VIM = {"response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"]}


def test_a_run_that_still_trains_copies_and_a_client_keeps_no_answer_without_a_suggestion(run, tmp_path):
    copy, place = in_training(run, tmp_path / "run"), "def task_1_3(value_3, limit=3):\n    return value_3 * 1 "
    lines = []
    with closing(Worker([copy], 0.35, (), lines.append)) as worker:
        application, model = app.Server(worker).app(), worker.models["run"]
        assert "in training" in lines[0]
        with pytest.raises(Refused, match="in training"):
            model.add(TextRequest("a"), print, lambda: False)
        complete = partial(request_of, application, "/infill")
        before = complete(infill("zq = ", "\n", **VIM))
        assert "content" not in before, "llama.vim keeps what has it, until it ends"
        assert "truncated" in before
        assert complete(infill("zq = ", "\n"))["content"] == "", "as llama-server"
        assert complete(infill("", "", n_predict=0, **VIM)).get("content") == ""
        assert complete(infill(BEFORE, "\n", **VIM))["content"].startswith("ue_3")
        fim = {"prompt": "<|fim_prefix|>zq = <|fim_suffix|>\n<|fim_middle|>"}
        assert "content" in request_of(application, "/completion", fim)
        end_training(run, copy)
        assert eventually(lambda: model.current.loaded is not None)
        model.acceptance = 0.0
        assert "content" in complete(infill(place, "\n", **VIM))
        assert shown_by(worker, BEFORE).startswith("ue_3")


@pytest.mark.slow
def test_a_folders_running_server_is_asked_to_complete(run, tmp_path, capsys, monkeypatch):
    from dunes.cli import verbs
    from dunes.serve.client import complete_by_server, socket_file

    run = shutil.copytree(run, tmp_path / "copy")
    file = tmp_path / "new.py"
    file.write_text(f"{BEFORE}\n")
    line, column = BEFORE.count("\n") + 1, len(BEFORE.split("\n")[-1]) + 1
    assert complete_by_server(run, BEFORE, "\n", file) is None
    verbs.complete(str(run), f"{file}:{line}:{column}")
    expected = capsys.readouterr().out
    with server(run):
        monkeypatch.setattr("dunes.checkpoint.locate_model", None)  # nothing is loaded
        verbs.complete(str(run), f"{file}:{line}:{column}")
        assert capsys.readouterr().out == expected
        script = "import sys; from dunes.cli import verbs; verbs.complete(*sys.argv[1:])"
        script += "; assert 'torch' not in sys.modules"
        assert run_python(script, run, f"{file}:{line}:{column}", check=True).stdout == expected
    assert complete_by_server(run, BEFORE, "\n", file) is None, "a server that has ended is not known"
    with socket.socket(socket.AF_UNIX) as dead:  # a server that was killed leaves its socket
        dead.bind(str(socket_file(run)))
    assert complete_by_server(run, BEFORE, "\n", file) is None
    process, _ = started(run, "--no-follow")
    assert complete_by_server(run, BEFORE, "\n", file)["text"] == expected.rstrip("\n")
    assert ended(process, signal.SIGHUP) == (0, "")
    assert not socket_file(run).exists()


@pytest.mark.slow
def test_several_models_and_adapters_are_named_and_share_a_batch(three, run):  # noqa: F811
    adapters = ["--adapter", three / "one", "--adapter", three / "two"]
    said = "one, two: served with the context length of base, 200 tokens\n"
    with server(three / "base", *adapters, errors=said) as port:
        assert [m["id"] for m in ok(port, "/v1/models")["data"]] == ["base", "one", "two"]
        assert ok(port, "/props?model=two")["model_alias"] == "two"
        assert ok(port, "/api/show", {"model": "two:latest"})
        message = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 12, "temperature": 0}

        def answer(name):
            return ok(port, "/v1/chat/completions", message | {"model": name})["choices"][0]["message"]["content"]

        expected = {name: alone(three / name) for name in ("base", "one", "two")}
        assert {name: answer(name) for name in expected} == expected
        assert answer("two:latest") == expected["two"]
        with ThreadPoolExecutor(9) as pool:
            names = ["one", "two", "base"] * 3
            assert list(pool.map(answer, names)) == [expected[name] for name in names]
    with server(run, three / "base") as port:
        status, content = ask(port, "/v1/completions", {"prompt": "a", "model": "other"})
        assert status == 404
        assert "run, base" in json.loads(content)["error"]["message"]
        assert ok(port, "/infill", infill(BEFORE, "\n", model="run"))["content"].startswith("ue_3")


def test_replies_have_the_reference_servers_keys_and_types(port):
    """The keys and types of llama-server b11669 (Debian's llama.cpp-tools), as recorded by hand."""
    settings = {
        "seed": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "typical_p": float,
        "repeat_penalty": float, "stop": list, "max_tokens": int, "n_predict": int, "stream": bool, "n_probs": int,
        "samplers": list, "speculative.types": str, "lora": list, "grammar": str, "dry_sequence_breakers": list,
        "ignore_eos": bool,
    }  # fmt: skip
    timings = {"cache_n": int, "prompt_n": int, "prompt_ms": float, "prompt_per_second": float, "predicted_n": int}
    own = {"total_slots": int, "model_path": str, "chat_template": str, "bos_token": str, "modalities": dict}
    slot = {"id": int, "n_ctx": int, "is_processing": bool, "params": dict, "next_token": list}
    reply = ok(port, "/infill", infill(BEFORE, "\n", temperature=0.0))
    props = ok(port, "/props")
    for found, expected in (
        (reply["generation_settings"], settings),
        (reply["timings"], timings),
        (props["default_generation_settings"]["params"], {k: v for k, v in settings.items() if k != "stop"}),
        (props, own),
        (ok(port, "/slots")[0], slot),
        (ok(port, "/v1/models")["data"][0], {"id": str, "object": str, "created": int, "meta": dict}),
    ):
        assert {name: type(found[name]) for name in expected} == expected


# what an attack found


@pytest.fixture
def copied(run, programs, tmp_path):
    """A run and its sources, which tests may change."""
    folder = shutil.copytree(programs, tmp_path / "programs")
    out = tmp_path / "run"
    assert train(toy(folder, complete=True, vocab_size=330, context_length=96), out, display()[0]) == 0
    return out, folder


def shown_by(worker, before):
    model = worker.models["run"]
    return worker.call(lambda: model.lines(LineRequest(before), lambda: False)).result(20)[0].text


@pytest.mark.slow
def test_a_reload_lets_texts_end_and_a_failed_one_keeps_the_model(copied):
    out, _ = copied
    said = []
    with closing(Worker([out], 0.0, (), said.append)) as worker:
        model, events, done = worker.models["run"], [], threading.Event()

        def emit(event):
            events.append(event)
            if event.reason:
                done.set()

        worker.submit(TextRequest("def task_", 1500, GREEDY), emit)
        assert eventually(lambda: events)
        old = model.current
        (out / "config.json").touch()
        assert eventually(lambda: model.current is not old)
        assert not done.is_set(), "the text has not ended yet"
        assert done.wait(60)
        assert events[-1].new_tokens == 1500
        weights = out / "model.safetensors"
        data, old = weights.read_bytes(), model.current
        weights.write_bytes(data[: len(data) // 2])
        assert eventually(lambda: said)
        assert model.current is old
        assert shown_by(worker, BEFORE)
        weights.write_bytes(data)
        assert eventually(lambda: model.current is not old, 30)
        assert len(said) == 1, said


def test_a_gguf_file_that_is_written_again_is_loaded_again(tmp_path):
    file = shutil.copyfile(Path(__file__).parent / "gallery" / "float32.gguf", tmp_path / "small.gguf")
    model = ServedModel(file, "small", 0.0, say=lambda line: None)
    assert not model.is_outdated
    assert model.current.facts["modified"] > 1e9
    os.utime(file, (5, 5))
    assert model.is_outdated


@pytest.mark.slow
def test_sources_that_vanish_come_back_and_new_folders_and_links_are_known(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "PERIOD", 0.3)
    out, folder = copied
    with closing(Worker([out], 0.0, (), lambda line: None)) as worker:
        assert eventually(lambda: worker._followers[0]._folders)
        new = folder / "deep" / "deeper"
        new.mkdir(parents=True)
        time.sleep(0.5)
        (new / "fresh.py").write_text("y = brand_new_function(1, 2)\n")
        assert eventually(lambda: shown_by(worker, "x = brand_new_") == "function(1, 2)")
        (new / "fresh.py").write_text("y = brand_new_procedure(3)\n")
        assert eventually(lambda: shown_by(worker, "x = brand_new_") == "procedure(3)")
        folder.rename(tmp_path / "away")
        time.sleep(1)
        (tmp_path / "away").rename(folder)
        (folder / "later.py").write_text("y = quite_another_thing(3)\n")
        assert eventually(lambda: shown_by(worker, "x = quite_another_") == "thing(3)")
        secret = tmp_path / "secret.py"
        secret.write_text("y = secret_word_is_swordfish\n")
        (folder / "later.py").unlink()
        (folder / "later.py").symlink_to(secret)
        time.sleep(1)
        assert "swordfish" not in shown_by(worker, "x = secret_word_")
        assert "thing" not in shown_by(worker, "x = quite_another_")
        (folder / "module_1.py").rename(folder / "renamed.py")
        text = (folder / "renamed.py").read_text()
        files = worker.models["run"].current.files
        assert eventually(lambda: files.find(text, "") == "renamed.py")


def test_a_client_that_never_reads_frees_the_model(worker, monkeypatch):
    monkeypatch.setattr(app, "SENDING", 0.3)
    body, sent = json.dumps({"prompt": "def task_", "max_tokens": 4000, "stream": True}).encode(), []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        return next(received, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message["type"])
        if len(sent) > 2:
            await asyncio.Event().wait()

    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    application = app.Server(worker).app()
    asyncio.run(asyncio.wait_for(application(scope, receive, send), 20))
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert eventually(lambda: not worker.models["run"].current.batch.active)


@pytest.mark.parametrize("path", ["/api/generate", "/v1/completions"])
def test_an_error_amid_a_stream_has_the_form_of_the_paths_clients(path, worker, monkeypatch):
    pushed = raising(RuntimeError("no memory left"), Row.push, lambda row, _: row.answer.new_tokens)
    monkeypatch.setattr(Row, "push", pushed)
    body = {"prompt": "def task_", "stream": True} | ({"raw": True} if path.startswith("/api") else {})
    lines = TestClient(app.Server(worker).app(), "http://localhost").post(path, json=body).text.splitlines()
    (error,) = [json.loads(line.removeprefix("data: "))["error"] for line in lines if '"error"' in line]
    refused = Refused(500, "RuntimeError: no memory left")
    assert error == (refused.message if path.startswith("/api") else refused.content)


def test_open_files_that_change_together_are_all_copied_from(worker):
    names = ["open_red", "open_blue", "open_green", "open_black", "open_white", "open_pink"]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: worker.take_in(f"{n}.py", f"y = call_of_{n}_thing(1)\n"), names))
    assert [shown_by(worker, f"x = call_of_{name}_") for name in names] == ["thing(1)"] * 6
    worker.take_in("open_blue.py", None)
    assert "thing" not in shown_by(worker, "x = call_of_open_blue_")


@pytest.mark.slow
def test_files_that_changed_while_no_server_ran_are_known(copied, monkeypatch):
    monkeypatch.setattr("dunes.serve.follow.MOST", 400_000)  # a quarter of it at a look
    out, folder = copied
    (folder / "module_2.py").unlink()
    text = (folder / "module_3.py").read_text()
    (folder / "module_3.py").write_text(text + "brand_new_line = brand_new_function(1)\n")
    os.utime(folder / "module_3.py", (1, 1))  # older than the index, as a file that was edited during training
    for i in range(12):
        (folder / f"large_{i}.py").write_text(f"value_{i} = quite_unheard_of_{i}(2)\n" + f"# {'x' * 60}\n" * 500)
    with closing(Worker([out], 0.0, (), lambda line: None)) as worker:
        assert eventually(lambda: shown_by(worker, "x = brand_new_") == "function(1)", 60)
        assert "module_2.py" not in worker.models["run"].current.files.names
        completer = worker.models["run"].current.completer
        names = lambda: {n for n, text in completer._open.texts.items() if text}
        assert eventually(lambda: {f"large_{i}.py" for i in range(12)} <= names(), 60)


def test_a_small_change_among_many_open_files_is_indexed_alone(run):
    completer = FolderCompleter(run)
    completer.use(completer.with_texts({f"f{i}.py": f"name_{i} = first_call_{i}(1)\n" * 50 for i in range(100)}))
    large = completer._open.parts[0]
    for i in range(12):
        texts = {f"g{i}.py": f"x = later_call_{i}(2)\n", "f3.py": f"y = changed_{i}(3)\n"}
        completer.use(completer.with_texts(texts))
    assert completer._open.parts[0][1].text is large[1].text, "the large one is not made again"
    assert len(completer._open.parts) <= 5
    copied = lambda before: CopyNearest(completer.far("new.py")).complete(before).text
    assert [copied(f"x = later_call_{i}") for i in range(12)] == ["(2)"] * 12
    assert copied("y = changed_") == "11(3)"
    assert copied("name_5 = first_call_5") == "(1)"
    completer.use(completer.with_texts({"f5.py": None}))
    assert copied("name_5 = first_call_5") != "(1)"


def test_a_replaced_model_is_let_go_and_chats_made_for_it_are_refused(worker, monkeypatch):
    import weakref

    returns, give = [], measure.return_freed_memory
    monkeypatch.setattr(measure, "return_freed_memory", lambda: returns.append(give()))
    model = worker.models["run"]
    old, request = weakref.ref(model.current.loaded.model), TextRequest("a", 3, batch=object())
    worker.call(model.reload).result(60)
    assert eventually(lambda: old() is None, 5)
    assert returns, "its memory is returned to the system"
    with pytest.raises(Refused, match="loaded again"):
        model.add(request, print, lambda: False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "run"}),
        ("/completion", {"prompt": f"<|fim_prefix|>{BEFORE}<|fim_suffix|>\n<|fim_middle|>", "n_predict": 0}),
        ("/infill", infill(BEFORE, "", n_predict=0, stream=True)),
        ("/v1/completions", {"prompt": BEFORE, "suffix": "\n", "max_tokens": 0, "stream": True}),
        ("/v1/fim/completions", {"prompt": BEFORE, "suffix": "\n", "max_tokens": 0, "stream": True}),
    ],
)
def test_a_stream_of_no_tokens_has_its_end(port, path, body):
    status, content = ask(port, path, body)
    assert status == 200, content
    line = next(line for line in content.decode().splitlines() if line.strip())
    assert json.loads(line.removeprefix("data: "))


def test_several_lines_are_answered(port):
    prompts = [f"<|fim_prefix|>{BEFORE[:end]}<|fim_suffix|>\n<|fim_middle|>" for end in (-3, -5)]
    both = ok(port, "/completion", {"prompt": prompts})
    assert [r["content"] for r in both] == [ok(port, "/completion", {"prompt": p})["content"] for p in prompts]
    assert len(ok(port, "/completion", {"prompt": [5, 6], "n_cmpl": 2, "n_predict": 3})) == 2
    assert ok(port, "/completion", {"prompt": "a", "mirostat": 0, "n_predict": 1})["model"] == "run"
    body = {"prompt": "def task_", "n_predict": 3, "temperature": 0, "return_tokens": True}
    assert len(ok(port, "/completion", body)["tokens"]) == 3
    usage = ok(port, "/v1/completions", {"prompt": BEFORE, "suffix": "\n", "max_tokens": 99})["usage"]
    assert usage["prompt_tokens"] > 5
    assert usage["completion_tokens"] > 3


def test_closed_requests_for_the_page_end_their_work_and_leave_the_queue(port):
    body = json.dumps({"before": BEFORE[:-1], "tokens": True}).encode()
    head = f"POST /suggest HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(150):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
    assert eventually(lambda: ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200, 5)
