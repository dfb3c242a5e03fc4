"""Training and decoding speed on a busy machine, by the wait policy of OpenMP threads.

    python benchmarks/busy.py --policies -1 -2 --busy 0 1 2 4 --rounds 3

The load is `--busy` processes that only count. A policy is a value of GOMP_SPINCOUNT, -1 for OpenMP's default, 0
for OMP_WAIT_POLICY=PASSIVE, or -2 for dunes' own (`dunes.cores`). Each measurement is a process; policies
alternate. `fair` is the median time over the time with a fair share of the cores, which is the first policy's time
on the idle machine times max(1, (threads + busy processes) / cores): 1.0 is perfect.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import median

import tyro
from sides import print_results, run

TASKS = ("train", "decode")
VARIABLES = {-2: {}, -1: {"GOMP_SPINCOUNT": "300000"}, 0: {"OMP_WAIT_POLICY": "PASSIVE"}}
"""OpenMP's own count, where there is a core for each thread (libgomp's documentation), and passive waiting."""


@contextmanager
def load(processes: int):
    """So many processes that only count; they end with the block, or with their parent's death after an hour."""
    code = "import time; end = time.time() + 3600\nwhile time.time() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def work(task: str, threads: int, seconds: float) -> dict[str, float]:
    """The median milliseconds of a training step of 0.9M parameters, or of a decoded token of 10M."""
    from dunes import measure
    from dunes.generate import generate
    from dunes.models import arcee
    from dunes.models.initialise import initialise
    from dunes.train import Trainer, muon

    import torch

    measure.keep_freed_memory()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if task == "train":
        model = initialise(arcee.build(arcee.Config.from_size(2048, 128, 3, 512)))
        ids = torch.randint(0, 2048, (8, 513))
        trainer = Trainer(
            model,
            muon(model),
            lambda m, b: m(b[:, :-1], targets=b[:, 1:]),
            dtype=measure.choose_dtype(measure.device()),
        )
        events = (1 for _ in trainer.run(iter(lambda: ids, None)))
    else:
        model = initialise(arcee.build(arcee.Config.from_size(4096, 384, 5, 512)))
        texts = iter(lambda: generate(model, [1] * 16, max_tokens=400, context_length=512), None)
        events = (1 for text in texts for _ in text)
    times, before = [], time.perf_counter()
    end = before + seconds
    for _ in events:
        now = time.perf_counter()
        times.append(now - before)
        before = now
        if now > end and len(times) > 5:
            break
    return {"ms": 1e3 * median(times[2:])}


def measured(task: str, policy: int, threads: int, busy: int, seconds: float) -> float:
    """Milliseconds in a new process with this policy, beside so many busy ones."""
    unset = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    wanted = VARIABLES.get(policy, {"GOMP_SPINCOUNT": str(policy)})
    command = [sys.executable, __file__, "--task", task, "--threads", str(threads), "--seconds", str(seconds)]
    with load(busy):
        return run(command, env=unset | wanted)["ms"]


def main(
    policies: tuple[int, ...] = (-1, -2),
    busy: tuple[int, ...] = (0, 1, 2, 4),
    rounds: int = 3,
    threads: int = 0,
    seconds: float = 5.0,
    tasks: tuple[str, ...] = TASKS,
    task: str = "",
) -> None:
    """Measure.

    Args:
        policies: Spin counts; -1 is OpenMP's own, 0 passive waiting, -2 what dunes does.
        busy: Numbers of other processes; 0 comes first.
        rounds: Rounds of each policy.
        threads: Threads; 0 for those that dunes would choose.
        seconds: Seconds of each measurement.
        tasks: Tasks to measure.
        task: Measure only this once, here (used internally).
    """
    if task:
        print(json.dumps(work(task, threads, seconds)))
        return
    from dunes import measure

    cores, threads = os.cpu_count() or 1, threads or measure.choose_threads()
    figures: dict[str, float] = {}
    for name in tasks:
        for others in busy:
            times: dict[int, list[float]] = {policy: [] for policy in policies}
            for _ in range(rounds):
                for policy, seen in times.items():
                    seen.append(measured(name, policy, threads, others, seconds))
            for policy, seen in times.items():
                figures[f"{name} busy={others} spins={policy}: ms"] = median(seen)
                idle = figures[f"{name} busy={busy[0]} spins={policies[0]}: ms"]
                fair = idle * max(1.0, (threads + others) / cores)
                figures[f"{name} busy={others} spins={policy}: fair"] = median(seen) / fair
                print(f"{name} busy={others} spins={policy}:", [round(s, 1) for s in seen], flush=True)
    print_results("busy", {"threads": threads, "cores": cores} | figures)


if __name__ == "__main__":
    tyro.cli(main)
