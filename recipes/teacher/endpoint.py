"""Ask a language model for many answers, through the APIs of OpenAI or Anthropic, and record what each has cost.

Requests go through the Python clients of both (the extra `teacher`). Retries are made here, since an answer that
is lost on its way may have cost tokens, and the clients do not report their own retries.
https://platform.openai.com/docs/api-reference/chat, https://docs.anthropic.com/en/api/messages
"""

import json
import os
import random
import re
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Condition, Event, Thread, Timer
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from dunes.extra import extra
from dunes.files.json_file import append_record, print_warning, read_records
from dunes.units import format_bytes, plural

Api = Literal["chat", "completions", "anthropic"]
"""An API: OpenAI's for chats or for the continuation of a text, or Anthropic's for messages."""
CLIENTS = {
    "chat": ("openai", "OpenAI", "OPENAI_API_KEY", "/chat/completions"),
    "completions": ("openai", "OpenAI", "OPENAI_API_KEY", "/completions"),
    "anthropic": ("anthropic", "Anthropic", "ANTHROPIC_API_KEY", "/v1/messages"),
}
"""For each API: the module and the class of its client, the environment variable of its key, and the path."""
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked without a key if the environment has none."""
NO_KEY = "none"
KEY_PART = 8
"""Length in characters of the parts of a key that are removed from error texts; parts of twice as many are removed
from answers, and nothing is if the key is shorter than that: such a key is a stand-in like "local"."""
MAX_COUNT = 10**9
"""A number of tokens above this is not a count."""
MAX_BODY = 16_000_000
"""Maximum bytes of a reply, decompressed."""
TEMPLATE_TOKENS = 64
"""Maximum tokens that a chat template adds to a prompt."""
MAX_WAIT = 600.0
"""Maximum seconds between two attempts; a longer Retry-After is cut to it."""
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")
"""Names of the errors after which a request has cost nothing. Otherwise its answer may be lost on the way."""
TRUNCATED = ("length", "max_tokens")
"""Reasons of the APIs for an answer that ends at the maximum of tokens."""


class Tokens(NamedTuple):
    """Numbers of tokens of prompts and of answers."""

    prompt: int
    answer: int


FREE = Tokens(0, 0)


@dataclass(frozen=True)
class Answer:
    """An answer, with the tokens (None: not counted) and the name of the model that the endpoint reports.

    `reason` says why an answer has no text; else it is empty.
    """

    text: str
    truncated: bool = False
    tokens: Tokens | None = None
    cached: int = 0
    model: str = ""
    reason: str = ""


class FailedAttempt(Exception):
    """A request without an answer: the reason, its tokens (None: unknown), and what to do then.

    `then` is "retry" (after `wait` seconds, if given), "retry once", "give up" this request, or "stop" all.
    """

    def __init__(
        self, reason: str, tokens: Tokens | None = FREE, then: str = "retry", wait: float | None = None
    ) -> None:
        super().__init__(reason)
        self.tokens, self.then, self.wait = tokens, then, wait


class Unanswered(Exception):
    """A request that is asked again by the next run, since the budget is spent or the run ends."""


class Teacher(Protocol):
    """A model that answers prompts; `source` goes into the record of each request."""

    source: Mapping[str, Any]

    def ask(self, prompt: str) -> Answer:
        """The answer to a prompt. Raises FailedAttempt."""

    def at_most(self, prompt: str) -> Tokens:
        """The most tokens that a request with this prompt may cost."""


@dataclass(frozen=True)
class Budget:
    """A limit in tokens, or in US dollars by `prices` (per million tokens of prompts, and of answers)."""

    limit: float = float("inf")
    money: bool = False
    prices: tuple[float, float] | None = None

    def cost(self, tokens: Tokens) -> float | None:
        """US dollars; None without prices."""
        return self.prices and sum(p * n for p, n in zip(self.prices, tokens, strict=True)) / 1e6

    def charge(self, tokens: Tokens, dollars: float | None = None) -> float:
        """What counts against the limit; `dollars` is by default the cost."""
        return (self.cost(tokens) or 0.0 if dollars is None else dollars) if self.money else sum(tokens)

    @classmethod
    def parse(cls, text: str | None, prices: tuple[float, float] | None = None) -> "Budget":
        """The budget of a text like "200000" (tokens) or "5usd". Raises ValueError for other texts."""
        if prices and not all(isfinite(price) and price >= 0 for price in prices):
            raise ValueError(f"--prices {prices[0]} {prices[1]}: expected dollars per million tokens, 0 or more")
        match = re.fullmatch(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?) ?(usd|)", (text or "").strip().lower())
        if text is None or match is None:
            if text is None:
                return cls(prices=prices)
            raise ValueError(f"--budget {text!r}: expected tokens, such as 200000, or money, such as 5usd")
        if match[2] and not prices:
            raise ValueError(f"--budget {text}: money needs --prices IN OUT, in US dollars per million tokens")
        return cls(float(match[1].replace(",", "")), bool(match[2]), prices)


class Ledger:
    """The requests of all runs in a file of JSON lines, and their costs.

    A line is written before a request is sent ("asked"), and when its answer arrives or it fails, with the tokens
    that the endpoint counted. If a line about the end is missing, or the endpoint counted nothing, the most that
    the request may have cost counts against the budget. `others` has the first line of each number that `fits`.
    """

    def __init__(self, path: Path, budget: Budget, fits: Callable[[dict[str, Any]], bool] = lambda row: False):
        self.path, self.budget, self._lock = path, budget, Condition()
        self.answers: dict[int, dict[str, Any]] = {}
        self.costs: dict[int, tuple[Tokens, float]] = {}
        """For each request, the tokens that the endpoint counted, and their cost in US dollars."""
        self.total, self.dollars = FREE, 0.0
        self.open: dict[int, Tokens] = {}
        self.lost: list[Tokens] = []
        self.above = 0
        """The most tokens of an answer that was longer than the limit that it was asked with."""
        self.others: dict[int, dict[str, Any]] = {}
        for row in read_records(path, "a request", lambda row: _is_event(row) or fits(row)):
            self._apply(row)
        self.lost += self.open.values()  # of killed runs
        self.open.clear()

    def add(self, row: dict[str, Any]) -> None:
        """Append a line to the file. Raises OSError."""
        with self._lock:
            self._add(row)
            self._lock.notify_all()

    def reserve(self, number: int, at_most: Tokens) -> None:
        """Record that a request is sent now; it waits for others which might leave too little of the budget.

        Raises Unanswered if the request might exceed the budget.
        """
        with self._lock:
            at_most = at_most._replace(answer=max(at_most.answer, self.above))
            while not self._affords(at_most):
                if not self.open:
                    raise Unanswered("budget")
                self._lock.wait()
            self._add({"number": number, "asked": _now(), "at_most": at_most})

    def end(self, number: int, event: str, text: str, tokens: Tokens | None, **more: Any) -> None:
        """Record the end of a request: an "answer" with its text, or what "failed"."""
        cost = self.budget.cost(tokens) if tokens else None
        self.add({"number": number, event: text, "tokens": tokens, "cost": cost, "at": _now(), **more})

    def close(self, number: int) -> None:
        """The request no longer runs; without a line about its end, it is lost."""
        with self._lock:
            if asked := self.open.pop(number, None):
                self.lost.append(asked)
            self._lock.notify_all()

    def shares(self, number: int, parts: int) -> list[tuple[Tokens | None, float | None]]:
        """Tokens and cost of a request, divided among so many rows; the sums are those of the request."""
        if number not in self.costs:
            return [(None, None)] * parts
        tokens, cost = self.costs[number]
        dollars = cost / max(1, parts) if self.budget.prices or cost else None
        return [(Tokens(*((n + i) // parts for n in tokens)), dollars) for i in range(parts)]

    def report(self) -> str:
        """Tokens and cost of all runs, and what is unknown."""
        text = f"{plural(len(self.answers), 'request')}, {self.total.prompt:,} + {self.total.answer:,} tokens"
        if self.budget.prices or self.dollars:
            text += f", {self.dollars:.4f} USD"
        if self.above:
            text += f"; the endpoint counted {self.above:,} tokens of an answer, more than --max-tokens"
        if lost := len(self.lost) + len(self.open):
            unknown = add_tokens(*self.lost, *self.open.values())
            dollars = self.budget.cost(unknown)
            text += f"; {plural(lost, 'attempt')} interrupted or not counted by the endpoint: at most "
            text += f"{sum(unknown):,} tokens{'' if dollars is None else f', {dollars:.4f} USD'} more"
        return text

    def _affords(self, at_most: Tokens) -> bool:
        unknown = add_tokens(*self.lost, *self.open.values(), at_most)
        spent = self.budget.charge(self.total, self.dollars) + self.budget.charge(unknown)
        return spent <= self.budget.limit

    def _add(self, row: dict[str, Any]) -> None:
        append_record(self.path, row)
        self._apply(row)

    def _apply(self, row: dict[str, Any]) -> None:
        if not _is_event(row):
            self.others.setdefault(row["number"], row)
            return
        number = row["number"]
        asked = self.open.pop(number, None)
        if "asked" in row:
            self.open[number] = Tokens(*row["at_most"])
        elif row["tokens"]:
            tokens, (before, spent) = Tokens(*row["tokens"]), self.costs.get(number, (FREE, 0.0))
            if asked and tokens.answer > asked.answer:
                self.above = max(self.above, tokens.answer)
            cost = row["cost"] if row["cost"] is not None else self.budget.cost(tokens) or 0.0
            self.costs[number], asked = (add_tokens(before, tokens), spent + cost), None
            self.total, self.dollars = add_tokens(self.total, tokens), self.dollars + cost
        if asked:  # by a run that was killed, or without a count
            self.lost.append(asked)
        if "answer" in row:
            self.answers[number] = row


def _is_event(row: dict[str, Any]) -> bool:
    """True for a complete line about a request."""
    number, asked = row.get("number"), "asked" in row
    tokens, cost = row.get("at_most" if asked else "tokens", 0), row.get("cost", None if asked else "")
    counted = isinstance(tokens, list | tuple) and len(tokens) == 2 and all(map(_is_count, tokens))
    paid = cost is None or (isinstance(cost, int | float) and 0 <= cost < float("inf"))
    texts = [row.get("failed", row.get("asked"))]
    if "answer" in row:
        texts = [row["answer"], row.get("reason"), "" if isinstance(row.get("truncated"), bool) else None]
    complete = all(isinstance(text, str) for text in texts)
    return isinstance(number, int) and complete and paid and (counted or (tokens is None and not asked))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def add_tokens(*items: Tokens) -> Tokens:
    """The sums of the numbers of tokens."""
    return Tokens(sum(t.prompt for t in items), sum(t.answer for t in items))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def ask_all(
    teacher: Teacher,
    prompt: Callable[[int], str],
    ledger: Ledger,
    *,
    in_flight: int,
    needed: Callable[[], int],
    done: Container[int] = (),
    tries: int = 8,
    backoff: float = 0.5,
) -> Iterator[tuple[int, Answer]]:
    """Yield the answers to `prompt(0)`, `prompt(1)` and so on, in this order, except for numbers in `done`.

    At most `in_flight` requests run at once, and at most `needed()` are ahead of the caller, so that it uses all
    answers that are paid for. Answers in the ledger are not asked for again. A failed attempt is repeated after
    `backoff` seconds, twice as many each time, or after the endpoint's Retry-After. Ends when the budget is spent,
    without the numbers whose next attempt might exceed it. Raises ValueError if the endpoint refuses all requests.
    In each case, and after the first Ctrl-C, the answers on their way are awaited, since they are paid for.
    """
    stopped, waiting = Event(), deque[tuple[int, Future[Answer]]]()

    def work(number: int, text: str, future: Future[Answer]) -> None:
        try:
            future.set_result(_ask(teacher, number, text, ledger, tries, backoff, stopped))
        except BaseException as error:
            ledger.close(number)  # first: the main thread may wait for it
            future.set_exception(error)

    def start(number: int) -> None:
        future = Future[Answer]()
        if row := ledger.answers.get(number):
            future.set_result(Answer(row["answer"], row["truncated"], reason=row["reason"]))
        else:
            text = prompt(number)
            ledger.reserve(number, teacher.at_most(text))
            Thread(target=work, args=(number, text, future), daemon=True).start()
        waiting.append((number, future))

    numbers = (number for number in count() if number not in done)
    number, spent = next(numbers), False
    try:
        while waiting or not spent:
            if waiting and waiting[0][1].done():
                first, future = waiting.popleft()
                if isinstance(future.exception(), Unanswered):
                    spent = True  # the answers after it are paid for
                else:
                    yield first, future.result()
                continue
            running = [future for _, future in waiting if not future.done()]
            ahead = min(max(1, needed()), 8 * in_flight) - len(waiting)
            try:
                for _ in range(0 if spent else min(in_flight - len(running), ahead)):
                    start(number)
                    number = next(numbers)
            except Unanswered:
                spent = True
            if waiting and not waiting[0][1].done():
                wait([future for _, future in waiting if not future.done()], return_when=FIRST_COMPLETED)
    except KeyboardInterrupt:
        print_warning("stopped: waiting for the answers that are paid for; Ctrl-C again ends at once")
        raise
    finally:
        stopped.set()
        wait([future for _, future in waiting])


def _ask(
    teacher: Teacher, number: int, prompt: str, ledger: Ledger, tries: int, backoff: float, stopped: Event
) -> Answer:
    """The answer to a prompt, after as many attempts as are needed; the first is reserved by the caller."""
    for attempt in range(1, tries + 1):
        if attempt > 1:
            ledger.reserve(number, teacher.at_most(prompt))
        try:
            answer = teacher.ask(prompt)
            break
        except FailedAttempt as error:
            ledger.end(number, "failed", str(error), error.tokens)
            if error.then == "stop":
                raise ValueError(str(error)) from None
            if error.then == "give up" or attempt == tries or (error.then == "retry once" and attempt > 1):
                answer = Answer("", tokens=FREE, reason=f"no answer, attempt {attempt}: {error}")
                break
            delay = min(backoff * 2 ** (attempt - 1), 60.0) * (1 - random.random() / 4)
            if stopped.wait(delay if error.wait is None else error.wait):
                raise Unanswered("stopped") from None
    more = {"truncated": answer.truncated, "reason": answer.reason, "cached": answer.cached, "attempts": attempt}
    source = {**teacher.source, **({"model": answer.model} if answer.model else {})}
    ledger.end(number, "answer", answer.text, answer.tokens, **more, **source)
    return answer


class Endpoint:
    """A model behind an API. The key comes from the environment; no text of this class contains it.

    `api` is by default that of Anthropic for Anthropic's hosts, else "chat". Raises ValueError for a URL with
    credentials or a query, without a key for other machines, and without the client's package.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api: Api | None = None,
        *,
        max_tokens: int = 3072,
        temperature: float = 1.0,
        stop: tuple[str, ...] = (),
        timeout: float = 600.0,
    ) -> None:
        host = _checked_host(url)
        by_host: Api = "anthropic" if f".{host}".endswith(".anthropic.com") else "chat"
        self.api, self.url, self.model = api or by_host, url.rstrip("/"), model
        self.official = host == "api.openai.com"
        self.limit, self.temperature, self.stop = max_tokens, temperature, stop
        self.source: Mapping[str, Any] = {"model": model, "endpoint": self.url}
        module, name, self.variable, self.path = CLIENTS[self.api]
        self.key = _key(self.variable, host)
        self.answered = False
        """True once a request had an answer; before, a lack of connection ends the run."""
        self._module: Any = extra(module, "teacher")
        base = self.url.removesuffix("/v1") if self.api == "anthropic" else self.url
        trusted = by_host == "anthropic" or f".{host}".endswith(".openai.com")
        # Both clients send more credentials of the environment, and headers, to any host.
        private = [name for name in os.environ if not trusted and name.startswith(("OPENAI_", "ANTHROPIC_"))]
        removed = {name: os.environ.pop(name) for name in private}
        try:
            http_client: Any = self._module.DefaultHttpxClient(
                follow_redirects=False,  # would send the key elsewhere
                trust_env=host not in LOCAL,  # proxies
                event_hooks={"response": [partial(_limit_body, self.url)]},
            )
            http_client.send = partial(_send_within, timeout, http_client.send, self.url)
            self._client: Any = getattr(self._module, name)(
                api_key=self.key,
                base_url=base,
                max_retries=0,
                timeout=timeout,
                http_client=http_client,
            )
        except Exception as error:  # of a text that may have a password
            raise ValueError(
                f"{host}: {type(error).__name__}: check the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY of the "
                "environment (a socks proxy needs pip install socksio), or list the host in NO_PROXY"
            ) from None
        finally:
            os.environ.update(removed)

    def at_most(self, prompt: str) -> Tokens:
        """The most tokens of a request: a tokenizer has at most one token per byte."""
        return Tokens(len(prompt.encode()) + TEMPLATE_TOKENS, self.limit)

    def ask(self, prompt: str) -> Answer:
        """The answer to a prompt. Raises FailedAttempt."""
        try:
            reply = self._client.post(self.path, cast_to=object, body=self._body(prompt))
        except self._module.APIStatusError as error:
            self.answered = True
            raise self._refusal(error) from None
        except self._module.APIConnectionError as error:
            cause = type(error.__cause__).__name__
            if cause in NOT_SENT and not self.answered:
                reason = f"{self.url}: no connection ({cause}); is the URL right, and the server running?"
                raise FailedAttempt(reason, then="stop") from None
            if isinstance(error.__cause__, FailedAttempt):
                raise error.__cause__ from None
            tokens = FREE if cause in NOT_SENT else None
            raise FailedAttempt(f"{self.url}: no connection, or lost ({cause})", tokens) from None
        except (ValueError, RecursionError):
            raise FailedAttempt(f"{self.url}: the answer is not JSON, or half of it", None, "retry once") from None
        self.answered = True
        try:
            return self._read(reply)
        except (LookupError, TypeError, AttributeError):
            text = self.scrub(ascii(reply)[:80])
            raise FailedAttempt(f"{self.url}: unexpected answer: {text}", _usage(reply)[0], "retry once") from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def scrub(self, text: str, part: int = KEY_PART) -> str:
        """The text without the parts of the key that have `part` characters or more."""
        if len(self.key) < 2 * KEY_PART:
            return text
        parts = {self.key[i : i + part] for i in range(len(self.key) - part + 1)}
        hidden = {j for i in range(len(text)) if text[i : i + part] in parts for j in range(i, i + part)}
        return "".join("*" if i in hidden else text[i] for i in range(len(text))) if hidden else text

    def _body(self, prompt: str) -> dict[str, Any]:
        # OpenAI's own models have another name of the limit, and some refuse stop strings.
        body: dict[str, Any] = {"model": self.model}
        body["max_completion_tokens" if self.api == "chat" and self.official else "max_tokens"] = self.limit
        if self.api != "anthropic" or self.temperature != 1.0:  # its default, and newer models refuse the field
            body["temperature"] = self.temperature
        if self.stop and not (self.api == "chat" and self.official):
            body["stop_sequences" if self.api == "anthropic" else "stop"] = list(self.stop)
        if self.api == "completions":
            return body | {"prompt": prompt}
        return body | {"messages": [{"role": "user", "content": prompt}]}

    def _read(self, reply: Any) -> Answer:
        """Raises LookupError, TypeError or AttributeError for a reply of another form."""
        if self.api == "anthropic":
            text, reason = reply["content"], reply.get("stop_reason")
        else:
            choice = reply["choices"][0]
            text = choice["text"] if self.api == "completions" else choice["message"]["content"]
            reason = choice.get("finish_reason")
        if isinstance(text, list):
            text = "".join(part["text"] for part in text if part["type"] == "text")
        if text is None:  # a refusal
            text = ""
        if not isinstance(text, str):
            raise TypeError("a text")
        tokens, cached = _usage(reply)
        name, why = reply.get("model"), "" if text.strip() else f"no text: {reason}"
        model = name if isinstance(name, str) else self.model
        return Answer(
            self.scrub(text, 2 * KEY_PART), reason in TRUNCATED, tokens, cached, self.scrub(model), self.scrub(why)
        )

    def _refusal(self, error: Any) -> FailedAttempt:
        """The failed attempt of a reply whose status is an error."""
        status, text = error.status_code, self.scrub(_message(error.body))[:160]
        place = f"{self.url}: {status}"
        if status in (401, 403):
            return FailedAttempt(f"{place}: the key is refused; check {self.variable} and --model", then="stop")
        if 300 <= status < 400:
            return FailedAttempt(f"{place}: a redirect; give the URL that it leads to", then="stop")
        if "insufficient_quota" in (getattr(error, "code", None), getattr(error, "type", None)) or status == 402:
            return FailedAttempt(f"{place}: {text}; pay, then run the same command again", then="stop")
        if status in (408, 409, 425, 429) or status >= 500:
            tokens = None if status in (504, 524) else FREE  # a proxy did not wait for the answer
            return FailedAttempt(f"{place}: {text}", tokens, wait=_retry_after(error.response.headers))
        if status == 400 and self.api == "chat" and "chat template" in _message(error.body):
            return FailedAttempt(f"{place}: {text}; or give --api completions", then="stop")
        if status in (400, 413, 422):
            return FailedAttempt(f"{place}: {text}", then="give up")
        remedy = (
            f"is there a model {self.model!r}, and does the URL end before {self.path}, as in "
            f"https://host{'' if self.api == 'anthropic' else '/v1'}?"
        )
        return FailedAttempt(f"{place}: {text}; {remedy}", then="stop")


def _limit_body(place: str, response: Any) -> None:
    """Limit the bytes of a reply."""
    parts = response.iter_bytes()

    def limited() -> Iterator[bytes]:
        size = 0
        for part in parts:
            size += len(part)
            if size > MAX_BODY:
                raise FailedAttempt(f"{place}: a reply of more than {format_bytes(MAX_BODY)}", None, "retry once")
            yield part

    response.iter_bytes = limited


def _send_within(seconds: float, send: Callable[..., Any], place: str, request: Any, **options: Any) -> Any:
    """The response with its body. Raises FailedAttempt after so long; a client's timeout is between two bytes.

    Each request has a connection of its own, which the client's trace names, and which is shut down then.
    """
    sockets, passed = list[socket](), Event()

    def disconnect() -> None:
        passed.set()
        for connection in sockets:
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):  # a duplicate, since TLS takes the socket over
            sockets.append(info["return_value"].get_extra_info("socket").dup())
            if passed.is_set():
                disconnect()

    request.headers["Connection"] = "close"
    request.extensions["trace"] = trace
    timer = Timer(seconds, disconnect)
    timer.daemon = True
    timer.start()
    try:
        return send(request, **options)
    except Exception as error:
        if passed.is_set() or type(error).__name__ == "ReadTimeout":  # the client's own, of equal length
            raise FailedAttempt(f"{place}: no complete reply within {seconds:g} s", None, "retry once") from None
        raise
    finally:
        timer.cancel()
        for connection in sockets:
            connection.close()


def _checked_host(url: str) -> str:
    """The host of a URL. Raises ValueError, without the parts that may be secret."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise ValueError("--endpoint: not a URL; expected one like https://host/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("--endpoint: expected a URL like https://host/v1 or http://127.0.0.1:8080/v1")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError(
            f"--endpoint {parts.scheme}://{parts.hostname}{port}{parts.path}: expected no user, password or query "
            "in a URL; put the key into the environment"
        )
    return parts.hostname


def _key(variable: str, host: str) -> str:
    """The key in the environment. Raises ValueError, without the key, if it cannot be one."""
    key = os.environ.get(variable, "").strip()
    if not key and host not in LOCAL:
        raise ValueError(f"{host}: no key; set {variable} in the environment (any text if it needs none)")
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{variable}: a key has printable ASCII characters only, and no blanks")
    return key or NO_KEY


def _usage(reply: Any) -> tuple[Tokens | None, int]:
    """The tokens that an endpoint counted (None if it did not), and how many of the prompt's were cached."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    if not isinstance(usage, dict):
        return None, 0

    def number(*names: str, of: Any = usage) -> int | None:
        values = [of.get(name) for name in names if isinstance(of, dict)]
        return next(filter(_is_count, values), None)

    prompt, answer = number("prompt_tokens"), number("completion_tokens", "output_tokens")
    cached = (
        number("cached_tokens", of=usage.get("prompt_tokens_details")) or number("cache_read_input_tokens") or 0
    )
    if prompt is None and (prompt := number("input_tokens")) is not None:  # Anthropic counts cached ones beside it
        prompt += sum(number(f"cache_{kind}_input_tokens") or 0 for kind in ("read", "creation"))
    if prompt is None or answer is None:
        return None, 0
    return Tokens(
        prompt, max(answer, (number("total_tokens") or 0) - prompt)
    ), cached  # some think beside the answer


def _message(body: Any) -> str:
    """The message in the body of an error, on one line."""
    for key in ("error", "message", "detail"):
        body = body.get(key, body) if isinstance(body, dict) else body
    return " ".join((body if isinstance(body, str) else json.dumps(body)).split())


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, by the header Retry-After; None without a valid one."""
    value = headers.get("retry-after", "")
    seconds = float("nan")
    with suppress(ValueError, TypeError, OverflowError):
        seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    with suppress(ValueError):
        seconds = float(value)
    return min(max(0.0, seconds), MAX_WAIT) if isfinite(seconds) else None
