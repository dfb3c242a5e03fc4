"""Training on from published weights: all weights or an adapter, AdamW or Muon, for equal processor time.

    python benchmarks/train_from.py runs/arms.jsonl MODEL FOLDER --suffix .go --arms full-muon full-adamw \\
        lora-muon lora-adamw --minutes 5 [--rates 0.006 3e-4 0.02 1e-3]

Every tenth file of FOLDER is held out. A run has one thread and ends after `minutes` of processor time, validation
not counted, so that other work on the machine does not change the comparison. The learning rate rises in the first
twentieth and falls linearly in the second half. Finished runs are appended to the file.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dunes import checkpoint, tree
from dunes.augment import attach
from dunes.data.batches import Windows
from dunes.evaluate.text_loss import evaluate
from dunes.train import Trainer, adamw, cast_frozen, muon
from dunes.train.loss import next_token_loss

import numpy as np
import torch
import tyro

Row = dict[str, object]
RATES = {"full-muon": 0.006, "full-adamw": 3e-4, "lora-muon": 0.02, "lora-adamw": 1e-3}
CHECK_TOKENS = 16_384


def texts(folder: Path, suffix: str) -> tuple[str, str]:
    """The files of a folder in two parts: those that are trained on, and every tenth."""
    files = [p.read_text(errors="replace") for p in sorted(folder.rglob(f"*{suffix}")) if p.is_file()]
    held_out = files[5::10]
    return "\n".join(t for i, t in enumerate(files) if i % 10 != 5), "\n".join(held_out)


def train(
    model: str, parts: tuple[str, str], arm: str, rate: float, options: dict[str, float]
) -> dict[str, object]:
    """One run: its losses, and how many steps it had time for."""
    torch.manual_seed(0)
    loaded = checkpoint.load_with_tokenizer(Path(model))
    tokenizer, network = loaded.require_tokenizer(), loaded.model.float()
    train_ids, valid_ids = (np.array(tokenizer.encode(part), np.int32) for part in parts)
    length, batch = int(options["context_length"]), int(options["batch"])
    if arm.startswith("lora"):
        change = attach(network, rank=int(options["rank"]), alpha=32.0)
        tree.freeze(network, ["**", *(f"!{new}" for new in change.new)])
        cast_frozen(network, torch.bfloat16)
    if arm.endswith("muon"):
        optimizer = muon(network, rate, rate / 2, products=torch.bfloat16)
    else:
        optimizer = adamw(network, rate, (0.9, 0.95), decay=0.0)
    budget, spent = options["minutes"] * 60, 0.0

    def scale(step: int) -> float:
        done = spent / budget
        return min(1.0, done / 0.05 + 0.02, 2 * (1 - done) + 0.01)

    def loss() -> float:
        return evaluate(replace(loaded, context_length=length), valid_ids, torch.bfloat16, CHECK_TOKENS).loss

    trainer = Trainer(network, optimizer, next_token_loss, lr_scale=scale, dtype=torch.bfloat16)
    before = loss()
    windows = Windows(train_ids, length, batch, seed=0)
    start = time.process_time()
    for step in trainer.run(windows.batches(0)):
        spent = time.process_time() - start
        if step.number % 10 == 0:
            print(f"{arm} {rate:g}: step {step.number}, {spent:.0f} s, loss {step.loss:.3f}", flush=True)
        if spent >= budget:
            break
    row = {"arm": arm, "lr": rate, **options, "before": before, "after": loss(), "steps": trainer.number}
    return {**row, "tokens": len(train_ids), "seconds_per_step": spent / trainer.number}


def main(
    out: tyro.conf.Positional[Path],
    model: tyro.conf.Positional[str],
    folder: tyro.conf.Positional[Path],
    suffix: str = "",
    arms: Sequence[str] = tuple(RATES),
    rates: Sequence[float] = (),
    minutes: float = 5.0,
    context_length: int = 256,
    batch: int = 8,
    rank: int = 16,
) -> None:
    """Run the arms one after the other.

    Args:
        out: JSON Lines of finished runs.
        model: Folder of the model.
        folder: Folder of the text.
        suffix: End of the names of its files.
        arms: all weights or an adapter, and the optimizer.
        rates: A learning rate for each arm; the default are those of `RATES`.
        minutes: Processor minutes of each run.
        context_length: Tokens in a window.
        batch: Windows in a step.
        rank: Rank of the adapters.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    parts = texts(folder, suffix)
    options = {"minutes": minutes, "context_length": context_length, "batch": batch, "rank": rank}
    for arm, rate in zip(arms, rates or [RATES[arm] for arm in arms], strict=True):
        row = train(model, parts, arm, rate, options) | {"text": folder.name}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
