"""Several processes of one run: memory of each rank against its estimate, exchanges, stall per save, step time.

    python benchmarks/ranks.py --size 20m --counts 1 2 4
    python benchmarks/ranks.py --table

Each count is two real runs of `dunes train` under torchrun, with one thread per process. In the first, the
allocator returns freed memory to the system, so that the memory of a process is that of its tensors; it is compared
with the estimate less the holes of the heap. The second keeps freed memory, as runs do, and gives times and holes.
Both validate after step 2, for copies of the best weights, and save after even steps. An exchange lasts from its
call to its end, and includes waiting for slower ranks; gloo reduces and scatters by an all-reduce. `--table` is
computed on tensors without data.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import tyro

SOURCES = Path(__file__).parents[1] / "dunes" / "runs"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
PROFILED = (2, 5)
"""The profile is of the steps after the first number, up to the second, during which nothing is saved."""
MODELS = {
    "124M": ("llama", {"vocab": 50_257, "dim": 768, "depth": 12, "heads": 12, "kv_heads": 12, "hidden": 2048}),
    "1B": ("llama", {"vocab": 32_000, "dim": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 8192}),
    "7B": ("llama", {"vocab": 32_000, "dim": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "hidden": 11_008}),
    "8x7B": ("mixtral", {"vocab": 32_000, "dim": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336}),
}
MFU, PEAK, LINK = 0.4, 989e12, 100e9
"""Of the computed times: a share of an H100's bfloat16 FLOP/s, and bytes/s that a rank receives."""


def child(out: Path, trimmed: bool, arguments: list[str]) -> None:
    """`dunes train` with these arguments, which writes its rank's measurements to a file in `out`."""
    from dunes import measure
    from dunes.runs import loop, train

    import torch
    from torch.profiler import ProfilerActivity, profile

    steps: list[dict[str, Any]] = []
    row: dict[str, Any] = {"steps": steps, "saves": []}
    profiler = profile(activities=[ProfilerActivity.CPU])
    log_step, start, train_loop = loop._log_step, loop.Saver.start, loop.train_loop

    def logged(folder, step, score) -> None:
        log_step(folder, step, score)
        steps.append({"seconds": step.seconds, "peak": measure.peak_memory(torch.device("cpu"))})
        saved = step.number % 2 == 0 and (trimmed or step.number > PROFILED[1])
        loop.SAVE_SECONDS = 0.0 if saved else float("inf")
        if not trimmed and step.number in PROFILED:
            (profiler.start if step.number == PROFILED[0] else profiler.stop)()

    def started(saver, run) -> bool:
        before = time.perf_counter()
        done = start(saver, run)
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

    loop._log_step, loop.Saver.start, loop.train_loop = logged, started, begun
    if trimmed:
        measure.keep_freed_memory = lambda: None
    loop._check_due = lambda step: step == 2
    train.TrainTask.sample = lambda self: ""
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


def received(build, count: int) -> float:
    """Bytes that a rank receives in a step: parameters, the sums of gradients, and Muon's matrices and updates.

    A block's parameters are gathered again for the backward pass unless `keeps_gathered`.
    """
    from dunes import tree
    from dunes.measure import ranks
    from dunes.train import muon_split

    import torch

    with torch.device("meta"):
        model = build()
    with ranks.imagined(count):
        blocks = 0 if ranks.keeps_gathered(model) else tree.count(model.blocks)
    named = dict(model.named_parameters())
    hidden = sum(named[name].numel() for name in muon_split(model)["muon"])
    return 4.0 * (count - 1) / count * (2 * tree.count(model) + blocks + 2 * hidden)


def compare(size: str, counts: tuple[int, ...], batch: int, context: int, steps: int) -> None:
    """Print the measurements of each count beside what is computed."""
    from dunes.runs.autosize import architecture_for
    from dunes.runs.memory import Shape, process_memory
    from dunes.runs.train_config import TrainConfig

    shape = ["--size", size, "--batch", str(batch), "--context-length", str(context), "--steps", str(steps)]
    options = [str(SOURCES), "--no-complete", *shape, "--threads", "1", "--dtype", "float32"]
    config = TrainConfig(sources=(str(SOURCES),), size=size, context_length=context, complete=False)
    build, alone = architecture_for(config, config.vocab_size).build, 0.0
    for count in counts:
        trimmed, kept = (train_once(count, options, each) for each in (True, False))
        parts = process_memory(build, Shape(batch // count, context), number=count)
        holes = parts.pop("fragmentation")
        estimate = sum(parts.values())
        print(f"\n{count} ranks: estimate {estimate / 1e6:.0f} MB", {k: round(v / 1e6) for k, v in parts.items()})
        for rank, (one, other) in enumerate(zip(trimmed, kept, strict=True)):
            peak, more = one["peak"], other["peak"]
            text = f"{peak / 1e6:.0f} MB, estimate {estimate / peak - 1:+.1%}; kept {more / 1e6:.0f} MB"
            print(
                f"  rank {rank}: {text}, with {holes / 1e6:.0f} MB of holes {(estimate + holes) / more - 1:+.1%}"
            )
        first, last = PROFILED
        seconds = [step["seconds"] for step in kept[0]["steps"]]
        during, step = seconds[last + 1 :: 2], median(seconds[last::2])  # saves start after even steps
        blocked, slower = median(kept[0]["saves"]), median(during) - step
        print(f"  step {step:.2f} s; a save blocks {blocked:.2f} s, and slows the next step by {slower:.2f} s")
        measured = sum(seconds[first:last])
        for kind in KINDS:
            spans = [row["exchanges"][kind] for row in kept]
            shares = [s / measured for s, _ in spans]
            number = spans[0][1] // (last - first)
            print(f"  {kind}: {number} a step, {min(shares):.1%} to {max(shares):.1%} of its time")
        alone, rate = alone or step, kept[0]["rate"]
        exchange = received(build, count) / rate if rate else 0.0
        computed = alone / min(count, os.cpu_count() or 1) + exchange
        print(f"  computed: {computed:.2f} s, {exchange:.2f} of it exchange at {rate / 1e9:.2f} GB/s")


def print_table(counts: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    """Print the computed memory of a rank with one row, bfloat16 products and checkpointing, and a step's time."""
    from dunes.measure import machine, ranks
    from dunes.models import FAMILIES
    from dunes.runs.autosize import flops, muon_flops
    from dunes.runs.memory import Shape, train_allocations

    import torch

    machine.total_memory = lambda device: 80e9 * ranks.count()  # a GPU for each rank
    print("| model | context | ranks | weights, gradients, optimizer | peak | save, each | step |\n|" + 7 * "---|")
    for name, (family, sizes) in MODELS.items():
        for context in contexts:
            head = sizes["dim"] // sizes["heads"]
            config = FAMILIES[family].Config(**sizes, head_dim=head, context_length=context)
            build = lambda family=family, config=config: FAMILIES[family].build(config)
            with torch.device("meta"):
                model = build()
            work = flops(model, context) * context
            for count in counts:
                log = train_allocations(build, Shape(1, context, torch.bfloat16, True), number=count)
                before = {kind: size for (kind,), size in log.by("kind", moment=0).items()}
                state = 2 * before["parameters"] + before["optimizer"]
                saved = 3 * before["parameters"] + before["optimizer"]
                exchange = received(build, count) / LINK
                seconds = (work + muon_flops(model) / count) / (MFU * PEAK) + exchange
                sizes_gb = " | ".join(f"{size / 1e9:.1f} GB" for size in (state, log.peak, saved))
                print(f"| {name} | {context} | {count} | {sizes_gb} | {seconds:.2f} s ({exchange:.2f}) |")


def main(
    size: str = "20m",
    counts: tuple[int, ...] = (1, 2, 4),
    batch: int = 4,
    context: int = 128,
    steps: int = 10,
    table: bool = False,
    contexts: tuple[int, ...] = (2048,),
) -> None:
    """Measure, or with --table, print the computed table."""
    if table:
        print_table(counts, contexts)
    else:
        compare(size, counts, batch, context, steps)


if __name__ == "__main__":
    if sys.argv[3:4] == ["train"]:
        child(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
    else:
        tyro.cli(main)
