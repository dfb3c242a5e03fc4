"""Time to a validation loss of 1.88 on Shakespeare's characters, by the plain GPT and by dunes, in alternation.

    python benchmarks/shakespeare.py tinyshakespeare.txt [--rounds 3]

Both use the same text, validation split (the last tenth), and windows of 64 for validation. The plain side is
nanoGPT's recipe for a CPU: 4 layers, 4 heads, width 128, T=64, batch size 12, 2,000 steps, lr 1e-3 to 1e-4, betas
0.9 and 0.99. Training time is the sum of the steps; wall time is from the start of the process to the end of the
last step. Neither includes validation.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import tyro

TARGET = 1.88
CONTEXT = 64


def load_data(file: str):
    from dunes.text import Tokenizer

    import torch

    text = Path(file).read_text()
    tokenizer = Tokenizer.train("chars", [text])
    ids = np.array(tokenizer.encode(text))
    cut = int(0.9 * len(ids))
    return torch, tokenizer, ids[:cut], ids[cut:]


def plain_side(file: str, steps: int = 2000) -> dict[str, float]:
    import plain

    torch, tokenizer, train, valid = load_data(file)
    torch.manual_seed(0)
    data, model = torch.from_numpy(train), plain.GPT(tokenizer.vocab, 128, 4, 4, CONTEXT)
    optimizer = plain.adamw(model, 1e-3, (0.9, 0.99))
    start = time.perf_counter()
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = plain.cosine(i, steps, 100, 1e-3, 1e-4)
        starts = torch.randint(len(data) - CONTEXT, (12,))
        plain.step(model, optimizer, torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]))
    seconds, finished = time.perf_counter() - start, time.time()
    windows = torch.from_numpy(valid[: len(valid) // CONTEXT * CONTEXT + 1])
    with torch.no_grad():
        rows = torch.stack([windows[i : i + CONTEXT + 1] for i in range(0, len(windows) - 1, CONTEXT)])
        loss = plain.loss_of(model, rows).item()
    return {"seconds": seconds, "loss": loss, "steps": steps, "finished": finished}


def our_side(file: str, steps: int = 170, seed: int = 0) -> dict[str, float]:
    from dataclasses import replace

    from dunes import measure
    from dunes.checkpoint import LoadedModel
    from dunes.data import Windows
    from dunes.evaluate.text_loss import evaluate
    from dunes.models import arcee
    from dunes.models.initialise import initialise
    from dunes.train import Schedule, Trainer, muon

    torch, tokenizer, train, valid = load_data(file)
    measure.keep_freed_memory()
    torch.set_num_threads(measure.choose_threads())
    dtype = measure.choose_dtype(measure.device())
    config = replace(arcee.Config.from_size(tokenizer.vocab, 128, 2, CONTEXT), heads=2, kv_heads=2, head_dim=64)
    model = initialise(arcee.build(config), seed)
    schedule = Schedule.steps(steps, warmup=5, decay=0.6)
    loss = lambda m, b: m(b[:, :-1], targets=b[:, 1:])
    trainer = Trainer(model, muon(model, momentum=0.85), loss, lr_scale=schedule.lr_scale, dtype=dtype, seed=seed)
    start = time.perf_counter()
    for step in trainer.run(Windows(train, CONTEXT, 32, seed).batches()):
        if schedule.is_over(step.number):
            break
    seconds, finished = time.perf_counter() - start, time.time()
    score = evaluate(LoadedModel(model, tokenizer, CONTEXT), valid)
    return {"seconds": seconds, "loss": score.loss, "steps": steps, "finished": finished}


def main(file: str, rounds: int = 3, side: str | None = None) -> None:
    """Race to the target.

    Args:
        file: The text, `tinyshakespeare.txt`.
        rounds: Rounds of each side.
        side: Run only this side once (used internally).
    """
    if side is not None:
        print(json.dumps(plain_side(file) if side == "plain" else our_side(file)))
        return
    from sides import interleaved, middle, print_results

    rows = interleaved(__file__, {s: (file, "--side", s) for s in ("plain", "ours")}, rounds)
    plain, ours = rows["plain"], rows["ours"]
    print_results(
        f"Shakespeare's characters to a validation loss of {TARGET}",
        {
            "plain: training s": middle(plain, "seconds"),
            "ours: training s": middle(ours, "seconds"),
            "training ratio": middle(plain, "seconds") / middle(ours, "seconds"),
            "plain: wall s": middle(plain, "wall"),
            "ours: wall s": middle(ours, "wall"),
            "wall ratio": middle(plain, "wall") / middle(ours, "wall"),
            "plain: loss": middle(plain, "loss"),
            "ours: loss": middle(ours, "loss"),
            "ours reached the target": all(r["loss"] <= TARGET for r in ours),
        },
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
