"""The sweep behind `--minutes`: which size, batch and context learn a corpus best in so much time.

    python benchmarks/autosize.py --minutes 3 --shapes 2m,16,256,4096 4m,16,256,4096 --out autosize.jsonl

Each shape is first timed alone with all threads; that says how many steps the minutes buy. Then as
many shapes as there are cores train that many steps, one thread each, since what is learned depends
on the steps and not on who else computes. Shapes that are in the file already are left out.
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

import torch
import tyro

from dunes import measure, tree
from dunes.plural import plural
from dunes.runs.autosize import with_hardware
from dunes.runs.corpus import Tokens, gather, tokenize
from dunes.runs.json_lines import append_record, read_records
from dunes.runs.progress import Display
from dunes.runs.run import Run
from dunes.runs.train import prepare
from dunes.runs.train_config import TrainConfig

OVERHEAD = 20.0
"""Seconds of a run that are not steps: reading, tokenizing, checks, the end."""


def tokens_of(config: TrainConfig) -> Tokens:
    with Display() as show:
        return tokenize(config, gather(config), None, show)


def seconds_a_step(config: TrainConfig, tokens: Tokens, steps: int = 8) -> tuple[float, int]:
    """The median time of a training step, and the number of parameters."""
    run = prepare(config, Path("."), tokens)
    return median(s.seconds for s in islice(stepped(run), 2, steps)), tree.count(run.model)


def stepped(run: Run) -> Any:
    return run.trainer.run(run.task.batches(0))


def learned(config: TrainConfig) -> dict[str, Any]:
    """What a run of plan.steps knows of the held-out text."""
    measure.keep_freed_memory()
    run = prepare(config, Path("."), tokens_of(config))
    assert config.steps is not None, "the caller has counted them"
    for _ in islice(stepped(run), config.steps):
        pass
    score = run.score()
    return {"bits_per_byte": score.bits_per_byte, "loss": score.loss}


def one(job: str) -> str:
    """One line of the result file, from a process of its own."""
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
        shapes: Parameters, windows a step, tokens a window, vocabulary.
        source: The corpus.
        out: Where the results go, one line each.
        job: One run, as this program calls itself.
    """
    if job is not None:
        wanted = json.loads(job)
        print(json.dumps(learned(TrainConfig.of(wanted["plan"]))))
        return
    measure.keep_freed_memory()
    cores = measure.choose_threads()
    base = with_hardware(TrainConfig(sources=(source,), threads=cores))
    held = {base.vocab_size: tokens_of(base)}
    known = {(r["minutes"], r["shape"]) for r in read_records(out, "a run", lambda r: "shape" in r)}
    jobs = []
    for shape in shapes:
        size, batch, context, vocab = shape.split(",")
        config = replace(base, size=size, batch=int(batch), context_length=int(context), vocab_size=int(vocab))
        if config.vocab_size not in held:
            held[config.vocab_size] = tokens_of(config)
        seconds, parameters = seconds_a_step(config, held[config.vocab_size])
        rate = config.batch * config.context_length / seconds
        print(
            f"{shape}: {parameters:,} parameters, {seconds * 1e3:.0f} ms a step, {rate:.0f} tokens/s", flush=True
        )
        for m in minutes:
            plan_m = replace(config, minutes=m, steps=round((m * 60 - OVERHEAD) / seconds), threads=1)
            row = {
                "minutes": m,
                "shape": shape,
                "parameters": parameters,
                "seconds": seconds,
                "plan": asdict(plan_m),
            }
            if (m, shape) not in known:
                jobs.append(json.dumps(row))
    torch.set_num_threads(1)
    with ThreadPoolExecutor(cores) as pool:
        for line in pool.map(one, jobs):
            r = json.loads(line)
            append_record(out, r)
            what = f"{plural(r['minutes'], 'minute')}, {r['shape']}: {plural(r['plan']['steps'], 'step')}"
            print(f"{what}, {r['bits_per_byte']:.4f} bits a byte", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
