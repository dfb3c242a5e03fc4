"""Size, decoding speed and validation loss with quantized KV caches.

python benchmarks/kv_cache.py --width 384 --depth 6
python benchmarks/kv_cache.py --model MODEL

Speed is taken with random weights and no compiled decode graph, alternating between cache dtypes. The loss is on
validation text, in windows of the context length, fed through the cache in chunks, as if decoded token by token.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

from dunes import checkpoint
from dunes.evaluate.text_loss import evaluation_tokens
from dunes.generate import PrefixCache, generate
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.parts import CacheFormat, cache_for

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FORMATS = {"full": None} | {f"int{bits}": CacheFormat(bits) for bits in (8, 4, 2)}
SHAPES = {"GPT-2 124M": (12, 12, 64), "Mistral 7B": (32, 8, 128), "LLaMA 7B": (32, 32, 128)}
"""Layers, key/value heads and head dim."""
CHUNKS = 48, 1, 15


def row_bytes(layers: int, heads: int, dim: int, tokens: int) -> dict[str, int]:
    """Bytes of a row of bfloat16 keys and values, by format."""
    full = 2 * heads * (tokens + 1) * dim * 2
    sizes = {name: f.layer_bytes(tokens, heads, dim, 2) if f else full for name, f in FORMATS.items()}
    return {name: layers * size for name, size in sizes.items()}


def rates(model: nn.Module, format: CacheFormat | None, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens/s of a prompt, and after it."""
    cache, start = PrefixCache(model, format=format), time.perf_counter()
    stream = generate(model, [1] * prompt, max_tokens=tokens + 1, context_length=prompt + tokens + 1, cache=cache)
    next(stream)
    first = time.perf_counter()
    return prompt / (first - start), sum(1 for _ in stream) / (time.perf_counter() - first)


def speeds(width: int, depth: int, rounds: int) -> dict[int, dict[str, tuple[float, float]]]:
    """The best tokens/s with each format, by length of the prompt: of the prompt, and after it."""
    model = initialise(llama.build(llama.Config.from_size(4096, width, depth, 4096))).eval()
    best = {n: dict.fromkeys(FORMATS, (0.0, 0.0)) for n in (128, 1024, 3072)}
    for (n, fastest), _ in itertools.product(best.items(), range(rounds)):
        for name, format in FORMATS.items():
            pair = zip(fastest[name], rates(model, format, n, 32), strict=True)
            fastest[name] = tuple(round(max(rate), 1) for rate in pair)
    return best


@torch.no_grad()
def loss(model: nn.Module, ids: torch.Tensor, format: CacheFormat | None) -> float:
    """Nats/token of ids (B, T + 1) in chunks through a cache."""
    cache, inputs = cache_for(model, len(ids), ids.shape[1], format=format), ids[:, :-1]
    logits = torch.cat([model(part, cache=cache) for part in inputs.split(_cuts(inputs.shape[1]), 1)], 1)
    return float(F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()))


def _cuts(length: int) -> list[int]:
    ends = [0, *itertools.takewhile(lambda n: n < length, itertools.accumulate(itertools.cycle(CHUNKS))), length]
    return [b - a for a, b in itertools.pairwise(ends)]


def variants() -> dict[str, CacheFormat | None]:
    """Formats to compare by loss: with and without whole tokens."""
    return {"full": None} | {
        f"int{bits}, last {residual} whole": CacheFormat(bits, 32, residual)
        for residual, bits in itertools.product((32, 0), (8, 4, 2))
    }


def losses(folder: Path) -> dict[str, float]:
    """The loss without quantization, and by how much each variant is above it."""
    loaded = checkpoint.load_with_tokenizer(folder)
    ids = torch.from_numpy(np.asarray(evaluation_tokens(loaded)[0], np.int64))
    windows = ids.unfold(0, loaded.context_length + 1, loaded.context_length)
    results = {name: loss(loaded.model.eval(), windows, format) for name, format in variants().items()}
    return {name: round(value - (results["full"] if name != "full" else 0), 4) for name, value in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 384), ("depth", 6), ("rounds", 3), ("row", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    print(
        json.dumps({"bytes": {name: row_bytes(*shape, options.row) for name, shape in SHAPES.items()}}, indent=1)
    )
    if options.model:
        print(json.dumps({"loss": losses(options.model)}, indent=1))
    else:
        fastest = speeds(options.width, options.depth, options.rounds)
        print(json.dumps({"threads": torch.get_num_threads(), "tokens/s": fastest}))


if __name__ == "__main__":
    main()
