"""Several processes of one run: memory of each rank against its estimate, exchanges, stall per save, step time.

    python benchmarks/ranks.py --size 20m --counts 1 2 4
    python benchmarks/ranks.py --against 1b25ed29

Each count is two real runs of `dunes train` under torchrun, with one thread per process. In the first, freed
memory goes back to the system, so that the memory of a process is that of its tensors; it is compared with the
estimate without the heap's holes. The second keeps freed memory, as runs do, and gives the times. Both validate
after step 2, for copies of the best weights, and save after even steps. An exchange lasts until its end,
and includes waiting for slower ranks; gloo reduces and scatters by an all-reduce. `--against` compares the
processor time of a step in one process, here and at an earlier commit, in alternation.
"""

import atexit
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from scale import received

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "dunes" / "measure"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
CONTEXT = 128
PROFILED = (2, 5)
"""The profile is of the steps after the first number, up to the second, during which nothing is saved."""


STEPS = """
import time
from itertools import repeat
from statistics import median
from dunes import measure
from dunes.bench.subject import of_shape
from dunes.train import Trainer, muon
from dunes.train.loss import next_token_loss
import torch
torch.set_num_threads(1)
measure.keep_freed_memory()
model = of_shape("arcee", 1_000_000).model()
ids = torch.randint(0, 4096, (4, 129), generator=torch.Generator().manual_seed(0))
trainer = Trainer(model, muon(model), next_token_loss)
stream = trainer.run(repeat(ids))
while input() == "time":
    times = [time.process_time() for _, _ in zip(range(21), stream)]
    print(median(b - a for a, b in zip(times, times[1:])), flush=True)
"""


def child(out: Path, trimmed: bool, arguments: list[str]) -> None:
    """`dunes train` with these arguments, which writes its rank's measurements to a file in `out`."""
    from dunes import measure
    from dunes.runs import run, saving, train

    import torch
    from torch.profiler import ProfilerActivity, profile

    row: dict[str, Any] = {"steps": [], "saves": []}
    profiler = profile(activities=[ProfilerActivity.CPU])
    log_step, start, train_loop = run._log_step, saving.Saver.start, run.train_loop

    def logged(folder, step, score) -> None:
        log_step(folder, step, score)
        row["steps"].append(step.seconds)
        saves = step.number % 2 == 0 and (trimmed or step.number > PROFILED[1])
        saving.SAVE_SECONDS = 0.0 if saves else float("inf")
        if not trimmed and step.number in PROFILED:
            (profiler.start if step.number == PROFILED[0] else profiler.stop)()

    def started(saver, training) -> bool:
        before = time.perf_counter()
        done = start(saver, training)
        row["saves"].append(time.perf_counter() - before)
        return done

    def begun(*arguments) -> None:
        row["rate"] = gather_rate()
        train_loop(*arguments)

    def write() -> None:
        events = {} if trimmed else {e.key: (e.cpu_time_total / 1e6, e.count) for e in profiler.key_averages()}
        row["exchanges"] = {kind: events.get(f"gloo:{kind}", (0.0, 0)) for kind in KINDS}
        row["peak"] = measure.peak_memory(torch.device("cpu"))
        (out / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(row))

    run._log_step, saving.Saver.start, run.train_loop = logged, started, begun
    run._check_due, train.TrainTask.sample = lambda step: step == 2, lambda self: ""
    if trimmed:
        measure.keep_freed_memory = lambda: None
    atexit.register(write)
    sys.argv = ["dunes", *arguments]
    from dunes.cli.main import main

    main()


def gather_rate(size: int = 1 << 24, rounds: int = 5) -> float:
    """Bytes/s that this rank receives when all ranks gather a tensor of `size` bytes from each; 0 for one rank."""
    from dunes.measure import ranks

    import torch
    import torch.distributed as dist

    if ranks.count() == 1:
        return 0.0
    own, seconds = torch.zeros(size // 4), []
    every = own.new_empty(ranks.count() * len(own))
    for _ in range(rounds):
        start = time.perf_counter()
        dist.all_gather_into_tensor(every, own)
        seconds.append(time.perf_counter() - start)
    return (ranks.count() - 1) * size / median(seconds)


def train_once(count: int, options: list[str], trimmed: bool) -> list[dict[str, Any]]:
    """The measurements of each rank of one training."""
    from dunes.bench.step_memory import TRIMMING_MALLOC

    with tempfile.TemporaryDirectory(prefix="dunes-ranks-") as folder:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count))
        inner = (__file__, folder, str(int(trimmed)), "train", *options, "--out", f"{folder}/run")
        command = (sys.executable, *(launcher if count > 1 else ()), *inner)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (TRIMMING_MALLOC if trimmed else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def print_times(rows: list[dict[str, Any]], size: float, alone: float) -> float:
    """Print the times of ranks that receive `size` bytes in a step; one process's step takes `alone` seconds.

    If that is 0, the ranks are one process. Returns its seconds.
    """
    (first, last), seconds, rate = PROFILED, rows[0]["steps"], rows[0]["rate"]
    slowed, step = median(seconds[last + 1 :: 2]), median(seconds[last::2])  # saves start after even steps
    blocked, alone = median(rows[0]["saves"]), alone or step
    print(f"  step {step:.2f} s; a save blocks {blocked:.2f} s, and slows the next step by {slowed - step:.2f} s")
    for kind in KINDS:
        spans = [row["exchanges"][kind] for row in rows]
        shares = " to ".join(f"{each(spans)[0] / sum(seconds[first:last]):.1%}" for each in (min, max))
        print(f"  {kind}: {spans[0][1] // (last - first)} a step, {shares} of its time")
    exchange = size / rate if rate else 0.0
    computed = alone / min(len(rows), os.cpu_count() or 1) + exchange
    print(f"  computed: {computed:.2f} s, {exchange:.2f} of it exchange at {rate / 1e9:.2f} GB/s", flush=True)
    return alone


def compare_with(commit: str, rounds: int = 16) -> None:
    """Print the ratio of a step's processor time here to that at the commit, with its 95 % interval."""
    from dunes.bench.compare import hodges_lehmann

    def once(process: subprocess.Popen[str]) -> float:
        process.stdin.write("time\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    with tempfile.TemporaryDirectory(prefix="dunes-ranks-") as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit, "dunes"], capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command, logs = [sys.executable, "-P", "-c", STEPS], []
        trees = [os.environ | {"PYTHONPATH": str(tree)} for tree in (folder, ROOT)]
        sides = [subprocess.Popen(command, cwd=folder, env=tree, **pipes) for tree in trees]
        for number in range(-1, rounds):
            seconds = {side: once(side) for side in (sides if number % 2 else reversed(sides))}
            logs += [math.log(seconds[sides[1]] / seconds[sides[0]])] if number >= 0 else []  # the first warms up
        for side in sides:
            side.communicate("end\n")
    ratio, interval = hodges_lehmann(logs, 0.95)
    print(f"here / {commit}: {math.exp(ratio):.4f}", interval and [round(math.exp(end), 4) for end in interval])


def main(
    size: str = "20m", counts: tuple[int, ...] = (1, 2, 4), batch: int = 4, steps: int = 10, against: str = ""
) -> None:
    """Train a model of this size with each number of processes; `batch` rows are of all processes."""
    from dunes.runs.autosize import architecture_for
    from dunes.runs.memory import Shape, process_memory
    from dunes.runs.train_config import TrainConfig

    shape = ["--size", size, "--batch", str(batch), "--context-length", str(CONTEXT)]
    options = [str(SOURCES), "--no-complete", *shape, "--threads", "1", "--dtype", "float32"]
    config = TrainConfig(sources=(str(SOURCES),), size=size, context_length=CONTEXT, complete=False)
    build, alone = architecture_for(config, config.vocab_size).build, 0.0
    for count in () if against else counts:
        trimmed = train_once(count, [*options, "--steps", "4"], True)
        kept = train_once(count, [*options, "--steps", str(steps)], False)
        parts = process_memory(build, Shape(batch // count, CONTEXT), number=count)
        print(f"\n{count} ranks, MB:", {name: round(part / 1e6) for name, part in parts.items()})
        full = sum(parts.values())
        tensors = full - parts["fragmentation"]
        for rank, pair in enumerate(zip(trimmed, kept, strict=True)):
            less, more = (row["peak"] for row in pair)
            text = f"{less / 1e6:.0f} MB, estimate {tensors / less - 1:+.1%}; memory kept: {more / 1e6:.0f} MB"
            print(f"  rank {rank}: {text}, estimate {full / more - 1:+.1%}")
        alone = print_times(kept, received(build, count), alone)
    if against:
        compare_with(against)


if __name__ == "__main__":
    if sys.argv[3:4] == ["train"]:
        child(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
    else:
        tyro.cli(main)
