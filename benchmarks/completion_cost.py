"""Right lines against processor time of a suggestion, on one thread: beams, budgets of the prompt, dtypes.

    python benchmarks/completion_cost.py RUN FILE... [--model MODEL] [--cursors 8] [--widths 1 3]
        [--budgets 256 512 1024] [--dtypes float32 bfloat16 int8]

All variants have the same cursors inside lines of files that were held out, in the order of each file, with only
the text above. The first cursor of a file is cold. int8 are linear layers of a bfloat16 model. With one beam, the
native code of `dunes compile MODEL` is used, if it exists. Intervals resample files; the difference is that to the
first variant, at the same cursors. The memory is the resident one of this process after a variant.
"""

import json
from itertools import product
from pathlib import Path
from time import process_time
from typing import Literal

from dunes import checkpoint, measure
from dunes.augment.changes import decide_change, make_change
from dunes.checkpoint import LoadedModel
from dunes.completion.completer import FolderCompleter
from dunes.completion.fit import file_means, interval
from dunes.completion.keystrokes import CutPoint, cut_points, file_lines
from dunes.completion.search import CompleteOptions
from dunes.completion.text import first_line
from dunes.progress import print_table

import numpy as np
import torch
import tyro

Cursor = tuple[int, str, str, CutPoint]
"""A file's number, its name and text, and a cursor in it."""


def cursors_of(files: tuple[Path, ...], count: int) -> list[Cursor]:
    """At most `count` cursors inside lines of each file, in the order of the file."""
    texts = [(number, path.name, path.read_text()) for number, path in enumerate(files)]
    return [
        (number, name, text, cut)
        for number, name, text in texts
        for cut in sorted(cut_points(name, text, file_lines(text), count=count), key=lambda cut: cut.offset)
        if cut.kind == "character"
    ]


def score(completer: FolderCompleter, cursors: list[Cursor], width: int) -> tuple[list[bool], list[float]]:
    """For each cursor, if the rest of the line is right, and the processor time in milliseconds."""
    right, times = [], []
    for _, name, text, cut in cursors:
        start = process_time()
        suggestion = completer.complete(text[: cut.offset], "", name, CompleteOptions(width=width))
        times.append(1e3 * (process_time() - start))
        right.append(first_line(suggestion.text).rstrip() == cut.rest)
    return right, times


def load(folder: Path, dtype: str) -> LoadedModel:
    """The model with weights of this dtype."""
    loaded = checkpoint.load_with_tokenizer(folder)
    loaded.model.to(torch.float32 if dtype == "float32" else torch.bfloat16)
    if dtype == "int8":
        make_change(loaded.model, decide_change(loaded.model, "quantize", kind=dtype))
    measure.return_freed_memory()
    return loaded


def main(
    run: Path,
    files: tuple[Path, ...],
    model: Path | None = None,
    cursors: int = 8,
    widths: tuple[int, ...] = (3, 1),
    budgets: tuple[int, ...] = (1024, 512, 256),
    dtypes: tuple[Literal["float32", "bfloat16", "int8"], ...] = ("bfloat16",),
) -> None:
    """Measure.

    Args:
        run: A run with an index and a gate.
        files: Files that the run has not seen.
        model: The folder of the weights, if they are not in the run.
        cursors: Cursors in each file.
        widths: Beams.
        budgets: Maximum tokens of a prompt.
        dtypes: Dtypes of the weights.
    """
    torch.set_num_threads(1)
    asked, rows, facts, first = cursors_of(files, cursors), [], {}, None
    numbers = [number for number, *_ in asked]
    for dtype, budget, width in product(dtypes, budgets, widths):
        completer = FolderCompleter(run, loaded=load(model or run, dtype))
        completer.copies, completer.prompt_tokens = False, budget
        right, times = score(completer, asked, width)
        means = file_means(np.array(right, float), numbers)
        first = means if first is None else first
        low, high = np.percentile(times, [50, 95])
        cold = np.mean([times[numbers.index(number)] for number in set(numbers)])
        per_second = 1e3 * sum(right) / sum(times)
        rows.append([
            dtype, str(budget), str(width), interval(means).percent(), interval(means - first).percent("+"),
            f"{100 * np.mean(right):.1f}", f"{low:.0f}/{high:.0f}", f"{cold:.0f}", f"{per_second:.2f}",
            f"{measure.resident_memory() / 1e9:.2f}",
        ])  # fmt: skip
        name = f"{dtype}, {budget} tokens, {width} beams"
        facts[name] = {"right": [int(r) for r in right], "ms": [round(t) for t in times]}
        print(*rows[-1], flush=True)
    columns = [
        "dtype",
        "budget",
        "beams",
        "right %",
        "minus first",
        "of all %",
        "ms p50/p95",
        "cold",
        "right a second",
        "GB",
    ]
    print_table(f"{len(asked)} cursors in {len(files)} files", columns, rows)
    print(json.dumps(facts))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
