"""Wall time of processes: `import torch` alone, `dunes generate` and `dunes complete`, in alternation.

    python benchmarks/start.py --rounds 7

The model has random weights, about 2M parameters, and a BPE vocabulary of 4,096. `complete` gets the beginning of
a module of the standard library, and decodes 48 tokens, its limit, since random weights end no line. The first
round, which fills the page cache and writes bytecode, is not counted. `after import torch` is the median of the
differences within a round.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import tyro
from sides import Row, in_turn, middle, print_results

MODULE = Path(argparse.__file__)
VOCAB, CONTEXT = 4096, 256


def write_model(folder: Path, size: str) -> None:
    """Write a model of about `size` parameters with random weights."""
    from dunes import checkpoint
    from dunes.bench.subject import of_shape
    from dunes.runs.train_config import parse_size
    from dunes.text import Tokenizer

    model = of_shape("arcee", parse_size(size), CONTEXT).model()
    checkpoint.save(model, folder, Tokenizer.train("bpe", [MODULE.read_text()], VOCAB), CONTEXT)


def run_process(arguments: list[str]) -> Row:
    """Run Python to its end, and return the seconds that it took, on the clock and of processors."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": seconds, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main(size: str = "2m", rounds: int = 7, tokens: int = 8) -> None:
    """Measure.

    Args:
        size: Number of parameters.
        rounds: Rounds of each side.
        tokens: Tokens to generate.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "model")
        write_model(Path(folder), size)
        commands = {
            "import torch": ["-c", "import torch"],
            "generate": ["-m", "dunes", "generate", folder, "def main(", "--max-tokens", str(tokens)],
            "complete": ["-m", "dunes", "complete", folder, f"{MODULE}:100:1"],
        }
        rows = in_turn({side: partial(run_process, command) for side, command in commands.items()}, rounds + 1)
    figures = {}
    for key in ("wall", "cpu"):
        alone = [row[key] for row in rows["import torch"][1:]]
        for side, laps in rows.items():
            figures[f"{side}, {key}"] = middle(laps[1:], key)
            if side != "import torch":
                more = [row[key] - other for row, other in zip(laps[1:], alone, strict=True)]
                figures[f"{side} after import torch, {key}"] = median(more)
    print_results("start", figures)


if __name__ == "__main__":
    tyro.cli(main)
