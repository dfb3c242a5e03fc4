"""Training tokens/s, optimizer included, of the plain GPT, transformers with its Trainer, and dunes.

    python benchmarks/train.py --sizes 1m 10m 40m --rounds 3

All sides have the same shape (vocabulary 4,096, T=256, width and depth below) and random tokens; each runs at its
fastest batch size, which is determined first. "ours compiled" has the loss of `--compile on`, which runs above
12.5 minutes have by default; compiling is not part of the rate. Ratios are of the faster of our two. MFU is
relative to the measured rate of matrix products, and counts 6 FLOPs per matrix weight and token, and attention's
products.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import tyro

SHAPES = {"1m": (128, 2, 2), "10m": (384, 5, 6), "40m": (768, 5, 12)}
VOCAB, CONTEXT = 4096, 256
BATCHES = {"1m": (8, 16, 32), "10m": (4, 8, 16, 32), "40m": (4, 8, 16, 32)}
SECONDS = 4.0


def batches(batch: int):
    import torch

    ids = torch.randint(0, VOCAB, (8, batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    while True:
        yield from ids


def timed(steps) -> dict[str, float]:
    """The median seconds per step within SECONDS, after three warm-up steps."""
    times: list[float] = []
    start = before = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append(now - before)
        before = now
        if len(times) == 3:
            start = now
        if len(times) >= 6 and now - start > SECONDS:
            break
    return {"seconds": median(times[3:])}


def plain_side(size: str, batch: int) -> dict[str, float]:
    import plain
    import torch

    torch.manual_seed(0)
    dim, depth, heads = SHAPES[size]
    model = plain.GPT(VOCAB, dim, depth, heads, CONTEXT)
    optimizer = plain.adamw(model, 1e-3, (0.9, 0.95))
    return timed(plain.step(model, optimizer, b) for b in batches(batch))


def trainer_side(size: str, batch: int, bf16: bool) -> dict[str, float]:
    from theirs import Watch, step_ends

    dim, depth, heads = SHAPES[size]
    shape = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": dim, "n_layer": depth, "n_head": heads}
    times = step_ends(shape, batch, 1, bf16, Watch(6, SECONDS))
    return {"seconds": median(b - a for a, b in pairwise(times[2:]))}


def our_side(size: str, batch: int, compiled: bool) -> dict[str, float]:
    from dataclasses import replace

    from dunes import measure
    from dunes.models import arcee
    from dunes.models.initialise import initialise
    from dunes.runs.autosize import flops
    from dunes.runs.compiled_loss import compiled_loss
    from dunes.train import Trainer, muon

    import torch

    measure.keep_freed_memory()
    torch.set_num_threads(measure.choose_threads())
    dtype = measure.choose_dtype(measure.device())
    dim, depth, heads = SHAPES[size]
    config = arcee.Config.from_size(VOCAB, dim, depth, CONTEXT)
    model = initialise(arcee.build(replace(config, heads=heads, kv_heads=heads, head_dim=dim // heads)))
    optimizer, timings = muon(model), []
    plain_step = optimizer.step

    def timed_step(closure=None) -> None:
        start = time.perf_counter()
        plain_step(closure)
        timings.append(time.perf_counter() - start)

    optimizer.step = timed_step
    loss = lambda m, b: m(b[:, :-1], targets=b[:, 1:])
    trainer = Trainer(model, optimizer, compiled_loss(loss) if compiled else loss, dtype=dtype)
    trainer.deterministic = compiled
    row = timed(trainer.run(batches(batch)))
    rate = measure.matmul_rate(dtype, measure.device())
    return row | {"optimizer": median(timings[3:]), "matmul": rate, "flops": flops(model, CONTEXT)}


SIDES = {
    "plain float32": plain_side,
    "Trainer float32": lambda size, batch: trainer_side(size, batch, False),
    "Trainer bfloat16": lambda size, batch: trainer_side(size, batch, True),
    "ours": lambda size, batch: our_side(size, batch, False),
    "ours compiled": lambda size, batch: our_side(size, batch, True),
}


def main(sizes: tuple[str, ...] = ("1m", "10m", "40m"), rounds: int = 3, side: str = "", batch: int = 0) -> None:
    """Race.

    Args:
        sizes: 1m, 10m and 40m, or some of them.
        rounds: Rounds of each side at its best batch size.
        side: Run only this side once (used internally).
        batch: Its batch size.
    """
    if side:
        print(json.dumps(SIDES[side](sizes[0], batch)))
        return
    from sides import child, interleaved, print_results

    for size in sizes:
        best = {}
        for name in SIDES:
            rates = {}
            for b in BATCHES[size]:
                rates[b] = b * CONTEXT / child(__file__, arguments(size, name, b))["seconds"]
                if rates[b] < 0.9 * max(rates.values()):
                    break
            best[name] = max(rates, key=rates.__getitem__)
            print(size, name, "batch", best[name], {b: round(r) for b, r in rates.items()}, flush=True)
        rows = interleaved(__file__, {name: arguments(size, name, best[name]) for name in SIDES}, rounds)
        rate = {name: best[name] * CONTEXT / median(r["seconds"] for r in rows[name]) for name in SIDES}
        mine = max(("ours", "ours compiled"), key=rate.__getitem__)
        ours = rows[mine][0]
        matmul = median(r["matmul"] for r in rows[mine])
        print_results(
            f"training at {size}",
            {f"{name}: tokens/s at batch {best[name]}": rate[name] for name in SIDES}
            | {f"ours over {name}": rate[mine] / rate[name] for name in SIDES if not name.startswith("ours")}
            | {
                "matmul rate, TFLOP/s": matmul / 1e12,
                "ours: share of it": rate[mine] * ours["flops"] / matmul,
                "ours: optimizer's share of a step": median(r["optimizer"] / r["seconds"] for r in rows[mine]),
            },
        )


def arguments(size: str, side: str, batch: int) -> tuple[str, ...]:
    return ("--sizes", size, "--side", side, "--batch", str(batch))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    tyro.cli(main)
