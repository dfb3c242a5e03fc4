"""Seconds and peak memory of GPTQ (int4) and SparseGPT (50 %) for one block, by the block's width.

python benchmarks/block_cost.py [WIDTHS] [SEQUENCES] [TOKENS]

The blocks are LLaMA's, with random bfloat16 weights and an MLP of 2.69 times the width, as in 7B. `forward` is the
time of the block's forwards over the calibration tokens, `Gram` of its inputs' Gram matrices, `solve` the
remaining time, and `ratio` the total over forward + Gram. See docs/log/quantization.md, "Quantizing and pruning
block by block".
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from dunes import measure
from dunes.augment import CHANGES
from dunes.augment.calibrate import Gram
from dunes.augment.changes import decide_change
from dunes.models import llama
from dunes.parts import Block, Decoder

import torch
from torch import Tensor

VOCAB, HEAD = 1024, 128
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("quantize", {"kind": "int4", "method": "gptq"}),
    "sparsegpt": ("prune", {"method": "sparsegpt"}),
}
seconds = dict[str, float]()


def main(widths: str = "512,1024,2048,4096", sequences: str = "128", tokens: str = "256") -> None:
    ids = torch.randint(VOCAB, (int(sequences), int(tokens)), generator=torch.Generator().manual_seed(0))
    Block.forward = _timed("forward", Block.forward)  # type: ignore[method-assign]
    Gram.add = _timed("gram", Gram.add)  # type: ignore[method-assign]
    print(f"{ids.numel():,} tokens, {torch.get_num_threads()} threads")
    print("| method | width | parameters | forward s | Gram s | solve s | total s | ratio | GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for method in REQUESTS:
        for width in map(int, widths.split(",")):
            print(_row(method, width, ids), flush=True)


def _row(method: str, width: int, ids: Tensor) -> str:
    name, request = REQUESTS[method]
    model, entry, cpu = _model(width), CHANGES[name], torch.device("cpu")
    change = decide_change(model, name, ids=ids, **request)
    seconds.update(forward=0.0, gram=0.0)
    before, start = measure.reset_peak_memory(cpu), time.perf_counter()
    next(entry.solve(model, change, ids))  # the first of two blocks, whose outputs are computed
    total, memory = time.perf_counter() - start, (measure.peak_memory(cpu) - before) / 1e9
    forward, gram = seconds["forward"] - seconds["gram"], seconds["gram"]
    parameters = sum(p.numel() for p in model.blocks[0].parameters())
    times = [forward, gram, total - forward - gram, total]
    columns = [f"{value:.1f}" for value in (*times, total / (forward + gram), memory)]
    return f"| {method} | {width:,} | {parameters / 1e6:.1f}M | {' | '.join(columns)} |"


def _model(width: int) -> Decoder:
    heads = max(1, width // HEAD)
    sizes = {"hidden": width * 43 // 16, "heads": heads, "kv_heads": heads, "head_dim": HEAD}
    model = llama.build(llama.Config(vocab=VOCAB, dim=width, depth=2, **sizes)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=generator)
    return model


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds[name] += time.perf_counter() - start

    return timed


if __name__ == "__main__":
    main(*sys.argv[1:])
