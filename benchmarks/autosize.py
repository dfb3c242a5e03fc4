"""The sweep behind `--minutes`: validation loss by size, batch size and context length in a given time.

    python benchmarks/autosize.py --minutes 3 --shapes 2m,16,256,4096 4m,16,256,4096 --out autosize.jsonl

Each shape is first timed alone with all threads, which gives its number of steps in the minutes. Then all shapes
train for that many steps, in parallel with one thread each, since the loss depends only on the steps. Shapes with
results in the file are skipped.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from dunes import measure, tree
from dunes.files.json_file import append_record, read_records
from dunes.progress import Display
from dunes.runs.autosize import with_hardware
from dunes.runs.corpus import Tokens, gather, tokenize
from dunes.runs.task import Run
from dunes.runs.train import prepare
from dunes.runs.train_config import TrainConfig
from dunes.units import plural

import torch
import tyro

OVERHEAD = 20.0
"""Seconds that a run spends outside its steps: reading, tokenizing, validation, saving."""


def load_tokens(config: TrainConfig) -> Tokens:
    with Display() as show:
        return tokenize(config, gather(config), None, show)


def time_step(config: TrainConfig, tokens: Tokens, steps: int = 8) -> tuple[float, int]:
    """The median time of a training step, and the number of parameters."""
    run = prepare(config, Path("."), tokens)
    return median(s.seconds for s in islice(train_steps(run), 2, steps)), tree.count(run.model)


def train_steps(run: Run) -> Any:
    return run.trainer.run(run.task.batches(0))


def train_and_score(config: TrainConfig) -> dict[str, Any]:
    """Train for config.steps, and return the validation loss."""
    measure.keep_freed_memory()
    run = prepare(config, Path("."), load_tokens(config))
    assert config.steps is not None, "set by the caller"
    for _ in islice(train_steps(run), config.steps):
        pass
    score = run.task.score()
    return {"bits_per_byte": score.bits_per_byte, "loss": score.loss}


def run_job(job: str) -> str:
    """Run a job in a new process, and return its line of the output file."""
    done = subprocess.run([sys.executable, __file__, "--job", job], capture_output=True, text=True, check=True)
    return json.dumps(json.loads(job) | json.loads(done.stdout.splitlines()[-1]))


def main(
    minutes: tuple[float, ...] = (3.0,),
    shapes: tuple[str, ...] = ("2m,16,256,4096", "4m,16,256,4096", "8m,16,256,4096"),
    source: str = "stdlib",
    out: Path = Path("autosize.jsonl"),
    job: str | None = None,
) -> None:
    """Sweep.

    Args:
        minutes: Lengths of runs.
        shapes: Parameters, batch size, context length and vocabulary size of each.
        source: The corpus.
        out: Output file, one line per run.
        job: Run only this job (used internally).
    """
    if job is not None:
        request = json.loads(job)
        print(json.dumps(train_and_score(TrainConfig.of(request["plan"]))))
        return
    measure.keep_freed_memory()
    cores = measure.choose_threads()
    base = with_hardware(TrainConfig(sources=(source,), threads=cores))
    tokens_by_vocab = {base.vocab_size: load_tokens(base)}
    finished = {(r["minutes"], r["shape"]) for r in read_records(out, "a run", lambda r: "shape" in r)}
    jobs = []
    for shape in shapes:
        size, batch, context, vocab = shape.split(",")
        config = replace(base, size=size, batch=int(batch), context_length=int(context), vocab_size=int(vocab))
        if config.vocab_size not in tokens_by_vocab:
            tokens_by_vocab[config.vocab_size] = load_tokens(config)
        seconds, parameters = time_step(config, tokens_by_vocab[config.vocab_size])
        rate = config.batch * config.context_length / seconds
        print(f"{shape}: {parameters:,} parameters, {seconds * 1e3:.0f} ms/step, {rate:.0f} tokens/s", flush=True)
        for m in minutes:
            run_config = replace(config, minutes=m, steps=round((m * 60 - OVERHEAD) / seconds), threads=1)
            row = {
                "minutes": m,
                "shape": shape,
                "parameters": parameters,
                "seconds": seconds,
                "plan": asdict(run_config),
            }
            if (m, shape) not in finished:
                jobs.append(json.dumps(row))
    torch.set_num_threads(1)
    with ThreadPoolExecutor(cores) as pool:
        for line in pool.map(run_job, jobs):
            r = json.loads(line)
            append_record(out, r)
            what = f"{plural(r['minutes'], 'minute')}, {r['shape']}: {plural(r['plan']['steps'], 'step')}"
            print(f"{what}, {r['bits_per_byte']:.4f} bits/byte", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
