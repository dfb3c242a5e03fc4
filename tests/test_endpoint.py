"""Instruction data from endpoints: what misbehaves, what it costs, and what a killed run leaves."""

import json
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from conftest import eventually, raising, refuses
from dunes.data.examples import ignored_line, read_records
from teacher import endpoint
from teacher.endpoint import Answer, Budget, Endpoint, FailedAttempt, Ledger, Tokens, ask_all
from teachers import KEY, REPLIES, serving, started
from test_recipes import recipe

MADE = recipe("self_instruct")
APIS = "chat", "completions", "anthropic"
FAULTS = 429, 500, 503, "cut", "half", "html", "garbage", "no choices", "wrong types"


@pytest.fixture(autouse=True)
def _keys(monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, KEY)
    for name in ("ANTHROPIC_AUTH_TOKEN", "OPENAI_LOG", "ANTHROPIC_LOG"):
        monkeypatch.delenv(name, raising=False)


def options(folder, url, **more):
    seeds = folder / "seeds.jsonl"
    texts = [f"Say the number {i} in words of {i + 1} languages." for i in range(30)]
    seeds.write_text("".join(json.dumps({"instruction": t, "input": "", "output": "x"}) + "\n" for t in texts))
    base = {"count": 40, "backoff": 0.001, "max_tokens": 400, "in_flight": 4}
    return MADE.Options(seeds=str(seeds), out=str(folder / "out.json"), model="m", endpoint=url, **base | more)


def tasks(folder, name="out.json"):
    """The tasks without what differs between runs."""
    rows = json.loads((folder / name).read_text())
    return [(r["instruction"], r["output"], r["provenance"]["request"]) for r in rows]


def sums(folder):
    """Tokens of all rows, and their cost."""
    listed = [row["provenance"] for row in json.loads((folder / "out.json").read_text())]
    return [sum(r["tokens"][name] for r in listed) for name in ("prompt", "answer")], sum(
        r["usd"] or 0 for r in listed
    )


def ledger(folder, budget=None):
    return Ledger(folder / "out.json.requests.jsonl", budget or Budget(), lambda row: "items" in row)


@pytest.mark.parametrize("api", APIS)
def test_one_and_sixteen_in_flight_give_the_same_rows_and_the_report_is_what_was_counted(tmp_path, api, capsys):
    count = 80 if api == "chat" else 40
    folders, most = [tmp_path / "1", tmp_path / "16"], []
    for folder in folders:
        folder.mkdir()
        with serving(seconds=0.1 if folder.name == "16" else 0.0) as server:
            asked = options(
                folder, server.url, api=api, in_flight=int(folder.name), count=count, prices=(2.0, 8.0)
            )
            assert MADE.main(asked) >= count
            report, counted = capsys.readouterr().out, server.total()
            most.append(server.most)
        spent = ledger(folder)
        assert list(spent.total) == counted
        usd = (2 * counted[0] + 8 * counted[1]) / 1e6
        assert f"{counted[0]:,} + {counted[1]:,} tokens, {usd:.4f} USD\n" in report.replace("\n\n", "\n")
        assert f"next: dunes finetune MODEL --data {folder / 'out.json'}" in report
        assert sums(folder) == (counted, pytest.approx(usd, rel=1e-9))
        assert len(spent.answers) == len(server.counted), "each answer is paid for once, and used"
    assert tasks(folders[0]) == tasks(folders[1])
    assert most[0] == 1
    assert (4 if api == "chat" else 1) < most[1] <= 16
    paths = {path for path, _ in server.headers}
    assert paths == {"/v1" + endpoint.CLIENTS[api][3].removeprefix("/v1")}
    body = server.bodies[0]
    assert body.get("stop", body.get("stop_sequences")) == ["\n20."]
    assert body["max_tokens"] == 400
    assert ("prompt" in body) == (api == "completions")
    (row, *_) = json.loads((folders[1] / "out.json").read_text())
    assert row["provenance"]["model"] == "t-1"
    assert row["provenance"]["endpoint"] == server.url
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["provenance"]["at"])
    records = read_records(folders[1] / "out.json")
    assert (records.format, ignored_line([records])) == ("alpaca", ["ignored fields: provenance"])


@pytest.mark.parametrize("api", APIS)
def test_an_endpoint_that_misbehaves_costs_what_it_counted_and_no_row(tmp_path, api):
    """Each of the faults befalls the first request of a prompt, in turn; the second is answered."""
    order, faults = {}, [*FAULTS, *(f for f in REPLIES if f not in FAULTS)]

    def fault(prompt, n):
        place = order.setdefault(prompt, len(order))
        return faults[place % len(faults)] if n == 0 else None

    with serving(fault) as server:
        MADE.main(options(tmp_path, server.url, api=api, in_flight=1, count=48))
        counted, lost = server.total(), server.lost
    spent = ledger(tmp_path)
    assert list(spent.total) == counted
    assert len(spent.lost) == len(lost) > 0
    for known, most in zip(lost, spent.lost, strict=True):
        assert all(a <= b for a, b in zip(known, most, strict=True))
    attempts = [row["attempts"] for row in spent.answers.values()]
    repeated = [order_of % len(faults) < len(FAULTS) for order_of in range(len(attempts))]
    assert attempts == [1 + r for r in repeated] or api == "anthropic"  # which has one more form of no text
    with serving() as server:
        clean = tmp_path / "clean"
        clean.mkdir()
        MADE.main(options(clean, server.url, api=api, count=48))
    rows = [row[0] for row in tasks(tmp_path)]
    assert len(rows) == len(set(rows)) >= 48
    assert set(rows) & {row[0] for row in tasks(clean)}


DRIP = 0.05
START = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
REPLY = json.dumps({"model": "t", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}).encode()
SIZED = START + b"Content-Length: %d\r\n\r\n" % (len(REPLY) + 9999) + REPLY
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(REPLY), REPLY)
DRIPPING = {  # what is sent at once, and what follows in single bytes
    "the status line": (b"", b"HTTP/1.1 200 " + b"O" * 9999),
    "headers": (START, b"X: y\r\n" * 9999),
    "the body": (SIZED, b" " * 9999),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 9999),
    "an error": (b"HTTP/1.1 500 No\r\nContent-Length: 9999\r\n\r\n", b" " * 9999),
    "nothing at all": (b"", b""),
    "a handshake of TLS": (b"\x16\x03\x03\x40\x00", b"\x02" * 9999),
}


@contextmanager
def dripping(head, tail, reads=True):
    """A server that accepts connections, sends the head at once and the rest byte by byte; its address."""
    stopped, clients = threading.Event(), []

    def drip(client):
        with suppress(OSError):
            if reads:
                client.recv(1 << 16)
            client.sendall(head)
            for i in range(len(tail)):
                if stopped.wait(DRIP):
                    break
                client.sendall(tail[i : i + 1])
            stopped.wait()

    def accept():
        with suppress(OSError):
            while True:
                clients.append(server.accept()[0])
                threading.Thread(target=drip, args=(clients[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        stopped.set()
        server.shutdown(socket.SHUT_RDWR)
        for client in clients:
            client.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("api", ["chat", "anthropic"])
@pytest.mark.parametrize("what", DRIPPING)
def test_a_reply_that_never_ends_is_waited_for_until_the_timeout(what, api):
    """A client's own timeout is between two bytes; nothing of the request is left behind."""
    tls = what == "a handshake of TLS"
    with dripping(*DRIPPING[what], reads=not tls) as port:
        teacher = Endpoint(f"http{'s' * tls}://127.0.0.1:{port}/v1", "m", api, timeout=0.3)
        threads, start = threading.active_count(), time.monotonic()
        with pytest.raises(FailedAttempt) as error:
            teacher.ask("hi")
        assert time.monotonic() - start < 20
        # The client's own timeout of a first connection may be the first to pass: nothing was sent.
        assert (tls and (error.value.tokens, error.value.then) == ((0, 0), "stop")) or (
            "no complete reply within 0.3 s" in str(error.value) and error.value.then == "retry once"
        )
        assert eventually(lambda: threading.active_count() <= threads + 1), "but that of the server"
        assert not [s for s in teacher._client._client._transport._pool.connections if not s.is_closed()]
        teacher.close()


@pytest.mark.parametrize(("status", "requests"), [(401, 4), (404, 4), (307, 4), (400, 13), (500, 13 * 8)])
def test_what_cannot_go_on_ends_with_one_line_and_costs_nothing(tmp_path, status, requests):
    with serving(lambda prompt, n: status) as server:
        refuses(f"{server.url}.*{status}", MADE.main, options(tmp_path, server.url))
        assert len(server.bodies) <= requests
    assert ledger(tmp_path).total == (0, 0)
    assert not ledger(tmp_path).lost


def test_rows_before_the_end_are_kept_and_the_same_command_goes_on(tmp_path):
    with serving(lambda prompt, n: 401 if len(server.times) > 6 else None) as server:
        refuses("401", MADE.main, options(tmp_path, server.url))
        before = tasks(tmp_path)
        assert before
        server.fault = lambda prompt, n: None
        assert MADE.main(options(tmp_path, server.url)) >= 40
        assert tasks(tmp_path)[: len(before)] == before
        assert list(ledger(tmp_path).total) == server.total()
        asked = len(server.bodies)
        MADE.main(options(tmp_path, server.url))
        assert len(server.bodies) == asked, "nothing is left to ask"


@pytest.mark.parametrize(("budget", "unit"), [("9000", None), ("0.05usd", (2.0, 8.0))])
@pytest.mark.parametrize("in_flight", [1, 16])
def test_a_budget_is_never_exceeded(tmp_path, capsys, budget, unit, in_flight):
    faults = [None, "cut", None, 500, None]
    with serving(lambda prompt, n: faults[(len(prompt) + n) % 5]) as server:
        asked = options(tmp_path, server.url, budget=budget, prices=unit, in_flight=in_flight, count=500)
        total = MADE.main(asked)
        assert "the budget is spent; to go on, give a larger --budget" in capsys.readouterr().out
        assert 0 < total < 500
        for _ in range(3):  # the next runs have what attempts did not cost that might have
            total = MADE.main(asked)
        prompt, answer = (sum(pair) for pair in zip(*server.counted, *server.lost, strict=True))
        paid = (2 * prompt + 8 * answer) / 1e6 if unit else prompt + answer
        limit = float(budget.removesuffix("usd"))
        assert 0.1 * limit < paid <= limit
        assert MADE.main(replace(asked, budget=None, count=total + 20)) >= total + 20
    rows = [row[0] for row in tasks(tmp_path)]
    assert len(rows) == len(set(rows))


def test_budgets():
    assert Budget.parse("200,000") == Budget(200000)
    assert Budget.parse(" 2.5 USD ", (1.0, 2.0)) == Budget(2.5, True, (1.0, 2.0))
    assert Budget.parse(None).limit == float("inf")
    for text in ("5usd", "", "1,5usd", "1,2345", "five", "-1", "5 eur", "1e3", "nan"):
        refuses("--", Budget.parse, text)
    for prices in ((-1.0, 2.0), (1.0, float("nan"))):
        refuses("--prices", Budget.parse, None, prices)


KILLS = 20


@pytest.mark.slow
def test_kills_lose_and_repeat_nothing(tmp_path):
    """The log is that of all runs: what was counted, and what was on its way when a run was killed."""
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for folder in (clean, killed):
        folder.mkdir()
    with serving() as server:
        MADE.main(options(clean, server.url, count=400, in_flight=16))
    chance = random.Random(0)
    faults = [None] * 12 + [429, 500, "cut"]
    with serving(lambda prompt, n: chance.choice(faults), seconds=0.1) as server:
        asked = options(killed, server.url, count=400)
        for _ in range(KILLS):
            process = started(asked)
            time.sleep(chance.uniform(0.0, 0.3))
            assert process.is_alive(), "the run is too short for all kills"
            process.kill()
            process.join()
        lines = (killed / "out.json.requests.jsonl").read_bytes()
        MADE.main(replace(asked, in_flight=16))
        counted, lost, bodies = server.total(), server.lost, len(server.bodies)
    assert (killed / "out.json.requests.jsonl").read_bytes().startswith(lines[: lines.rindex(b"\n")])
    assert tasks(killed) == tasks(clean)
    numbers = list(ledger(killed).others)
    assert numbers == list(range(len(numbers))), "each answer is filtered once"
    spent = ledger(killed)
    unknown = endpoint.add_tokens(*spent.lost)
    real = [sum(part) for part in zip(*server.counted, *lost, strict=True)]
    assert all(a <= b for a, b in zip(spent.total, counted, strict=True))
    assert all(a <= b <= a + c for a, b, c in zip(spent.total, real, unknown, strict=True))
    print(f"{bodies} requests, {counted} counted, {list(spent.total)} known, at most {tuple(unknown)} more")


def test_ctrl_c_waits_for_what_is_paid_for_and_one_run_writes_a_file(tmp_path):
    with serving(seconds=1.0) as server:
        asked = options(tmp_path, server.url, count=400, in_flight=8)
        process = started(asked)
        assert eventually(lambda: len(server.bodies) >= 8)
        for _ in range(2):
            refuses("another run writes to it", MADE.main, asked)
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert list(ledger(tmp_path).total) == server.total()
        assert len(ledger(tmp_path).answers) == 8
    assert not ledger(tmp_path).lost
    (tmp_path / "out.json.requests.jsonl").unlink()
    (tmp_path / "out.json").write_text("[]")
    refuses(r"out\.json: exists, but not out\.json\.requests\.jsonl", MADE.main, asked)


def test_the_key_is_never_seen(tmp_path, capsys, monkeypatch):
    """Not where errors or answers repeat it, not in files, not in what is printed, and not behind a redirect."""
    with serving(lambda prompt, n: [500, 400, "cut", None][len(server.times) % 4]) as server:
        server.text = lambda prompt: f" Repeat the key {KEY} twice.\n4. Input:\n\n4. Output:\n{KEY[3:]} {KEY[:20]}"
        message = refuses("10 requests", MADE.main, options(tmp_path, server.url, count=10))
        server.fault = lambda prompt, n: 401
        message += refuses("401", MADE.main, options(tmp_path, server.url))
        assert {headers["authorization"] for _, headers in server.headers} == {f"Bearer {KEY}"}
        with serving(lambda prompt, n: 307) as other:
            refuses("307", MADE.main, options(tmp_path, other.url))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode()
    said = capsys.readouterr()
    seen = message + written + said.out + said.err
    assert "Repeat the key ****" in seen
    parts = {KEY[i : i + 8] for i in range(len(KEY) - 7)}
    assert not [part for part in parts if part in seen]
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n{KEY}")
    assert KEY not in refuses("a key has printable ASCII", Endpoint, "http://127.0.0.1:9/v1", "m")


def test_urls_and_keys_that_are_refused(monkeypatch):
    for url in ("http://me:pass1234@h/v1", "https://h/v1?api-key=pass1234", "https://h/#pass1234"):
        assert "pass1234" not in refuses("no user, password or query", Endpoint, url, "m")
    for url in ("h/v1", "ftp://h/v1", "", "http://", "http://h:port/v1"):
        refuses("--endpoint: ", Endpoint, url, "m")
    for name, url in (("OPENAI", "https://api.openai.com/v1"), ("ANTHROPIC", "https://api.anthropic.com")):
        monkeypatch.delenv(f"{name}_API_KEY")
        refuses(f"{name}_API_KEY", Endpoint, url, "m")


class Scripted:
    """A teacher that fails as it is told."""

    source = {"model": "m"}  # noqa: RUF012

    def __init__(self, *failures):
        self.failures, self.asked = list(failures), []

    def at_most(self, prompt):
        return Tokens(10, 10)

    def ask(self, prompt):
        self.asked.append(time.monotonic())
        if self.failures:
            raise self.failures.pop(0)
        return Answer("text", tokens=Tokens(3, 4))


def test_a_damaged_log_loses_its_damaged_lines_alone(tmp_path, capsys):
    path = tmp_path / "log"
    for number in range(3):
        first = Ledger(path, Budget())
        first.reserve(number, Tokens(10, 10))
        first.end(number, "answer", "a", Tokens(1, 2), truncated=False, reason="")
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:30]
    end = {"number": 7, "answer": "x", "tokens": [1, 2], "cost": None, "truncated": False, "reason": ""}
    damaged = [{k: v for k, v in end.items() if k != name} for name in ("number", "cost", "truncated", "reason")]
    damaged += [end | {"tokens": [-1, 2]}, end | {"tokens": [10**400, 2]}, end | {"cost": "1"}]
    damaged += [{"number": 4, "asked": "x", "at_most": [1]}, {"number": 4, "asked": "x", "at_most": None}]
    path.write_text("\n".join([*lines, *map(json.dumps, damaged)]))
    again = Ledger(path, Budget())
    assert (sorted(again.answers), again.total, again.lost) == ([0, 2], (2, 4), [(10, 10)])
    assert "1 attempt interrupted or not counted by the endpoint: at most 20 tokens more" in again.report()
    assert "line 4: expected a request" in capsys.readouterr().err
    assert [again.shares(0, 3), again.shares(9, 1)] == [
        [((0, 0), None), ((0, 1), None), ((1, 1), None)],
        [(None, None)],
    ]


@pytest.mark.parametrize("limit", [20, 1000])
def test_a_log_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch, limit):
    """Others wait for the budget that the request has reserved."""
    monkeypatch.setattr(Ledger, "end", raising(OSError("the disk is full")))
    source = Ledger(tmp_path / "log", Budget(limit))
    answers = ask_all(Scripted(), str, source, in_flight=4, needed=lambda: 4)
    with pytest.raises(OSError, match="the disk is full"):
        next(answers)
    assert not source.open
    assert source.lost


@pytest.mark.parametrize(("usage", "tokens", "cached"), [
    ({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 32}, (7, 25), 0),
    ({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 3}, (7, 5), 0),
    ({"prompt_tokens": 7, "completion_tokens": 5, "cache_read_input_tokens": 4}, (7, 5), 4),
    ({"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 4,
      "cache_creation_input_tokens": 2}, (13, 5), 4),
    ({"prompt_tokens": 10**400, "completion_tokens": 5}, None, 0),
    ({"prompt_tokens": True, "completion_tokens": 5}, None, 0),
    ({"prompt_tokens": -1, "completion_tokens": 5}, None, 0),
])  # fmt: skip
def test_tokens_that_endpoints_count(usage, tokens, cached):
    assert endpoint._usage({"usage": usage}) == (tokens, cached)


def test_an_endpoint_that_exceeds_the_limit_is_reported_and_reserved_for(tmp_path):
    source = Ledger(tmp_path / "log", Budget(1000))
    source.reserve(0, Tokens(10, 10))
    source.end(0, "failed", "x", Tokens(10, 500))
    assert "the endpoint counted 500 tokens of an answer, more than --max-tokens" in source.report()
    for again in (source, Ledger(tmp_path / "log", Budget(1000))):
        with pytest.raises(endpoint.Unanswered):
            again.reserve(1, Tokens(10, 10))


@pytest.mark.parametrize("fault", ["html", "garbage", "wrong types", "zipped", "drips"])
def test_an_unexpected_form_is_paid_twice_at_most(tmp_path, fault, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_BODY", 50_000)
    with serving(lambda prompt, n: fault) as server:
        asked = options(tmp_path, server.url, timeout=0.2 if fault == "drips" else 9, in_flight=10)
        refuses(r"10 requests without a kept task.*no answer, attempt 2", MADE.main, asked)
        times = sorted(server.times.values())  # of one that began last, perhaps one attempt
        assert times[-10:] == [2] * 10


def test_the_environment_is_for_its_own_hosts(monkeypatch):
    secrets = {"OPENAI_ORG_ID": "org-1", "OPENAI_PROJECT_ID": "proj-1", "ANTHROPIC_AUTH_TOKEN": "token-1"}
    secrets |= dict.fromkeys(("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"), "x-mine: custom-1")
    for name, value in {**secrets, "ALL_PROXY": "socks5://me:pass1234@127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with serving() as server:
        for api in APIS:
            teacher = Endpoint(server.url, "m", api)
            assert teacher.ask("x" * 99).text, "no proxy on this machine"
            teacher.close()
        assert not [s for s in ("org-1", "proj-1", "token-1", "custom-1") if s in str(server.headers)]
    assert os.environ.items() >= secrets.items()
    for proxy in ("socks5://me:pass1234@127.0.0.1:9", "http://pass1234:port"):
        monkeypatch.setenv("ALL_PROXY", proxy)
        assert "pass1234" not in refuses("h: .*: check the proxy in", Endpoint, "https://h/v1", "m")


def test_what_is_refused_before_anything_is_asked(tmp_path):
    base = options(tmp_path, "http://127.0.0.1:9/v1")
    (tmp_path / "folder").mkdir()
    for fields in (
        *({name: value} for name in ("temperature", "backoff", "timeout") for value in (float("nan"), -1.0)),
        *({"timeout": 0.0}, {"count": 0}, {"max_tokens": 10**10}, {"endpoint": None, "api": "chat"}),
        *({"endpoint": None, "timeout": 5.0}, {"endpoint": None, "in_flight": 8, "model": "gpt"}),
        *({"out": str(tmp_path / out)} for out in ("folder", "nowhere/out.json", "x.requests.jsonl")),
        {"out": base.seeds},
    ):
        refuses(r"--|expected|log", MADE.main, replace(base, **fields))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "seeds.jsonl"]


def test_an_edited_file_is_not_overwritten(tmp_path):
    with serving() as server:
        MADE.main(options(tmp_path, server.url, count=8))
        path = tmp_path / "out.json"
        rows = json.loads(path.read_text())
        path.write_text(json.dumps(rows[:3]))
        assert MADE.main(options(tmp_path, server.url, count=8)) == len(rows), "as a killed run leaves it"
        for edited in (rows[1:], [rows[0] | {"output": "mine"}, *rows[1:]]):
            path.write_text(json.dumps(edited))
            refuses("has other tasks than out.json.requests.jsonl", MADE.main, options(tmp_path, server.url))
            assert json.loads(path.read_text()) == edited
