"""Speed of a mixture of experts in both forms, a dense MLP with as many active parameters, and transformers' one.

    python benchmarks/experts.py [--threads 1] [--tokens 4096]
    python benchmarks/experts.py --layer [--threads 2] [--seconds 60]   # 4,096 tokens, and litgpt's mixture beside

Implementations are timed in alternation, for inference and for training; the minimum of several rounds counts.
Freed memory stays with the process, as in training. The last line is JSON. Figures: dunes/ops/expert_products.py,
docs/log/mixtures.md.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path

from dunes import measure
from dunes.models.mixtral import mixture
from dunes.ops import expert_products as forms
from dunes.parts import GatedMLP, MoE

import environments
import torch
from peers import PEERS
from torch import Tensor, nn

SHAPES = [(8, 256, 96, 2), (8, 512, 512, 2), (64, 256, 96, 8)]
TOKENS = (1, 16, 256, 1024)
LAYER, LAYER_TOKENS = (8, 512, 512, 2), 4096
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Environment variables with the effect of `measure.keep_freed_memory` on another process."""


def seconds(works: dict[str, Callable[[], object]], rounds: int = 9, limit: float = 0.0) -> dict[str, float]:
    """The minimum time of each, timed in alternation, in so many rounds or until the limit in seconds."""
    least, end, done = dict.fromkeys(works, float("inf")), time.perf_counter() + limit, 0
    while done < rounds or time.perf_counter() < end:
        done += 1
        for name, work in works.items():
            start = time.perf_counter()
            work()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def forward(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def work() -> None:
        with torch.no_grad():
            model(x)

    return work


def training(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def work() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            model(x.float()).float().square().mean().backward()

    return work


def in_form(form: str, work: Callable[[], object]) -> Callable[[], object]:
    def chosen() -> None:
        usual = forms.fits
        forms.fits = lambda x, weights, each: form == "grouped"
        try:
            work()
        finally:
            forms.fits = usual

    return chosen


def theirs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> nn.Module:
    """Mixtral's mixture of transformers with grouped products, which do not know autocast: stored in the dtype."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    names = ("num_local_experts", "hidden_size", "intermediate_size", "num_experts_per_tok")
    config = MixtralConfig(**dict(zip(names, shape, strict=True)), experts_implementation="grouped_mm")
    block: nn.Module = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=shape[1] ** -0.5)
    return block.to(dtype)


def their_training(block: nn.Module, x: Tensor) -> Callable[[], object]:
    def work() -> None:
        block.zero_grad()
        y = block(x[None])
        (y[0] if isinstance(y, tuple) else y).float().square().mean().backward()

    return work


@contextmanager
def litgpt(
    shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, threads: int
) -> Iterator[Callable[[str], Callable[[], object]]]:
    """A function that gives the work of a phase in litgpt's own environment. Raises Unavailable."""
    known = PEERS["litgpt"]
    python = environments.python_of("litgpt", known.release, known.requirements)
    numbers = map(str, (*shape, tokens, str(dtype).removeprefix("torch."), threads))
    script = Path(__file__).parent / "peers" / "litgpt_mixture.py"
    process = subprocess.Popen(
        (str(python), str(script), *numbers),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | KEPT | {"OMP_NUM_THREADS": str(threads)},
    )
    ask, answer = process.stdin, process.stdout
    assert ask is not None
    assert answer is not None

    def work(phase: str) -> None:
        print(phase, file=ask, flush=True)
        if not answer.readline():
            raise RuntimeError("litgpt's side ended")

    try:
        yield lambda phase: lambda: work(phase)
    finally:
        ask.close()
        process.wait()


def layer(dtype: torch.dtype, threads: int, limit: float, alone: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of a forward, and of a forward with backward, at 4,096 tokens, by side.

    All train float32 weights under autocast but transformers, whose products know no autocast.
    """
    experts, dim, hidden, top_k = LAYER
    model = mixture(dim, [GatedMLP(dim, hidden) for _ in range(experts)], top_k)
    dense, x = GatedMLP(dim, hidden * top_k), torch.randn(LAYER_TOKENS, dim, dtype=dtype)
    block, stored = theirs(LAYER, dtype), [deepcopy(m).to(dtype) for m in (dense, model)]
    with ExitStack() as stack:
        others = {} if alone else {"litgpt": stack.enter_context(litgpt(LAYER, LAYER_TOKENS, dtype, threads))}
        trained = {
            "dense": training(dense, x),
            "grouped": in_form("grouped", training(model, x)),
            "plain": in_form("plain", training(model, x)),
            "transformers grouped_mm": their_training(block, x),
        } | {name: work("training") for name, work in others.items()}
        forwards = {
            "dense": forward(stored[0], x),
            "grouped": in_form("grouped", forward(stored[1], x)),
            "plain": in_form("plain", forward(stored[1], x)),
            "transformers grouped_mm": forward(block, x[None]),
        } | {name: work("forward") for name, work in others.items()}
        phases = {"forward": seconds(forwards, 3, limit / 4), "training": seconds(trained, 3, limit * 3 / 4)}
    return {side: {phase: 1e3 * times[side] for phase, times in phases.items()} for side in trained}


def print_layer(dtypes: list[torch.dtype], threads: int, limit: float, alone: bool) -> None:
    """Measure and print a Markdown table for each dtype, and a JSON line."""
    results = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        results[name] = sides = layer(dtype, threads, limit, alone)
        print(f"\n| {name}, --threads {threads} | forward, ms | of dense | with backward, ms | of dense |")
        print("|---|---|---|---|---|")
        for side, times in sides.items():
            cells = [f"{ms:.1f} | {ms / sides['dense'][phase]:.2f}" for phase, ms in times.items()]
            print(f"| {side} | {' | '.join(cells)} |", flush=True)
    print(json.dumps({"benchmark": "experts layer", "threads": threads, **measure.fingerprint(), **results}))


def row(shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype) -> dict[str, object]:
    """Milliseconds of both implementations, and thousands of tokens/s of the mixture and the dense MLP."""
    experts, dim, hidden, top_k = shape
    model: MoE = mixture(dim, [GatedMLP(dim, hidden) for _ in range(experts)], top_k)
    dense, x = GatedMLP(dim, hidden * top_k), torch.randn(tokens, dim, dtype=dtype)
    trained = {f: in_form(f, training(model, x)) for f in ("plain", "grouped")} | {"dense": training(dense, x)}
    trained["transformers"] = their_training(theirs(shape, dtype), x)
    train = seconds(trained)
    model, dense = model.to(dtype), dense.to(dtype)
    forwards = {f: in_form(f, forward(model, x)) for f in ("plain", "grouped")} | {"dense": forward(dense, x)}
    infer = seconds(forwards)

    def figures(times: dict[str, float]) -> dict[str, float]:
        mixed = min(times["plain"], times["grouped"])
        other = {"transformers_ms": round(times["transformers"] * 1e3, 2)} if "transformers" in times else {}
        return other | {
            "plain_ms": round(times["plain"] * 1e3, 2),
            "grouped_ms": round(times["grouped"] * 1e3, 2),
            "moe_ktok_s": round(tokens / mixed / 1e3, 3),
            "dense_ktok_s": round(tokens / times["dense"] / 1e3, 3),
        }

    return {
        "experts": experts,
        "dim": dim,
        "hidden": hidden,
        "top_k": top_k,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "inference": figures(infer),
        "training": figures(train),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--quick", action="store_true", help="one small shape, as a test")
    parser.add_argument("--layer", action="store_true", help="8 x 512 x 512, 2 of them, 4,096 tokens, all sides")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of --layer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --layer, for each dtype")
    parser.add_argument("--without-litgpt", action="store_true", help="--layer without an environment of its own")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measure.keep_freed_memory()
    if arguments.layer:
        dtypes = [getattr(torch, name) for name in arguments.dtypes]
        print_layer(dtypes, arguments.threads, arguments.seconds, arguments.without_litgpt)
        return
    shapes, tokens = (SHAPES[:1], TOKENS[:2]) if arguments.quick else (SHAPES, arguments.tokens)
    rows = [row(s, n, d) for d in (torch.float32, torch.bfloat16) for s in shapes for n in tokens]
    for r in rows:
        print("{dtype:9} {experts} x {dim} x {hidden}, {top_k} of them, {tokens} tokens".format(**r))
        for phase in ("inference", "training"):
            print(f"    {phase:10}", r[phase])
    print(json.dumps({"threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()
