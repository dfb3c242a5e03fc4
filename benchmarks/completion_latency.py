"""Latency of line completion in the engine, without a server, on one thread: a line typed key by key.

    python benchmarks/completion_latency.py RUN FILE... [--keys 200] [--widths 1 3] [--server http://127.0.0.1:8080]

The line is in the middle of a file; the text below the cursor is given, too. A cold request is the first in a
file, with an empty cache; a warm one follows a key. Beside the times are the tokens per row in the first forward
of a key (with one beam including proposed tokens), the tokens in all forwards, and the time that these would take
one by one; they are counted in another pass over the keys. With one beam, the timed pass uses the native code of
`dunes compile RUN`, if it exists.

`--server` is a llama-server with the same weights and one thread: it gets the ids of the text above the cursor and
decodes the rest of the line greedily, with its own cache.

    dunes export RUN model.gguf --to gguf                # a RUN of dunes train --family arcee
    llama-server -m model.gguf -t 1 -tb 1 -c 512 -np 1
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from urllib.request import Request, urlopen

from dunes import measure
from dunes.completion.completer import FolderCompleter
from dunes.completion.keystrokes import file_lines
from dunes.completion.search import LIMIT, CompleteOptions
from dunes.completion.text import near_text, window
from dunes.progress import print_table

import numpy as np
import torch
import tyro
from torch import Tensor, nn


class Evaluated:
    """Counts the tokens that a model evaluates, by forwards: (rows, tokens) of each."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._note)

    def _note(self, model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.shapes.append((arguments[0].shape[0], arguments[0].shape[1]))

    def take(self) -> list[tuple[int, int]]:
        """The shapes since the last call."""
        shapes, self.shapes = self.shapes, []
        return shapes


Complete = Callable[[str, str, str], object]
"""Completes a line, given the texts above and below the cursor and the file's name."""


def typed(complete: Complete, evaluated: Evaluated, path: Path, keys: int) -> dict[str, list[float]]:
    """Times (ms) and evaluated tokens of requests in the middle of a file, the first one cold."""
    text = path.read_text()
    lines = file_lines(text)
    lines = lines[len(lines) // 2 :]
    found: dict[str, list[float]] = {"cold": [], "line": [], "warm": [], "first": [], "all": []}
    for line in lines:
        for column in range(len(line.text)):
            cursor, start = line.start + column, perf_counter()
            complete(text[:cursor], text[line.end :], path.name)
            took, shapes = 1e3 * (perf_counter() - start), evaluated.take()
            if found["cold"]:
                found["warm" if column else "line"].append(took)
                found["first"].append(float(shapes[0][1]) if shapes and column else 0.0)
                found["all"].append(float(sum(np.prod(shape) for shape in shapes)))
            else:
                found["cold"].append(took)
            if len(found["warm"]) >= keys:
                return found
    return found


def ask_server(server: str, completer: FolderCompleter, before: str, after: str, name: str) -> str:
    """The rest of the line by a llama-server, from the ids of the text above."""
    room = completer.loaded.context_length - LIMIT
    ids = [*window(completer.files.tokenize(near_text(before), name).ids, room)]
    body = {"prompt": ids, "n_predict": LIMIT, "stop": ["\n"], "temperature": 0, "cache_prompt": True}
    request = Request(f"{server}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return str(json.load(answer)["content"])


def token_time(completer: FolderCompleter) -> float:
    """Milliseconds of a forward of one token."""
    ids, times = torch.zeros(1, 1, dtype=torch.long), []
    with torch.no_grad():
        for _ in range(50):
            start = perf_counter()
            completer.loaded.model(ids)
            times.append(1e3 * (perf_counter() - start))
    return float(np.median(times))


def main(
    run: Path, files: tuple[Path, ...], keys: int = 200, widths: tuple[int, ...] = (1, 3), server: str = ""
) -> None:
    """Measure.

    Args:
        run: A run that completes lines.
        files: Files to type in.
        keys: Warm requests in each file.
        widths: Beams.
        server: The address of a llama-server with the same weights.
    """
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    rows, facts = [], {}
    for side in [*map(str, widths), *(["llama-server"] if server else [])]:
        found: dict[str, list[float]] = {}
        for path in files:
            one = token_time(FolderCompleter(run))
            for counted in (False, True):  # a model with hooks has no compiled step
                completer = FolderCompleter(run)
                completer.copies = False  # the model is measured, also where a run would only copy
                evaluated = Evaluated(completer.loaded.model if counted else nn.Module())
                if side == "llama-server":
                    complete: Complete = partial(ask_server, server, completer)
                else:
                    complete = partial(completer.complete, options=CompleteOptions(width=int(side)))
                for name, values in typed(complete, evaluated, path, keys).items():
                    if counted is (name in ("first", "all")):
                        found[name] = [*found.get(name, []), *values]
        cold, warm = (np.percentile(found[name], [50, 95]) for name in ("cold", "warm"))
        first, every = np.mean(found["first"]), np.mean(found["all"])
        memory = measure.resident_memory() / 1e6
        ours = [f"{first:.2f}", f"{every:.1f}", f"{every * one:.1f}", f"{memory:.0f}"]
        times = [f"{cold[0]:.1f}/{cold[1]:.1f}", f"{warm[0]:.1f}/{warm[1]:.1f}"]
        rows.append([side, *times, *(ours if side != "llama-server" else "-" * len(ours))])
        facts[side] = {"cold": cold.tolist(), "warm": warm.tolist(), "first": first, "all": every, "MB": memory}
    columns = [
        "beams",
        "cold p50/p95 ms",
        "warm p50/p95 ms",
        "new tokens a key",
        "tokens in all",
        "one by one ms",
        "MB",
    ]
    print_table("One thread, text below the cursor given, but not to a llama-server", columns, rows)
    print(json.dumps({"machine": measure.fingerprint(), "widths": facts}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
