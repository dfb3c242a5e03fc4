"""The scenarios of `oracle.py` under one checkout, in one process with one thread, which forks for each command.

They use the command, HTTP, LSP and a few names of the library, which are imported where they are used.
"""

import ast
import http.client
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import format_exc
from typing import Any, get_args

from oracle import TABLE, Record, described, described_file, digest, masked

FORK = multiprocessing.get_context("fork")
RUN = "train-lines"  # completes lines


class Side:
    """One checkout, in whose process this runs. `folder` is empty at the start, and is the same for both."""

    def __init__(self, folder: Path, kills: int, templates: str | None) -> None:
        from dunes.flags import Family

        self.folder, self.kills, self.templates, self.done = folder, kills, templates, dict[str, Record]()
        self.commands = {f"train-{name}": f"TRAIN --no-complete --family {name}" for name in get_args(Family)}
        self.commands |= {f"finetune-{name}": f"TUNE --method {name} --rank 4" for name in TABLE["methods"]}
        self.commands |= TABLE["commands"]
        files = {f"code/{name}.py": source_text(name)[:6000] for name in TABLE["modules"]}
        for i in range(16):
            define = lambda j, i=i: f"def task_{i}_{j}(value, limit={j}):\n    return value * {i + j} + limit\n"
            files[f"code/module_{i}.py"] = "\n".join(map(define, range(12)))
        for name, row in TABLE["examples"].items():
            files[f"{name}.jsonl"] = "".join(row.replace("NUMBER", str(i)) + "\n" for i in range(120))
        (folder / "code").mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)

    def fork(self, work: Callable[[], object], streams: Sequence[int] = ()) -> Any:
        """Start a process that calls a function; its first streams are these."""

        def run() -> None:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            sys.stdin = os.fdopen(0, closefd=False)
            work()

        process = FORK.Process(target=run, daemon=bool(streams))  # ends with this process, and starts no others
        process.start()
        return process

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of a function in another process, as JSON."""
        with tempfile.NamedTemporaryFile() as file:
            process = self.fork(lambda: Path(file.name).write_text(json.dumps(work())))
            process.join()
            assert process.exitcode == 0, f"{work} ended with status {process.exitcode}"
            return json.loads(Path(file.name).read_text())

    def start(self, words: Sequence[object], streams: Sequence[int] = ()) -> Any:
        """Start `dunes`. It does not measure changed models, which takes half of the time."""

        def command() -> None:
            from dunes.cli.main import main

            if words[0] == "augment":
                subprocess.run = lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "left out")  # type: ignore
            os.environ["DUNES_HOME"] += "-exports" * (words[0] == "export")  # else its code is used
            sys.argv = ["dunes", *map(str, words)]
            main()

        with open(os.devnull, "r+b") as nothing:
            return self.fork(command, streams or [nothing.fileno()] * 3)

    def dunes(self, words: Sequence[object]) -> Record:
        """What a command prints, and its status."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = self.start(words, (out.fileno(), out.fileno(), errors.fileno()))
            process.join()
            printed = [masked(os.pread(f.fileno(), 1 << 24, 0).decode()) for f in (out, errors)]
        return {"status": process.exitcode, "out": printed[0], "err": printed[1]}

    def words(self, name: str, out: str = "") -> list[str]:
        """The words of a command of the table; the commands whose output it reads are run before."""
        text = self.commands[name].replace("TRAIN", TABLE["train"]).replace("TUNE", TABLE["tune"])
        path = lambda match: str(self.path(match[1]) if match[1] else self.folder / (out or name))
        return [re.sub(r"@([\w-]*)", path, word) for word in shlex.split(text)]

    def path(self, name: str) -> Path:
        """The output of a command, which is run first, or an input. A suffix may be left out."""
        for known in (known for known in self.commands if known.partition(".")[0] == name):
            self.run(known)
        return self.folder / name

    def run(self, name: str) -> Record:
        """What a command of the table prints and writes, and what the written model computes."""
        if name not in self.done:
            out, record = self.folder / name, self.dunes(self.words(name))
            if record["status"] != (2 if name.startswith("wrong") else 0):
                record |= {"failed": f"status {record['status']}: {record['err'][-4:]}"}
            elif out.exists():
                is_model = name not in TABLE["outputs"]
                record |= {"files": described(out), "model": is_model and self.call(partial(computed, out))}
            self.done[name] = record
        return self.done[name]

    @contextmanager
    def server(self, model: object) -> Iterator[int]:
        """The port of a server."""
        with (self.folder / "server.txt").open("w+b") as log:
            words = ("serve", model, "--port", 0, "--acceptance", 0)
            process = self.start(words, (log.fileno(),) * 3)
            find = lambda: int(re.findall(rb"127\.0\.0\.1:(\d+)", os.pread(log.fileno(), 9999, 0))[0])
            try:
                yield wait(find, process)
            finally:
                process.terminate()
                process.join()


def source_text(module: str) -> str:
    return Path(importlib.import_module(module).__file__ or "").read_text()


def wait(value: Callable[[], Any], process: Any) -> Any:
    """The first value of a function that neither raises nor is false."""
    while process.is_alive():
        with suppress(LookupError, OSError, ValueError):
            if result := value():
                return result
        time.sleep(0.002)
    raise ValueError(f"a process ended early with status {process.exitcode}")


def computed(folder: Path) -> Record:
    """Greedy ids of a model with their log-probabilities, and the digest of its logits."""
    from dunes import checkpoint
    from dunes.generate import generate, sampler

    import torch

    m = checkpoint.load(folder)
    ids = m.tokenizer.prompt("def task_3(value, limit=4):\n    return")
    greedy = generate(m.model, ids, max_tokens=20, context_length=m.context_length, sample=sampler(0.0))
    with torch.no_grad():
        tokens = [(token.id, float(token.logprob).hex()) for token in greedy]
        logits = m.model(torch.tensor([ids])).float()
    return {"prompt": ids, "greedy": tokens, "first": logits[0, -1, :4].tolist(), "logits": digest(logits.numpy())}


def commands(scenario: str, side: Side) -> Record:
    """The commands of the table whose names begin with these words."""
    return {name: side.run(name) for name in side.commands if f"{name}-".startswith(f"{scenario}-")}


def help_texts(side: Side) -> Record:
    return {verb: side.dunes([*verb.split(), "-h"]) for verb in TABLE["help"]}


def templates(side: Side) -> Record:
    """Ids and masks of conversations by chat templates: of --templates, else those that the tests made up."""
    source = Path(side.templates or Path(__file__).parents[1] / "tests" / "test_chat_template.py")
    if source.suffix == ".py":
        assigned = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.Assign)]
        sources = next(ast.literal_eval(n.value) for n in assigned if ast.unparse(n.targets[0]) == "TEMPLATES")
    elif source.is_dir():
        sources = {f.name: f.read_text() for f in sorted(source.rglob("*.jinja"))}
    else:
        with tarfile.open(source) as archive:
            files = [(Path(m.name).name, archive.extractfile(m)) for m in archive if m.name.endswith(".jinja")]
            sources = {name: file.read().decode() for name, file in sorted(files) if file}
    place = side.folder / "templates"
    return side.call(lambda: {name: encoded(text, place / name) for name, text in sources.items()})


def encoded(source: str, folder: Path) -> Record:
    from dunes.text import Tokenizer
    from dunes.text.templates import Turn, encode_segments, find_template

    tokenizer, record = Tokenizer.train("bytes", []), {}
    tokenizer.inner.add_special_tokens(sorted({"<s>", "</s>", *re.findall(TABLE["mark"], source)}))
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(source)
    for first, last in ((1, 2), (0, 2), (1, 3), (0, 5)):
        turns = tuple(Turn(role, text) for role, text in TABLE["turns"][first:last])
        try:
            template = find_template(tokenizer := Tokenizer.load(folder), {})
            ids, mask = encode_segments(template.render(turns, last == 2), tokenizer)
            record[f"{first}:{last}"] = [ids, "".join(str(int(is_trained)) for is_trained in mask)]
        except ValueError as error:
            record[f"{first}:{last}"] = str(error)
    return record


def ask(port: int, path: str, body: str | None = None, **headers: str) -> Record:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST" if body else "GET", path, body and body.encode(), headers)
    reply = connection.getresponse()
    fields = [field for field in reply.getheaders() if field[0].lower() not in ("date", "content-length")]
    return {"status": reply.status, "headers": fields, "lines": masked(reply.read().decode())}


def replies(side: Side) -> Record:
    """Replies of servers of a completing and of a chatting model to requests of each protocol, also wrong ones."""
    record: Record = {}
    for model in (RUN, "finetune-chats"):
        with side.server(side.path(model)) as port:
            record[model] = {request: ask(port, *request.split(" ", 1)) for request in TABLE["requests"]}
            record[model]["foreign"] = ask(port, "/health", Origin="http://example.com")
            record[model]["doctor"] = side.dunes(["doctor", f"http://127.0.0.1:{port}"])
    return record


def completions(side: Side) -> Record:
    """200 completions of a server at places in known and unknown files."""
    draw, record = random.Random(0), {}
    texts = [source_text("colorsys"), source_text("stat")]
    texts += [file.read_text() for file in sorted((side.folder / "code").iterdir())]
    with side.server(side.path(RUN)) as port:
        for i in range(200):
            cut = draw.randrange(200, len(text := draw.choice(texts)))
            line = text.rfind("\n", 0, cut) + 1
            before, prompt, after = text[:line][-2000:], text[line:cut], text[cut:][:500]
            body = json.dumps({"input_prefix": before, "prompt": prompt, "input_suffix": after})
            record[f"{i} {prompt!r}"] = ask(port, "/infill", body)["lines"]
    return record


def language_server(side: Side) -> Record:
    (reader, out), (into, writer), run = os.pipe(), os.pipe(), side.path(RUN)
    with (side.folder / "lsp.txt").open("wb") as errors:
        process, record = side.start(("lsp", run), (into, out, errors.fileno())), Record()
    os.close(into), os.close(out)
    with open(reader, "rb") as messages, open(writer, "wb", 0) as requests:
        for number, (method, params) in enumerate(TABLE["lsp"]):
            asks = method not in ("initialized", "exit") and "/did" not in method
            content = {"jsonrpc": "2.0", "method": method, "params": params} | ({"id": number} if asks else {})
            requests.write(b"Content-Length: %d\r\n\r\n%s" % (len(data := json.dumps(content).encode()), data))
            said = record[f"{number} {method}"] = []
            while asks and not (said and said[-1].get("id") == number):
                head = b"".join(iter(messages.readline, b"\r\n"))
                said.append(json.loads(messages.read(int(head.lower().partition(b"length:")[2].split()[0]))))
    process.join()
    return record | {"status": process.exitcode, "errors": masked((side.folder / "lsp.txt").read_text())}


def resumed(side: Side) -> Record:
    """Runs that are killed after a save or interrupted, and resumed, end as the straight run does."""
    record: Record = {}
    for name in ("resume-train", "resume-finetune"):
        record[name] = outcome(side.path(name))
        for number in (signal.SIGKILL, signal.SIGINT):
            out = side.folder / f"{name}-{number.name}"
            process = side.start(side.words(name, out.name))
            wait(lambda out=out: (out / "metrics.jsonl").read_text().count("\n") > 30, process)
            if number == signal.SIGKILL:
                os.kill(process.pid, signal.SIGUSR1)  # saves
                wait(lambda out=out: [*out.glob("state/step-*/manifest.json")], process)
            os.kill(process.pid, number)
            process.join()
            assert process.exitcode != 0, f"{out} ended too early; more steps are needed"
            side.dunes([name.partition("-")[2], "--resume", "--out", out, "--quiet"])
            other = [key for key, value in outcome(out).items() if value != record[name].get(key)]
            assert not other, f"{out}, which ended with {process.exitcode}: {other[:5]} differ"
    return record


def outcome(run: Path) -> Record:
    """The last loss of each step of a run, in hexadecimal, and its tensors."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {str(row["step"]): row["loss_hex"] for row in rows if "loss_hex" in row}
    return losses | {file.name: described_file(file) for file in sorted(run.glob("*.safetensors"))}


def killed(side: Side) -> Record:
    """Models are saved in place of each other; saves that are killed leave the old or the new one."""
    return side.call(partial(kill_saves, side, [side.path("train-llama"), side.path("train-gpt2")]))


def kill_saves(side: Side, folders: Sequence[Path]) -> Record:
    from dunes import checkpoint

    def save(i: int) -> None:
        checkpoint.save(models[i].model, out, models[i].tokenizer, models[i].context_length)

    models, out, draw = [checkpoint.load(folder) for folder in folders], side.folder / "killed", random.Random(0)
    whole, seconds, present, is_new = [Record(), Record()], [], 0, set()
    for i in (0, 1, 0):
        start, process = time.monotonic(), side.fork(partial(save, i))
        process.join()
        seconds.append(time.monotonic() - start)
        whole[i] = described(out)
    for _ in range(side.kills):
        process = side.fork(partial(save, 1 - present))
        process.join(draw.uniform(0, 1.5) * min(seconds))
        process.kill()
        process.join()
        checkpoint.load(out)  # ends a save that was cut
        found = described(out)
        other = [[key for key in found.keys() | each if found.get(key) != each.get(key)] for each in whole]
        assert [] in other, f"{out} is neither the old nor the new model: {other} differ"
        is_new.add(other.index([]) != present)
        present = other.index([])
    save(0)
    left = sorted(path.name for path in side.folder.glob(".*"))
    return {"kills": side.kills, "old and new": len(is_new), "whole": whole, "left": left}


SCENARIOS = {"help": help_texts, "templates": templates, "http": replies, "completions": completions}
SCENARIOS |= {"lsp": language_server, "resume": resumed, "kills": killed}


def main(results: str, names: str, options: str) -> None:
    """Run scenarios in this process, and write the record of each into a file."""
    import dunes

    assert dunes.__file__.startswith(os.environ["ORACLE_CHECKOUT"]), dunes.__file__
    for module in (*TABLE["preloaded"], *(f"dunes.{room}" for room in dir(dunes) if "_" not in room)):
        importlib.import_module(module)
    settings = json.loads(options)
    side = Side(Path(settings["folder"]), settings["kills"], settings["templates"])
    for name in names.split():
        start = sum(os.times()[:4])
        try:
            record = SCENARIOS.get(name, partial(commands, name))(side) or {"failed": "no such scenario"}
        except Exception as error:
            record = {"failed": f"{type(error).__name__}: {error}"[:2000], "traceback": format_exc()}
        Path(results, f"{name}.json").write_text(json.dumps(record))
        print(f"{name:12} {sum(os.times()[:4]) - start:6.1f} s of processor time", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
