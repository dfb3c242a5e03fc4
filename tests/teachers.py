"""Endpoints that answer as OpenAI's and Anthropic's do, count tokens, and misbehave on schedule."""

import gzip
import hashlib
import importlib.util
import json
import multiprocessing
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "l", "rt", "sk")]
KEY = "sk-proj-Zq7vXw3LkT9aBc2DfG5hJ8mN"
SECONDS = 0.002


def english(prompt):
    """Tasks that depend on the prompt only; some are dropped, and a task that all prompts share is kept once."""
    chance = random.Random(hashlib.sha256(prompt.encode()).hexdigest())
    items = [" ".join(chance.choices(WORDS, k=7)) for _ in range(4)]
    items = ["Name the largest river of the country.", *items[:2], "Draw this picture of a cat.", *items[2:]]
    return "###\n".join(
        f"{i}. Instruction: {text}\n{i}. Input:\n<noinput>\n{i}. Output:\n{text[::-1]}\n"
        for i, text in enumerate(items, 4)
    )


class Teacher(ThreadingHTTPServer):
    """`fault(prompt, n)` names what goes wrong with the n-th request (from 0) for a prompt."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fault=lambda prompt, n: None, text=english, seconds=SECONDS, key=KEY):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.text, self.seconds, self.key = fault, text, seconds, key
        self.lock, self.times, self.running, self.most = Lock(), Counter(), 0, 0
        self.counted, self.lost, self.bodies, self.headers = [], [], [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        """Clients that are killed leave broken pipes."""

    def total(self):
        """Tokens of the prompts and the answers that arrived."""
        return [sum(part) for part in zip(*self.counted, strict=True)] or [0, 0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        with server.lock:
            n, server.times[prompt] = server.times[prompt], server.times[prompt] + 1
            server.bodies.append(body)
            server.headers.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            time.sleep(server.seconds)
            self.answer(prompt, body, server.fault(prompt, n))
        finally:
            with server.lock:
                server.running -= 1

    def answer(self, prompt, body, fault):
        server, text = self.server, self.server.text(prompt)
        limit = body.get("max_tokens") or body["max_completion_tokens"]
        text, cut = text[: 4 * limit], len(text) > 4 * limit
        tokens = len(prompt) // 4, -(-len(text) // 4)
        reply = dialect(self.path, text, cut, tokens)
        if fault in REPLIES:
            reply = REPLIES[fault](reply)
            server.counted.append(tokens if fault in ("no choices", "no text", "parts", "wrong types") else (0, 0))
            if fault == "no usage":
                server.lost.append(tokens)
            return self.send(200, json.dumps(reply).encode())
        if fault is None:
            server.counted.append(tokens)
            return self.send(200, json.dumps(reply).encode())
        if isinstance(fault, int):
            message = {"error": {"message": f"no, {self.headers['Authorization']} is bad", "type": "error"}}
            more = {"Retry-After": "0.01"} if fault == 429 else {"Location": "http://127.0.0.1:9/"}
            return self.send(fault, json.dumps(message).encode(), **more)
        server.lost.append(tokens)
        data = json.dumps(reply).encode()
        if fault == "cut":
            self.close_connection = True
            self.send(200, data[: len(data) // 2], length=len(data))
        elif fault == "half":
            self.send(200, data[: len(data) // 2])
        elif fault == "html":
            self.send(200, b"<html><body>Welcome to the airport.</body></html>", kind="text/html")
        elif fault == "garbage":
            self.send(200, bytes(range(256)))
        elif fault == "zipped":
            self.send(200, gzip.compress(data + b" " * 100_000), **{"Content-Encoding": "gzip"})
        elif fault == "drips":
            self.close_connection = True
            self.send(200, data[:1], length=len(data))
            for i in range(1, 20):
                self.wfile.write(data[i : i + 1])
                time.sleep(0.05)
        elif fault == "slow":
            time.sleep(1.2)
            self.close_connection = True
        return None

    def send(self, status, data, length=None, kind="application/json", **headers):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(length or len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


REPLIES = {
    "no choices": lambda reply: reply | {"choices": [], "content": []},
    "no text": lambda reply: json.loads(
        re.sub(r'"(text|content)": "[^"]*(\\.[^"]*)*"', r'"\1": null', json.dumps(reply))
    ),
    "wrong types": lambda reply: reply | {"choices": "yes", "content": 3},
    "parts": lambda reply: json.loads(
        re.sub(r'"content": ("[^"]*(\\.[^"]*)*")', r'"content": [{"type": "text", "text": \1}]', json.dumps(reply))
    ),
    "no usage": lambda reply: reply | {"usage": None},
}


def dialect(path, text, cut, tokens):
    """The body of a reply."""
    reason, (asked, told) = ("length" if cut else "stop"), tokens
    if path.endswith("/messages"):
        content, reason = [{"type": "text", "text": text}], "max_tokens" if cut else "end_turn"
        usage = {"input_tokens": asked - 10, "cache_read_input_tokens": 10, "output_tokens": told}
        return {"type": "message", "model": "t-1", "content": content, "stop_reason": reason, "usage": usage}
    usage = {"prompt_tokens": asked, "completion_tokens": told, "prompt_tokens_details": {"cached_tokens": 10}}
    choice = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
    return {"model": "t-1", "choices": [{"index": 0, "finish_reason": reason, **choice}], "usage": usage}


@contextmanager
def serving(*args, **options):
    """A teacher that answers in threads."""
    with Teacher(*args, **options) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["openai", "teachers", "teacher.tasks"])


def started(options):
    """A process that makes instruction data, once what it imports is imported."""
    ready = PROCESSES.Event()
    process = PROCESSES.Process(target=_run, args=(vars(options), ready))
    process.start()
    assert ready.wait(60)
    return process


def _run(options, ready):
    import openai  # noqa: F401  takes seconds

    path = Path(__file__).parent.parent / "recipes" / "self_instruct.py"
    spec = importlib.util.spec_from_file_location("self_instruct", path)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["self_instruct"] = recipe
    spec.loader.exec_module(recipe)
    recipe.WRITE_SECONDS = 0.05
    warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    ready.set()
    with suppress(KeyboardInterrupt):
        recipe.main(recipe.Options(**options))
