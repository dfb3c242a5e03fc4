"""Decoding speed of the exported C++ program, of Python with the same compiled code, and of llama.cpp.

    python benchmarks/native.py runs/project
    python benchmarks/native.py runs/project --threads 2 --dtypes float16

One text at a time is decoded greedily from one id; the rate is in tokens/s after the first token. All sides have
the same weights, rounded to the same dtype, alternate in one run, and must write equal ids in float32. The model
is a LLaMA in Hugging Face's format, from which the GGUF file is made.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

from dunes import checkpoint, measure
from dunes.checkpoint.formats.cpp import SOURCES, export_native
from dunes.generate import PrefixCache, generate
from dunes.generate.decode_packages import load_step

import environments
import peers
import torch
import tyro
from sides import Row, in_turn, print_results, run
from work import Work

Dtype = Literal["float32", "float16"]
FIRST = 1
EMPTY: dict[str, Any] = {"rows": [], "row_new": 0, "text": "", "text_ids": [], "batches": [], "lr": 0.0}
EMPTY |= {"betas": (0.0, 0.0), "decay": 0.0, "clip": 0.0}


def main(
    model: tyro.conf.Positional[Path],
    dtypes: tuple[Dtype, ...] = ("float32", "float16"),
    threads: tuple[int, ...] = (1,),
    tokens: int = 128,
    rounds: int = 3,
    peer: bool = True,
) -> None:
    """Time the sides.

    Args:
        model: The model's folder.
        dtypes: Of the matrices.
        threads: Numbers of threads.
        tokens: Ids that are written after the first one.
        rounds: Turns of each side, of which the median counts.
        peer: Time llama.cpp, too.
    """
    figures: dict[str, Any] = {}
    measure.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(folder / "build")
        shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("state"))
        for dtype in dtypes:
            for n in threads:
                sides = {
                    "Python": python_side(folder, dtype, tokens, n),
                    "C++": native_side(folder, program, dtype, tokens, n),
                }
                sides |= {"llama.cpp": their_side(folder, dtype, tokens, n)} if peer else {}
                rows = in_turn({f"{side}, {dtype}, {n}": once for side, once in sides.items()}, rounds)
                check(dtype, rows)
                figures |= {side: median(row["rate"] for row in turns) for side, turns in rows.items()}
        figures["MB of the folder's weights"] = (
            sum(f.stat().st_size for f in folder.glob("*/weights.safetensors")) / 1e6
        )
    print_results(f"native program, {model.name}, {tokens} tokens/s", figures | measure.fingerprint())


def check(dtype: Dtype, rows: dict[str, list[Row]]) -> None:
    """All sides wrote the same ids; in float16 llama.cpp rounds more than weights."""
    outputs = {
        side: turns[0]["output"] for side, turns in rows.items() if dtype == "float32" or "llama" not in side
    }
    if len({tuple(ids) for ids in outputs.values()}) > 1:
        raise RuntimeError(f"other ids: {json.dumps(outputs)}")


def build(folder: Path) -> Path:
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", SOURCES, "-B", folder, prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    return folder / "dunes"


def python_side(folder: Path, dtype: Dtype, tokens: int, threads: int) -> Callable[[], Row]:
    loaded = checkpoint.load(folder / "model")
    exported = folder / dtype
    if not exported.exists():
        print(export_native(loaded, exported, getattr(torch, dtype)), flush=True)
    step = load_step(loaded.model, getattr(torch, dtype))

    def once() -> Row:
        torch.set_num_threads(threads)
        cache = PrefixCache(loaded.model, step=step)
        ids, times = [], []
        for token in generate(
            loaded.model, [FIRST], max_tokens=tokens, context_length=loaded.context_length, cache=cache
        ):
            ids.append(token.id)
            times.append(perf_counter())
        return {"rate": (tokens - 1) / (times[-1] - times[0]), "output": ids}

    return once


def native_side(folder: Path, program: Path, dtype: Dtype, tokens: int, threads: int) -> Callable[[], Row]:
    command: Sequence[Any] = [
        program,
        folder / dtype,
        "--ids",
        FIRST,
        "--max-tokens",
        tokens,
        "--threads",
        threads,
        "--time",
    ]

    def once() -> Row:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        rate = re.search(r"([\d.]+) tokens/s", done.stderr)
        assert rate, done.stderr
        return {"rate": float(rate[1]), "output": [int(word) for word in done.stdout.split()]}

    return once


def their_side(folder: Path, dtype: Dtype, tokens: int, threads: int) -> Callable[[], Row]:
    known = peers.PEERS["llama-cpp-python"]
    python = environments.python_of("llama-cpp-python", known.release, known.requirements)
    work = Work(str(folder / "model"), threads, [FIRST], tokens, [[FIRST]], seconds=2.0, **EMPTY)
    (folder / f"work-{threads}.json").write_text(json.dumps(asdict(work)))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(peers.SIDES)}
    command = (
        str(python),
        str(peers.SIDES / "llama_cpp_python_side.py"),
        str(folder / f"work-{threads}.json"),
        "decode",
        dtype,
    )
    return lambda: run(command, env=environment)


if __name__ == "__main__":
    tyro.cli(main)
