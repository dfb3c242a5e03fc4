"""Speedup of prompt look-up decoding on code: plain and look-up decoding in alternation, with random weights.

The sampler forces the model to write a given text, so that proposals are realistic and forwards cost their real
time: python benchmarks/look_up.py --width 320 --depth 7 (--compiled: native code)
"""

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dunes.generate import CompiledStep, PrefixCache, Proposer, Request, Sampler, generate_all, look_up
from dunes.generate.decode_packages import compile_step, load_step
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.text import Tokenizer

import torch

CONTEXT = 2048
SIDES: dict[str, Proposer | None] = {"plain": None} | {
    f"look-up {n}": partial(look_up, count=n) for n in (3, 7, 8, 15)
}


def texts(tokens: int) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts and what the model is made to write after them."""
    source = Path(textwrap.__file__).read_text()
    tokenizer = Tokenizer.train("bpe", [source], 1024)
    code, part = tokenizer.encode(source), source[3000:6000]
    changed = tokenizer.encode(part.replace("self.width", "self.columns").replace("indent", "prefix"))
    return {
        "a file goes on": (code[:1200], code[1200 : 1200 + tokens]),
        "code with two names changed": (tokenizer.encode(part), changed[:tokens]),
    }


def write(
    model: torch.nn.Module,
    step: CompiledStep | None,
    prompt: Sequence[int],
    text: Sequence[int],
    proposer: Proposer | None,
) -> tuple[float, float]:
    """Tokens/s and tokens per forward after the first token."""
    ids, cache = iter(text), PrefixCache(model, step=step)
    sample = Sampler(choose=lambda logits: torch.tensor(next(ids)))
    request = Request(prompt, len(text), sample, proposer=proposer)
    stream = generate_all(model, [request], context_length=CONTEXT, cache=cache)
    next(stream)
    start, forwards = time.perf_counter(), cache.forwards
    count = sum(1 for _ in stream)
    assert request.ids == [*prompt, *text]
    return count / (time.perf_counter() - start), count / (cache.forwards - forwards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 64), ("depth", 2), ("tokens", 300), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    model = initialise(llama.build(llama.Config.from_size(4096, options.width, options.depth, CONTEXT)))
    if options.compiled:
        compile_step(model, CONTEXT)
    step = load_step(model) if options.compiled else None
    dtype = str(step.dtype) if step else "not compiled"
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "step": dtype,
    }
    for name, (prompt, text) in texts(options.tokens).items():
        best, per_forward = dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0.0)
        for _ in range(options.rounds):
            for side, proposer in SIDES.items():
                rate, per_forward[side] = write(model, step, prompt, text, proposer)
                best[side] = max(best[side], rate)
        row[name] = {"tokens/s": best, "tokens per forward": per_forward}
    print(json.dumps({"benchmark": "look-up", **row}))


if __name__ == "__main__":
    main()
