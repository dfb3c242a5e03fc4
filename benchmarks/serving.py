"""The completion server as editors use it: latency over HTTP and in the engine, cancellation, clients, memory.

    python benchmarks/serving.py --run RUN --files FILE... [--keys 200] [--cuts 500] [--minutes 0] [--beside PORTS]

The server is a process of its own with one thread. The same lines are typed key by key through `/infill` and in
the engine, in alternation. At `--cuts` places both complete, and the texts are compared. With `--minutes`, typing
continues for that time, and the server's resident memory is printed. `--beside` are ports of other servers with
the same weights and one thread, which get the same requests in alternation:

    dunes export RUN model.gguf --to gguf                # a RUN of dunes train --family arcee
    llama-server -m model.gguf -t 1 -tb 1 -np 16 -c 8192 --port 8080
    OMP_NUM_THREADS=1 transformers serve RUN --device cpu --continuous-batching --port 8000
"""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter, sleep

from dunes.completion.completer import FolderCompleter
from dunes.completion.keystrokes import file_lines
from dunes.progress import print_table

import numpy as np
import torch
import tyro

CLIENTS = (1, 16, 64)


class Client:
    """A connection to a server that stays open."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """A request's reply."""
        self.connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        reply = self.connection.getresponse()
        content: dict[str, object] = json.loads(reply.read())
        assert reply.status == 200, content
        return content

    def infill(self, before: str, after: str, name: str) -> str:
        """The rest of a line."""
        start = before.rfind("\n") + 1
        body = {"input_prefix": before[:start], "prompt": before[start:], "input_suffix": after, "path": name}
        return str(self.ask("/infill", body)["content"])


def start_server(run: Path) -> tuple[subprocess.Popen[str], int]:
    """A server that shows all suggestions and follows nothing, and its port."""
    command = [sys.executable, "-m", "dunes", "serve", str(run), "--port", "0", "--acceptance", "0", "--no-follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline().split("127.0.0.1:")[1].split()[0])


def type_keys(client: Client, completer: FolderCompleter, path: Path, keys: int) -> dict[str, list[float]]:
    """Milliseconds of each key through HTTP and in the engine, from the middle of a file on."""
    text, found = path.read_text(), dict[str, list[float]]({"http": [], "engine": [], "cold": []})
    lines = file_lines(text)[len(file_lines(text)) // 2 :]
    for line in lines:
        for column in range(len(line.text)):
            before, after = text[: line.start + column], text[line.end :]
            for side in ("http", "engine") if (column % 2) else ("engine", "http"):
                start = perf_counter()
                if side == "http":
                    client.infill(before, after, path.name)
                else:
                    completer.complete(before, after, path.name)
                took = 1e3 * (perf_counter() - start)
                if side == "http" and not found["cold"]:
                    found["cold"].append(took)
                elif column:
                    found[side].append(took)
        if len(found["http"]) >= keys:
            break
    return found


def compare_cuts(client: Client, completer: FolderCompleter, files: list[Path], count: int) -> tuple[int, int]:
    """Numbers of equal suggestions from server and engine, and of compared ones, at `count` random cuts."""
    draw, equal = random.Random(0), 0
    texts = [(path.name, path.read_text()) for path in files]
    for _ in range(count):
        name, text = draw.choice(texts)
        cut = draw.randrange(len(text))
        end = text.find("\n", cut)
        before, after = text[:cut], text[end:] if end >= 0 else ""
        expected = completer.complete(before, after, name)
        shown = "" if len(expected.text) < 3 and not expected.ends_line else expected.text
        equal += client.infill(before, after, name) == shown
    return equal, count


def time_cancel(port: int, client: Client, rounds: int = 20) -> tuple[list[float], list[float]]:
    """Milliseconds from the end of a stream's connection to the answer of another request, and of such a request
    when the model is free."""
    times, alone = [], []
    body = json.dumps({"prompt": "def f(x):\n" * 9, "max_tokens": 4000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(rounds):
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.sendall(head + body)
            stream.recv(1)
            sleep(0.1)
        for found in (times, alone):
            start = perf_counter()
            client.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
            found.append(1e3 * (perf_counter() - start))
    return times, alone


def type_together(
    port: int, path: Path, editors: int = 16, seconds: float = 60.0, every: float = 2.0
) -> list[tuple[float, float]]:
    """Milliseconds of the requests of editors on other lines of a file, each with one every `every` seconds, by
    the second of their start. Each editor has a file of its own, whose first request reads a whole prompt."""
    text, times, begin = path.read_text(), list[tuple[float, float]](), perf_counter()
    lines = [line for line in file_lines(text) if len(line.text) > 4]

    def work(i: int) -> None:
        client, draw = Client(port), random.Random(i)
        for k in range(int(seconds / every)):
            sleep(max(0.0, begin + every * (k + i / editors) - perf_counter()))
            line = lines[(i * len(lines) // editors + k) % len(lines)]
            before, start = text[: line.start + draw.randrange(2, len(line.text))], perf_counter()
            client.infill(before, text[line.end :], f"{i}-{path.name}")
            times.append((start - begin, 1e3 * (perf_counter() - start)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(editors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def serve_many(port: int, count: int, model: str, seconds: float = 10.0) -> float:
    """Tokens/s of so many clients that ask for up to 32 tokens again and again."""
    tokens, end = [0] * count, perf_counter() + seconds

    def work(i: int) -> None:
        client, settings = Client(port), {"model": model, "max_tokens": 32, "temperature": 0}
        while perf_counter() < end:
            usage = client.ask("/v1/completions", {"prompt": f"def task_{i}(", **settings})["usage"]
            assert isinstance(usage, dict)
            tokens[i] += usage["completion_tokens"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(tokens) / (perf_counter() - start)


def resident_megabytes(process: int) -> float:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def time_language_server(run: Path) -> tuple[float, float]:
    """Seconds until a language server has answered `initialize`, and until it has its first suggestion."""

    def message(content: dict[str, object]) -> bytes:
        data = json.dumps({"jsonrpc": "2.0", **content}).encode()
        return b"Content-Length: %d\r\n\r\n" % len(data) + data

    start = perf_counter()
    command = [sys.executable, "-m", "dunes", "lsp", str(run), "--acceptance", "0", "--no-follow"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    send = lambda content: (process.stdin.write(message(content)), process.stdin.flush())

    def receive() -> dict[str, object]:
        length = 0
        while line := process.stdout.readline().strip():
            if line.lower().startswith(b"content-length"):
                length = int(line.split(b":")[1])
        content: dict[str, object] = json.loads(process.stdout.read(length))
        return content

    send({"id": 1, "method": "initialize", "params": {"capabilities": {}}})
    receive()
    initialized = perf_counter() - start
    send({"method": "initialized", "params": {}})
    document = {"uri": "file:///x.py", "languageId": "python", "version": 1, "text": "def main():\n    retu"}
    send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
    where = {"textDocument": {"uri": "file:///x.py"}, "position": {"line": 1, "character": 8}}
    number = 1
    while True:
        number += 1
        send({"id": number, "method": "textDocument/completion", "params": where})
        reply = receive()
        while reply.get("id") != number:
            reply = receive()
        result = reply.get("result")
        if isinstance(result, dict) and result.get("items"):
            break
        sleep(0.05)
    ready = perf_counter() - start
    process.kill()
    process.wait()
    return initialized, ready


def main(
    run: Path,
    files: tuple[Path, ...],
    keys: int = 200,
    cuts: int = 500,
    minutes: float = 0.0,
    beside: tuple[int, ...] = (),
) -> None:
    """Measure.

    Args:
        run: A run that completes lines.
        files: Files to type in.
        keys: Keys typed in each file.
        cuts: Cursors at which both ways are compared.
        minutes: Type for so long at the end, and print the server's memory.
        beside: Ports of other servers with the same weights.
    """
    torch.set_num_threads(1)
    language = [time_language_server(run) for _ in range(3)]
    process, port = start_server(run)
    client, completer = Client(port), FolderCompleter(run)
    found: dict[str, list[float]] = {"http": [], "engine": [], "cold": []}
    for path in files:
        completer = FolderCompleter(run)
        for side, times in type_keys(client, completer, path, keys).items():
            found[side] += times
    rows = [
        [side, *(f"{value:.1f}" for value in np.percentile(times, [50, 95])), str(len(times))]
        for side, times in found.items()
    ]
    print_table("Milliseconds of a key, one thread", ["way", "p50", "p95", "keys"], rows)
    equal, count = compare_cuts(client, completer, [*files], cuts)
    print(f"the same suggestion through HTTP and in the engine: {equal} of {count} cuts")
    cancelled, alone = time_cancel(port, client)
    print(f"a request after a closed stream: p50 {np.median(cancelled):.0f} ms, at most {max(cancelled):.0f} ms")
    print(f"the same request when the model is free: p50 {np.median(alone):.0f} ms")
    together = type_together(port, files[0])
    for first in (0, 20):
        median, most = np.percentile([time for second, time in together if second >= first], [50, 95])
        print(f"sixteen editors, a request each every two seconds, from second {first} on: ", end="")
        print(f"p50 {median:.0f} ms, p95 {most:.0f} ms")
    print(f"resident memory of the server: {resident_megabytes(process.pid):.0f} MB")
    rates = [[f"{serve_many(each, n, str(run)):.0f}" for n in CLIENTS] for each in (port, *beside)]
    rows = [[name, *row] for name, row in zip(["dunes", *map(str, beside)], rates, strict=True)]
    print_table("Tokens/s", ["server", *(f"clients: {n}" for n in CLIENTS)], rows)
    initialized, ready = np.min(language, axis=0)
    print(f"language server: initialize {initialized:.2f} s, first suggestion {ready:.1f} s")
    print(f"resident memory of the server: {resident_megabytes(process.pid):.0f} MB")
    print(f"load of this machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    end = perf_counter() + 60 * minutes
    while perf_counter() < end:
        for path in files:
            type_keys(client, completer, path, keys)
        print(
            f"{(end - perf_counter()) / 60:.1f} minutes left: {resident_megabytes(process.pid):.1f} MB", flush=True
        )
    process.terminate()
    process.wait()


if __name__ == "__main__":
    tyro.cli(main)
