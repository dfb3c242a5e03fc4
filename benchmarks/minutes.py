"""A scoreboard of training recipes: bits/byte of held-out files after the same minutes, or the same steps.

    python benchmarks/minutes.py OUT --texts python=stdlib zig=~/zls/src --variants "wd0.3=--weight-decay 0.3" \
        "bigram=--parts candidates:bigram" "sqrt=--patch sqrt_decay"

Each run is a `dunes train` of its own with one thread, and its minutes are processor time, so that two may run
side by side and other work on the machine does not change the comparison. With --steps, all runs take the same
steps, and nothing depends on the clock. A variant is NAME=OPTIONS of the command; `--patch NAME` among them first
calls this function of benchmarks/candidates.py, and a `--steps` among them is that of the variant. `default` is
always run. Differences are paired by text and seed; the seed also orders the text. The runs are the rows of
OUT/runs.jsonl; a run that is there is not repeated.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dunes import measure
from dunes.bench.rows import source_commit
from dunes.checkpoint.card import read_card
from dunes.extra import python_command
from dunes.files.json_file import append_record, read_records
from dunes.progress import print_table

import tyro

DEFAULT, ROWS = "default", "runs.jsonl"
CLOCK = """
import threading, queue, concurrent.futures, sys, time
time.monotonic = time.perf_counter = time.process_time
sys.path.insert(0, {folder!r})
import candidates
for name in {patches!r}:
    getattr(candidates, name)()
from dunes.cli.main import main
sys.exit(main())
"""
"""The command, whose minutes are those of the processor, after the patches of a variant."""
QUANTILES = {
    95: (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069),
    99: (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947,
         2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807),
}  # fmt: skip
"""Two-sided quantiles of Student's t for 1, 2, ... degrees of freedom; more degrees use the last value."""


@dataclass(frozen=True)
class Job:
    """A run. `minutes` is None if the number of `steps` limits it."""

    text: str
    source: str
    variant: str
    options: str
    seed: int
    minutes: float | None
    steps: int | None


def train(job: Job, out: Path, common: str) -> dict[str, Any]:
    """Train in a process; returns the row. Raises RuntimeError with the last line of a run that fails."""
    folder = out / f"running-{job.text}-{job.variant}-{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    options, patches = list[str](), list[str]()
    words = iter(shlex.split(f"{common} {job.options}"))
    for word in words:
        if word == "--patch":
            patches.append(next(words))
        else:
            options.append(word)
    length = ["--minutes", f"{job.minutes}"] if job.minutes is not None else ["--steps", f"{job.steps}"]
    length = [] if "--steps" in options else length
    fixed = ["--out", str(folder), "--seed", f"{job.seed}", "--threads", "1", "--quiet", *length]
    code = CLOCK.format(folder=str(Path(__file__).parent), patches=patches)
    command, environment = python_command("-c", code, "train", *shlex.split(job.source), *fixed, *options)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{job.text}, {job.variant}, seed {job.seed}: {last[0]}")
    card = read_card(folder)
    trained, timings = card["trained"], card["timings"]
    shutil.rmtree(folder)
    return {
        **asdict(job),
        "common": common,
        "bits_per_byte": card["measured"]["bits_per_byte"],
        "made_steps": trained["steps"],
        "best_step": trained["best_step"],
        "seconds": trained["seconds"],
        "step_seconds": (timings.get("steps", 0.0) + timings["first step"]) / max(1, trained["steps"]),
        "chosen": {name: trained[name] for name in ("size", "batch", "context_length", "dtype", "dropout")},
        "commit": source_commit(),
        **measure.fingerprint(),
    }


def interval(values: Sequence[float], percent: int = 95) -> tuple[float, float]:
    """The mean, and half the width of Student's interval (infinite for a single value)."""
    if len(values) < 2:
        return mean(values), math.inf
    quantile = QUANTILES[percent][min(len(values) - 1, len(QUANTILES[percent])) - 1]
    return mean(values), quantile * stdev(values) / math.sqrt(len(values))


def jobs(
    texts: Sequence[str], variants: Sequence[str], seeds: Sequence[int], minutes: float, steps: int | None
) -> Iterator[Job]:
    """The runs, by seed, then text, so that an interrupted scoreboard has complete pairs."""
    for seed in seeds:
        for text in texts:
            for variant in (f"{DEFAULT}=", *variants):
                (name, _, source), (title, _, options) = text.partition("="), variant.partition("=")
                yield Job(name, source, title, options, seed, None if steps else minutes, steps)


def print_scoreboard(rows: Sequence[dict[str, Any]], variants: Sequence[str], texts: Sequence[str]) -> None:
    """Print the mean bits/byte, and differences to the default with intervals, by text and of all pairs."""
    default = {(r["text"], r["seed"]): r for r in rows if r["variant"] == DEFAULT}
    lines = []
    for variant in (DEFAULT, *variants):
        own = [r for r in rows if r["variant"] == variant]
        pairs = [(r, default[r["text"], r["seed"]]) for r in own if (r["text"], r["seed"]) in default]
        if not pairs:
            continue
        cells = [variant]
        for name in texts:
            part = [(a["bits_per_byte"], b["bits_per_byte"]) for a, b in pairs if a["text"] == name]
            cells.append(_cell(part, variant == DEFAULT))
        every = [(a["bits_per_byte"], b["bits_per_byte"]) for a, b in pairs]
        cells += [_cell(every, variant == DEFAULT), _cell(every, variant == DEFAULT, 99)]
        lines.append([*cells, f"{mean(b['step_seconds'] / a['step_seconds'] for a, b in pairs):.2f}"])
    columns = ["", *texts, "all, 95 %", "all, 99 %", "steps/s"]
    print_table("bits/byte of the default, and differences to it; less is better", columns, lines)


def _cell(pairs: Sequence[tuple[float, float]], plain: bool, percent: int = 95) -> str:
    if not pairs:
        return ""
    if plain:
        return f"{mean(a for a, _ in pairs):.4f}"
    middle, half = interval([a - b for a, b in pairs], percent)
    return f"{middle:+.4f}" + ("" if math.isinf(half) else f" ± {half:.4f}") + f" ({len(pairs)})"


def main(
    out: tyro.conf.Positional[Path],
    texts: tuple[str, ...] = ("python=stdlib",),
    variants: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1, 2),
    minutes: float = 3.0,
    steps: int | None = None,
    common: str = "--no-complete",
    parallel: int = 2,
) -> None:
    """Compare variants of `dunes train` on texts.

    Args:
        out: Folder of the rows.
        texts: NAME=SOURCE of each text.
        variants: NAME=OPTIONS of each variant.
        seeds: Seeds of the pairs.
        minutes: Processor minutes of each run.
        steps: Steps of each run, instead of minutes.
        common: Options of all runs.
        parallel: Number of runs side by side.
    """
    out.mkdir(parents=True, exist_ok=True)
    wanted = [*jobs(texts, variants, seeds, minutes, steps)]
    key = lambda r: (r["text"], r["variant"], r["options"], r["seed"], r["minutes"], r["steps"], r["common"])
    known = {key(r): r for r in read_records(out / ROWS, "a run", lambda row: "variant" in row)}
    left = [job for job in wanted if key(asdict(job) | {"common": common}) not in known]
    with ThreadPoolExecutor(parallel) as pool:
        for job, future in [(job, pool.submit(train, job, out, common)) for job in left]:
            try:
                row = future.result()
            except RuntimeError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                continue
            append_record(out / ROWS, row)
            known[key(row)] = row
            what = f"{job.text}, {job.variant}, seed {job.seed}: {row['made_steps']} steps"
            print(f"{what}, {row['bits_per_byte']:.4f} bits/byte, {row['seconds']:.0f} s", flush=True)
    rows = [known[k] for job in wanted if (k := key(asdict(job) | {"common": common})) in known]
    print_scoreboard(rows, [v.partition("=")[0] for v in variants], [t.partition("=")[0] for t in texts])
    print(json.dumps({"benchmark": "minutes", "runs": len(rows)}))


if __name__ == "__main__":
    tyro.cli(main)
