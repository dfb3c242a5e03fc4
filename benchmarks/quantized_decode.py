"""Decoding speed of compiled quantized models against bfloat16, the memory's read rate, and llama.cpp.

    python benchmarks/quantized_decode.py --size 10m
    python benchmarks/quantized_decode.py --size 1.1b --threads 2 --kinds bfloat16 int8 int4 --no-peer

Shapes are as in `peers.py`, weights random and rounded to nearest. 64 tokens are decoded after a prompt of 64, as
in `dunes bench decode`, all kinds alternating in one process. `limit` is the highest read rate over the bytes read
per token. llama.cpp gets the same weights as Q8_0 and Q4_0, in a process of its own afterwards, and decodes 64
tokens after a prompt of one, whose time is included.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dunes import checkpoint, measure
from dunes.augment import quantize
from dunes.bench.benchmarks import BENCHMARKS
from dunes.bench.runner import race
from dunes.bench.subject import Setting, Subject
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.parts import Decoder
from dunes.text import Tokenizer

import environments
import peers
import torch
import tyro
from sides import run
from work import Work

Kind = Literal["bfloat16", "int8", "int4", "int4 symmetric", "int3", "nf4"]
KINDS: tuple[Kind, ...] = ("bfloat16", "int8", "int4", "int3", "nf4")
CONTEXT = 128
THEIRS = {"BF16": "bfloat16", "Q8_0": "q8_0", "Q4_0": "q4_0"}


@dataclass(frozen=True)
class Quantized(Subject):
    """A shape with random weights of this kind."""

    kind: str = "bfloat16"

    def model(self, dtype: str = "bfloat16") -> Decoder:
        model = initialise(self.outline()).eval().to(torch.bfloat16)
        if self.kind != "bfloat16":
            kind, *symmetric = self.kind.split()
            quantize(model, kind=kind, **({"symmetric": True} if symmetric else {}))
        return model


def main(
    size: Literal["1.7m", "10m", "40m", "124m", "1.1b"] = "10m",
    kinds: tuple[Kind, ...] = KINDS,
    threads: tuple[int, ...] = (1, 2),
    rounds: int = 5,
    peer: bool = True,
) -> None:
    """Time the kinds.

    Args:
        size: The shape.
        kinds: What the linear layers of the blocks are; the head is bfloat16.
        threads: Numbers of threads.
        rounds: Laps of each kind, of which the median counts.
        peer: Time llama.cpp, too.
    """
    measure.keep_freed_memory()
    config = config_of(peers.SHAPES[size])
    subject = Quantized(size, "llama", CONTEXT, lambda: llama.build(config))
    works = {}
    for kind in kinds:
        works[kind] = BENCHMARKS["decode"].make(replace(subject, kind=kind), Setting(1, CONTEXT, "bfloat16", 1))
        print(f"{kind}: compiled", flush=True)
    figures = {}
    for n in threads:
        laps = race(works, rounds, before=lambda _, n=n: torch.set_num_threads(n))
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for lap in laps:
            seconds[lap.name].append(lap.seconds)
        for kind, work in works.items():
            rate = work.amount / median(seconds[kind])
            read = max(measure.read_rate(measure.device(), int(work.bytes / work.amount), 0.2) for _ in range(3))
            figures[f"{kind}, {n}"] = (rate, read * work.amount / work.bytes)
    del works
    report(figures, threads)
    if peer:
        with tempfile.TemporaryDirectory() as folder:
            figures |= theirs(subject, Path(folder), threads)
        report(figures, threads)
    print(json.dumps({"benchmark": f"quantized decode at {size}", **measure.fingerprint(), "figures": figures}))


def config_of(shape: peers.Shape) -> llama.Config:
    config = llama.Config.from_size(shape.vocab, shape.dim, shape.depth, shape.context)
    kv_heads, hidden = config.heads // shape.kv_groups, shape.hidden or config.hidden
    return replace(config, kv_heads=kv_heads, tied=shape.tied, hidden=hidden)


def theirs(subject: Quantized, folder: Path, threads: Sequence[int]) -> dict[str, tuple[float, None]]:
    """llama.cpp's tokens/s, by form and threads."""
    known = peers.PEERS["llama-cpp-python"]
    python = environments.python_of("llama-cpp-python", known.release, known.requirements)
    checkpoint.save(subject.model().float(), folder / "model", Tokenizer.train("bytes", ()), CONTEXT)
    half = CONTEXT // 2
    empty: dict[str, Any] = {"rows": [], "row_new": 0, "text": "", "text_ids": [], "batches": [], "lr": 0.0}
    empty |= {"betas": (0.0, 0.0), "decay": 0.0, "clip": 0.0}
    prompt = torch.randint(4096, (half,), generator=torch.Generator().manual_seed(0)).tolist()
    figures = {}
    for n in threads:
        work = Work(str(folder / "model"), n, prompt=prompt[:1], new=half, prompts=[prompt], seconds=5.0, **empty)
        (folder / "work.json").write_text(json.dumps(asdict(work)))
        environment = os.environ | {"OMP_NUM_THREADS": str(n), "PYTHONPATH": str(peers.SIDES)}
        for name, setting in THEIRS.items():
            script = str(peers.SIDES / "llama_cpp_python_side.py")
            row = run((str(python), script, str(folder / "work.json"), "decode", setting), env=environment)
            figures[f"llama.cpp {name}, {n}"] = (row["rate"], None)
    return figures


def report(figures: dict[str, Any], threads: Sequence[int]) -> None:
    names = [*dict.fromkeys(name.rpartition(", ")[0] for name in figures)]
    print("| tokens/s (limit) | " + " | ".join(f"{n} thread{'s' * (n > 1)}" for n in threads) + " |")
    print("|---" * (len(threads) + 1) + "|")
    for name in names:
        cells = []
        for n in threads:
            rate, limit = figures[f"{name}, {n}"]
            base = figures.get(f"bfloat16, {n}", (rate, None))[0]
            share = "" if limit is None else f" ({limit:,.4g})"
            cells.append(f"{rate:,.4g}{share}, {rate / base:.2f} times")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    tyro.cli(main)
