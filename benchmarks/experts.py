"""A mixture of experts in both forms, a dense MLP with as many active parameters, and transformers' mixture.

    python benchmarks/experts.py [--threads 1] [--tokens 4096]

Implementations are timed in alternation; the minimum of several rounds counts, for inference and for training.
The last line is JSON. Figures: dunes/ops/experts.py, LOG.md.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dunes.models.mixture import mixture
from dunes.ops import experts as forms
from dunes.parts import GatedMLP, MoE

SHAPES = [(8, 256, 96, 2), (8, 512, 512, 2), (64, 256, 96, 8)]
TOKENS = (1, 16, 256, 1024)


def seconds(works: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """The minimum time of each, timed in alternation."""
    least = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
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
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes, tokens = (SHAPES[:1], TOKENS[:2]) if arguments.quick else (SHAPES, arguments.tokens)
    rows = [row(s, n, d) for d in (torch.float32, torch.bfloat16) for s in shapes for n in tokens]
    for r in rows:
        print("{dtype:9} {experts} x {dim} x {hidden}, {top_k} of them, {tokens} tokens".format(**r))
        for phase in ("inference", "training"):
            print(f"    {phase:10}", r[phase])
    print(json.dumps({"threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()
