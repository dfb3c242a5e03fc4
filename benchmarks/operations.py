"""Times of dunes' operations against their plain forms, eager, forward and backward, in models of 10M and 124M.

    python benchmarks/operations.py [--models 10m 124m] [--threads 1 2] [--seconds 0.3] [--picture FILE.svg]

`float32` is plain training, `bfloat16` training under autocast, with weights and hidden states in float32 and
results of matrix products in bfloat16. int8 layers and Gram matrices have no backward. The two forms of a row
alternate; times are medians. An operation pays if the ratio is below one. The defaults take less than three
minutes.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from dunes import measure
from dunes.ops import cross_entropy, float32_products, gated, int_linear, low_rank, rms_norm, rotary
from dunes.ops import expert_products as experts
from dunes.ops import scaled_dot_product as attention
from dunes.parts import GatedMLP, MoE
from dunes.progress import print_table
from dunes.units import format_seconds

import torch
import tyro
from torch import Tensor, nn

# Shapes: B batch, T tokens, N = B * T, D width, H hidden width, V vocabulary.
HEAD, RANK, EXPERTS, FEW = 64, 16, 8, 4
Form = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a batch."""

    width: int
    hidden: int
    vocab: int
    batch: int
    tokens: int = 256

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


SHAPES = {
    "10m": Shape(384, 1024, 4096, 8),
    "124m": Shape(768, 2048, 32_000, 2),
    "toy": Shape(64, 32, 50, 2, 64),
}


@dataclass(frozen=True)
class Case:
    """Both forms of an operation, and what they are differentiated by."""

    name: str
    fused: Form
    plain: Form
    inputs: Sequence[Tensor]


def cases(s: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of all operations; `dtype` is the dtype of matrix products."""
    heads = s.width // HEAD
    q, k, v = (_leaf(s.batch, heads, s.tokens, HEAD, dtype=dtype) for _ in range(3))
    wide, states = _leaf(s.rows, s.width), _leaf(s.rows, s.width, dtype=dtype)
    yield Case("attention", attention.attend, attention.plain, [q, k, v])
    yield _documents(s, heads, dtype)
    angles = torch.randn(s.batch, 1, s.tokens, HEAD // 2)
    turned = [(lambda x, form=form: form(x, angles.cos(), angles.sin())) for form in (rotary.fused, rotary.plain)]
    yield Case("rotary", *turned, [q])
    norm = [(lambda x, w, form=form: form(x, w, 1e-5)) for form in (rms_norm.fused, rms_norm.plain)]
    yield Case("rms_norm", *norm, [wide, _leaf(s.width)])
    gate, up = (_leaf(s.rows, s.hidden, dtype=dtype) for _ in range(2))
    yield Case("gated", gated.fused, gated.plain, [gate, up])
    targets, head = torch.randint(s.vocab, (s.rows,)), _leaf(s.vocab, s.width)
    loss = [(lambda x, w, form=form: form(x, w, targets)) for form in (cross_entropy.fused, cross_entropy.plain)]
    yield Case("cross_entropy", *loss, [states, head])
    base = torch.randn(s.width, s.width).to(dtype)
    low = [
        (lambda x, a, b, form=form: form(x, a, b, lambda: base, None, 2.0))
        for form in (low_rank.fused, low_rank.plain)
    ]
    yield Case("low_rank", *low, [states, _leaf(RANK, s.width), _leaf(s.width, RANK)])
    yield _experts(s)
    yield from _without_backward(s, dtype)


def _leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype).requires_grad_()


def _documents(s: Shape, heads: int, dtype: torch.dtype) -> Case:
    """Four documents in a row, beside products with a mask."""
    tokens = torch.arange(s.rows)
    starts = tokens // (s.rows // 4) * (s.rows // 4)
    seen, blocks = (tokens <= tokens[:, None]) & (tokens >= starts[:, None]), attention.query_blocks(starts, dtype)
    return Case(
        "attention of documents",
        lambda q, k, v: attention.varlen_attention(q, k, v, blocks),
        lambda q, k, v: attention.plain(q, k, v, seen),
        [_leaf(1, heads, s.rows, HEAD, dtype=dtype) for _ in range(3)],
    )


def _experts(s: Shape) -> Case:
    mlps = [GatedMLP(s.width, s.hidden // 4) for _ in range(EXPERTS)]
    moe = MoE(nn.Linear(s.width, EXPERTS, bias=False), mlps, 2)
    moe.pack()

    def plain(x: Tensor, *weights: Tensor) -> Tensor:
        with experts.one_by_one():
            y: Tensor = moe(x)
            return y

    return Case(
        "experts", lambda x, *weights: moe(x), plain, [_leaf(s.batch, s.tokens, s.width), *moe.parameters()]
    )


def _without_backward(s: Shape, dtype: torch.dtype) -> Iterator[Case]:
    codes = torch.randint(-127, 128, (s.width, s.width), dtype=torch.int8)
    scale, rows = torch.rand(s.width), torch.randn(s.rows, s.width).to(dtype)
    forms = [(lambda x, form=form: form(x, codes, scale)) for form in (int_linear.int8_linear, int_linear.plain)]
    yield Case(f"int8_linear, {FEW} tokens", *forms, [rows[:FEW]])
    yield Case("int8_linear", *forms, [rows])

    def panels(x: Tensor) -> Tensor:
        matrix = torch.zeros(s.width, s.width)
        float32_products.add_gram(matrix, x)
        float32_products.mirror(matrix)
        return matrix

    yield Case("gram", panels, float32_products.plain_gram, [rows])


def time_case(
    case: Case, autocast: Callable[[], AbstractContextManager[Any]], seconds: float
) -> tuple[float, float]:
    """Median seconds of the plain and of the fused form, which take turns for so many seconds each."""
    leaves = [x for x in case.inputs if x.requires_grad]

    def run(form: Form) -> None:
        with autocast(), torch.set_grad_enabled(bool(leaves)):
            y = form(*case.inputs)
        if leaves:
            torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    times: tuple[list[float], list[float]] = ([], [])
    run(case.plain), run(case.fused)
    end = perf_counter() + 2 * seconds
    while perf_counter() < end or len(times[1]) < 3:
        for form, into in zip((case.plain, case.fused), times, strict=True):
            start = perf_counter()
            run(form)
            into.append(perf_counter() - start)
    return median(times[0]), median(times[1])


def measure_all(models: Sequence[str], threads: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    for model, dtype, number in itertools.product(models, (torch.float32, torch.bfloat16), threads):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        low = dtype is torch.bfloat16
        autocast: Any = (lambda: torch.autocast("cpu", torch.bfloat16)) if low else nullcontext
        for case in cases(SHAPES[model], dtype):
            plain, fused = time_case(case, autocast, seconds)
            setting = {"operation": case.name, "model": model, "dtype": str(dtype)[6:], "threads": number}
            yield setting | {"plain": plain, "fused": fused}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A dot for each setting: the time of the fused form relative to the plain one."""
    from matplotlib.figure import Figure

    names = [*dict.fromkeys(row["operation"] for row in rows)]
    figure = Figure(figsize=(8, 0.35 * len(names) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for dtype, color in (("float32", "#2f6f8f"), ("bfloat16", "#8c5a1f")):
        points = [(r["fused"] / r["plain"], names.index(r["operation"])) for r in rows if r["dtype"] == dtype]
        axes.plot(*zip(*points, strict=True), "o", color=color, alpha=0.6, label=dtype)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="time of the fused form, of the plain one's")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    models: tuple[str, ...] = ("10m", "124m"),
    threads: tuple[int, ...] = (1, min(2, os.cpu_count() or 1)),
    seconds: float = 0.3,
    picture: Path | None = None,
) -> None:
    if unknown := [m for m in models if m not in SHAPES]:
        raise ValueError(f"--models {unknown[0]}: expected some of {', '.join(SHAPES)}")
    measure.flush_denormals()
    rows = [*measure_all(models, threads, seconds)]
    columns = ["", "model", "dtype", "threads", "plain", "fused", "ratio"]
    lines = [[r["operation"], r["model"], r["dtype"], str(r["threads"]), *_figures(r)] for r in rows]
    print_table("time of a call, forward and backward", columns, sorted(lines, key=lambda line: line[0]))
    if picture is not None:
        draw(rows, picture)
    print(json.dumps(rows))


def _figures(row: dict[str, Any]) -> list[str]:
    return [format_seconds(row["plain"]), format_seconds(row["fused"]), f"{row['fused'] / row['plain']:.2f}"]


if __name__ == "__main__":
    tyro.cli(main)
