"""Training of GPT-2's 124M shape on a GPU: the plain GPT, transformers with its Trainer, and dunes.

    python benchmarks/gpu.py --rounds 3
    python benchmarks/gpu.py --toy --rounds 1      # the same code at toy size, on any machine

T=1024, bfloat16, half a million tokens per step with gradient accumulation, optimizer included. The plain side is
`plain.py` under torch.compile with fused AdamW; ours is compiled, too. Our MFU is relative to the measured rate of
matrix products.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import tyro


@dataclass(frozen=True)
class Work:
    """Model shape, batch shape, and the number of timed steps."""

    vocab: int = 50304
    dim: int = 768
    depth: int = 12
    heads: int = 12
    context: int = 1024
    batch: int = 16
    accumulate: int = 32
    steps: int = 10

    @property
    def tokens(self) -> int:
        return self.batch * self.context * self.accumulate


TOY = Work(vocab=300, dim=64, depth=2, heads=2, context=32, batch=4, accumulate=2, steps=3)


def stream(work: Work, device):
    import torch

    ids = torch.randint(0, work.vocab, (8, work.batch, work.context + 1), device=device)
    while True:
        yield from ids


def timed(step, work: Work) -> dict[str, float]:
    """Tokens/s, after two steps to compile and warm up."""
    import torch

    times = []
    for _ in range(work.steps + 3):
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return {"rate": work.tokens / median(b - a for a, b in pairwise(times[2:]))}


def plain_side(work: Work) -> dict[str, float]:
    from dunes import measure

    import plain
    import torch

    device = measure.device()
    model = plain.GPT(work.vocab, work.dim, work.depth, work.heads, work.context).to(device)
    groups = plain.adamw(model, 6e-4, (0.9, 0.95)).param_groups
    optimizer = torch.optim.AdamW(groups, 6e-4, (0.9, 0.95), fused=True)
    loss, batches = torch.compile(plain.loss_of), stream(work, device)

    def step() -> None:
        for _ in range(work.accumulate):
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(model, next(batches)) / work.accumulate
            value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, work)


def trainer_side(work: Work) -> dict[str, float]:
    from theirs import Watch, step_ends

    sizes = (work.vocab, work.context, work.dim, work.depth, work.heads)
    shape = dict(zip(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), sizes, strict=True))
    times = step_ends(shape, work.batch, work.accumulate, True, Watch(work.steps + 3, 0.0))
    return {"rate": work.tokens / median(b - a for a, b in pairwise(times[2:]))}


def our_side(work: Work) -> dict[str, float]:
    from dunes import measure
    from dunes.models import arcee
    from dunes.models.initialise import initialise
    from dunes.runs.autosize import flops
    from dunes.train import Trainer, muon

    import torch

    device = measure.device()
    config = arcee.Config.from_size(work.vocab, work.dim, work.depth, work.context)
    size = {"heads": work.heads, "kv_heads": work.heads, "head_dim": work.dim // work.heads}
    model = initialise(arcee.build(replace(config, **size))).to(device)
    loss = torch.compile(lambda m, b: m(b[:, :-1], targets=b[:, 1:]))
    trainer = Trainer(model, muon(model), loss, accumulate=work.accumulate, dtype=torch.bfloat16)
    steps = trainer.run(stream(work, device))
    row = timed(lambda: next(steps), work)
    side = 4096 if device.type == "cuda" else work.dim  # a processor without bfloat16 would take minutes
    return row | {"matmul": measure.matmul_rate(torch.bfloat16, device, side), "flops": flops(model, work.context)}


SIDES = {"plain compiled": plain_side, "Trainer": trainer_side, "ours": our_side}


def main(rounds: int = 3, toy: bool = False, side: str = "") -> None:
    """Race.

    Args:
        rounds: Rounds of each side.
        toy: Run at toy size, as a test.
        side: Run only this side once (used internally).
    """
    if side:
        print(json.dumps(SIDES[side](TOY if toy else Work())))
        return
    from sides import interleaved, middle, print_results

    small = ("--toy",) if toy else ()
    rows = interleaved(__file__, {name: ("--side", name, *small) for name in SIDES}, rounds)
    ours = middle(rows["ours"], "rate")
    share = ours * middle(rows["ours"], "flops") / middle(rows["ours"], "matmul")
    print_results(
        "GPT-2's shape, half a million tokens per step" if not toy else "the toy",
        {f"{name}: tokens/s": middle(rows[name], "rate") for name in SIDES}
        | {f"ours over {name}": ours / middle(rows[name], "rate") for name in SIDES if name != "ours"}
        | {"ours: share of the matmul rate": share},
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    tyro.cli(main)
