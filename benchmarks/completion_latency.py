"""Latency of completion in the engine alone, one thread: a line typed in the middle of a file, key by key.

    python benchmarks/completion_latency.py RUN FILE... [--keys 200] [--widths 1 3]

Cold is the first request in a file, with a cache that is empty; warm is one after a key. The text below the cursor
is given, too. Beside the times: the tokens that a row evaluates in the first forward of a key (with one beam also
those that are proposed), those in all, and what so many would take one by one at the time of a forward of one.
With a step that `dunes compile RUN` keeps, greedy decoding (width 1) uses it.
"""

import json
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from dunes import measure
from dunes.runs.completion.completer import FolderCompleter, load_completer
from dunes.runs.completion.cuts import file_lines
from dunes.runs.completion.engine import CompleteOptions
from dunes.tables import print_table


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


def typed(completer: FolderCompleter, path: Path, keys: int, options: CompleteOptions) -> dict[str, list[float]]:
    """Times (ms) and evaluated tokens of requests in the middle of a file, the first one cold."""
    text, evaluated = path.read_text(), Evaluated(completer.loaded.model)
    lines = file_lines(text)
    lines = lines[len(lines) // 2 :]
    found: dict[str, list[float]] = {"cold": [], "warm": [], "first": [], "all": []}
    for line in lines:
        for column in range(len(line.text)):
            cursor, start = line.start + column, perf_counter()
            completer.complete(text[:cursor], text[line.end :], path.name, options)
            took, shapes = 1e3 * (perf_counter() - start), evaluated.take()
            if found["cold"]:
                found["warm" if column else "line"] = [*found.get("warm" if column else "line", []), took]
                found["first"].append(float(shapes[0][1]) if shapes and column else 0.0)
                found["all"].append(float(sum(np.prod(shape) for shape in shapes)))
            else:
                found["cold"].append(took)
            if len(found["warm"]) >= keys:
                return found
    return found


def token_time(completer: FolderCompleter) -> float:
    """Milliseconds of a forward of one token."""
    ids, times = torch.zeros(1, 1, dtype=torch.long), []
    with torch.no_grad():
        for _ in range(50):
            start = perf_counter()
            completer.loaded.model(ids)
            times.append(1e3 * (perf_counter() - start))
    return float(np.median(times))


def main(run: Path, files: tuple[Path, ...], keys: int = 200, widths: tuple[int, ...] = (1, 3)) -> None:
    """Measure.

    Args:
        run: A run that completes lines.
        files: Files to type in.
        keys: Warm requests in each file.
        widths: Beams.
    """
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    rows, facts = [], {}
    for width in widths:
        found: dict[str, list[float]] = {}
        for path in files:
            completer = load_completer(run)
            one = token_time(completer)
            for name, values in typed(completer, path, keys, CompleteOptions(width=width)).items():
                found[name] = [*found.get(name, []), *values]
        cold, warm = (np.percentile(found[name], [50, 95]) for name in ("cold", "warm"))
        first, every = np.mean(found["first"]), np.mean(found["all"])
        memory = measure.resident_memory() / 1e6
        rows.append(
            [
                str(width),
                f"{cold[0]:.1f}/{cold[1]:.1f}",
                f"{warm[0]:.1f}/{warm[1]:.1f}",
                f"{first:.2f}",
                f"{every:.1f}",
                f"{every * one:.1f}",
                f"{memory:.0f}",
            ]
        )
        facts[width] = {"cold": cold.tolist(), "warm": warm.tolist(), "first": first, "all": every, "MB": memory}
    columns = [
        "width",
        "cold p50/p95 ms",
        "warm p50/p95 ms",
        "new tokens a key",
        "tokens in all",
        "one by one ms",
        "MB",
    ]
    print_table("One thread, text below the cursor given", columns, rows)
    print(json.dumps({"machine": measure.fingerprint(), "widths": facts}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
