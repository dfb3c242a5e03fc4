"""Memory of a training step of full finetuning, LoRA and QLoRA, estimated on fake tensors.

    python benchmarks/lora_memory.py [--folder runs/base] [--batch 4] [--context 512]

Full finetuning has float32 weights, LoRA a frozen base in bfloat16 and rank 16, QLoRA the same base in NF4 with
double quantization, with embedding and norms in bfloat16. The optimizer is AdamW, the step the second. The last
line is JSON.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dunes import measure, tree
from dunes.augment import lora
from dunes.augment.changes import decide_change
from dunes.augment.quantization import shape as shape_quantized
from dunes.bench.subject import of_folder, of_shape
from dunes.measure import Allocations
from dunes.models import llama
from dunes.parts import Decoder
from dunes.runs.memory import Shape, TrainSetup, build_with_dtype, train_allocations
from dunes.train import adamw
from dunes.train.loss import next_token_loss

import torch
import tyro

LLAMA_1B = llama.Config(
    vocab=128256, dim=2048, depth=16, heads=32, kv_heads=8, head_dim=64, hidden=8192, tied=True
)
"""Llama 3.2 1B."""
METHODS = ("full", "LoRA", "QLoRA")


def build_trained(build: Callable[[], Decoder], method: str, rank: int) -> Decoder:
    """The model as the method trains it, without reading or initialising values."""
    model = build_with_dtype(torch.float32 if method == "full" else torch.bfloat16, build)
    if method == "QLoRA":
        shape_quantized(model, decide_change(model, "quantize", kind="nf4", double=True))
    if method != "full":
        note = decide_change(model, "lora", rank=rank)
        lora.shape(model, note)
        lora.set_adapter(model, note.request["adapter"])
        tree.freeze(model, ["**", *(f"!{new}" for new in note.new)])
    return model


def step_allocations(build: Callable[[], Decoder], method: str, shape: tuple[int, int], rank: int) -> Allocations:
    """The allocations of the second step, when the optimizer state exists."""

    def batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(shape.batch, shape.context, dtype=torch.long)
        return ids, torch.zeros_like(ids)

    learning = TrainSetup(partial(adamw, decay=0.0), next_token_loss, batch)
    return train_allocations(
        lambda: build_trained(build, method, rank), Shape(*shape, torch.bfloat16), True, learning
    )


def row(name: str, build: Callable[[], Decoder], method: str, shape: tuple[int, int], rank: int) -> dict[str, Any]:
    log = step_allocations(build, method, shape, rank)
    kinds = {str(kind): size for (kind,), size in log.by("kind").items()}
    return {
        "model": name,
        "method": method,
        "batch": shape[0],
        "context": shape[1],
        "peak": log.peak,
        "kinds": kinds,
    }


def main(folder: Path | None = None, batch: int = 4, context: int = 512, rank: int = 16) -> None:
    """Measure.

    Args:
        folder: A further model folder.
        batch: Rows per step.
        context: Tokens per row.
        rank: LoRA's rank.
    """
    small = of_shape("llama", 40_000_000, context)
    subjects = {small.name: small.outline, "llama 1B": lambda: llama.build(LLAMA_1B)}
    if folder is not None:
        subjects = {folder.name: of_folder(folder).outline, **subjects}
    rows = [row(name, build, m, (batch, context), rank) for name, build in subjects.items() for m in METHODS]
    print(f"| {batch} x {context} tokens | method | peak MB | of full | {' | '.join(measure.KINDS)} |")
    print("|" + "---|" * (4 + len(measure.KINDS)))
    for r in rows:
        full = next(o for o in rows if o["model"] == r["model"])["peak"]
        parts = " | ".join(f"{r['kinds'].get(k, 0) / 1e6:,.0f}" for k in measure.KINDS)
        print(f"| {r['model']} | {r['method']} | {r['peak'] / 1e6:,.0f} | {r['peak'] / full:.2f} | {parts} |")
    print(json.dumps({"benchmark": "lora_memory", "rows": rows}))


if __name__ == "__main__":
    tyro.cli(main)
