"""A LoRA finetuning step, ours beside peft under transformers' Trainer, unpacked and packed.

    python benchmarks/finetune.py --data gsm8k_train.json.gz --patience 0
    python benchmarks/finetune.py --toy --here

A LLaMA of 10M random weights with a tokenizer trained on the examples, and an adapter of rank 16 on all
linear maps of its blocks, are saved; both sides load them, take the same examples in the same order and AdamW.
Losses of six steps in float32 must be equal to 1e-5 before anything is timed (`peers.py` says how sides are
tried, compared and raced, which is the same here). Unpacked is one example a row, padded to the longest of its
batch; packed is as many in a row of the context as fit. Rates count tokens that are no padding. Memory is what the
process held at most, and how much more that is than when all was loaded.
"""

import json
import random
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tyro
from peers import SIDES, Side, Unavailable, raced, rough, side_of
from tuning import TASKS, Tuning

SHAPES = {"toy": (64, 2), "10m": (384, 6)}  # width, layers
VOCAB, CONTEXT, RANK = 4096, 512, 16
ROWS = {"unpacked": 8, "packed": 2}  # about as many tokens
BATCHES = 8


def main(
    data: Path | None = None,
    rounds: int = 4,
    patience: float = 120.0,
    tasks: tuple[str, ...] = TASKS,
    toy: bool = False,
    here: bool = False,
) -> None:
    """Race.

    Args:
        data: Instruction examples, in any form that is read; without it made-up ones.
        rounds: How often each side runs at its best setting.
        patience: Seconds that a compiling setting may take to its first answer; 0 leaves these out.
        tasks: Of unpacked and packed.
        toy: A tiny model and little work, nothing compiled.
        here: peft is taken from this Python, and not installed.
    """
    if toy:
        patience, rounds = 0.0, min(rounds, 1)
    sides, left_out = [Side("ours", (sys.executable, str(SIDES / "our_tuning_side.py")))], {}
    try:
        sides.append(side_of("peft", here))
    except Unavailable as why:
        left_out["peft"] = str(why)
        print(f"peft: left out: {why}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tuning = prepared(folder, data or made_up(folder / "made_up.jsonl"), "toy" if toy else "10m")
        results: dict[str, Any] = {task: raced(task, sides, folder, tuning, rounds, patience) for task in tasks}
    print(json.dumps({"benchmark": "finetuning", "left_out": left_out, **results, **ratios(results)}))


def made_up(path: Path) -> Path:
    """Sums in words, of many lengths."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(500):
            numbers = [draw.randint(2, 99) for _ in range(draw.randint(2, 30))]
            terms = " and ".join(f"{n} apples" for n in numbers)
            file.write(
                json.dumps({"prompt": f"Ann buys {terms}. How many?", "completion": f"{sum(numbers)}"}) + "\n"
            )
    return path


def prepared(folder: Path, data: Path, size: str) -> Tuning:
    """The model, the adapter and the work, all written into `folder`."""
    import torch

    from dunes import augment, checkpoint, measure
    from dunes.data import Batches, examples
    from dunes.models import llama
    from dunes.text import Tokenizer, templates

    records = examples.read_records(data).rows[:2000]
    tokenizer = Tokenizer.train("bpe", [turn.full_text for r in records for turn in r.turns], VOCAB)
    dim, depth = SHAPES[size]
    config = llama.Config.from_size(VOCAB, dim, depth, CONTEXT)
    kv_heads = config.heads // (3 if config.heads % 3 == 0 else 2)
    model = rough(llama.build(replace(config, kv_heads=kv_heads, tied=False)))
    checkpoint.save(model, folder / "model", tokenizer, CONTEXT)
    note = augment.attach(model, rank=RANK)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):  # at zero it would say nothing of the scale
            with torch.no_grad():
                parameter.normal_(0, 0.01, generator=torch.Generator().manual_seed(len(name)))
    checkpoint.save_adapter(model, folder / "adapter", note["request"]["adapter"], str(folder / "model"))
    made = list(examples.tokenize_records(records, templates.get_template("plain"), tokenizer))
    few = size == "toy"
    tuning = Tuning(
        folder=str(folder / "model"),
        adapter=str(folder / "adapter"),
        threads=1 if few else measure.choose_threads(),
        context=CONTEXT,
        seed=0,
        rows=ROWS,
        examples=[(e.ids.tolist(), e.loss_mask.tolist()) for e in made],
        batches={task: batches(Batches(made, CONTEXT, ROWS[task], 0, packed=task == "packed")) for task in TASKS},
        lr=1e-3,
        betas=(0.9, 0.999),
        clip=1.0,
        seconds=0.1 if few else 4.0,
    )
    (folder / "work.json").write_text(json.dumps(asdict(tuning)))
    return tuning


def batches(made: Any) -> list[list[list[list[int]]]]:
    return [
        [[list(map(int, p)) for p in row] for row in zip(*made.batch(i)[:3], strict=True)] for i in range(BATCHES)
    ]


def ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Every form of ours over every form of theirs: tokens a second, and bytes."""
    found: dict[str, Any] = {}
    for mine in results:
        for other in results:
            a, b = results[mine]["ours"], results[other].get("peft", {})
            if "rate" in a and "rate" in b:
                each = {key: a[key] / b[key] for key in ("rate", "grown", "peak") if b[key]}
                found[f"ours {mine} over theirs {other}"] = each
    for what, each in found.items():
        print(f"{what}: " + ", ".join(f"{key} {value:.2f}" for key, value in each.items()), flush=True)
    return {"ratios": found}


if __name__ == "__main__":
    tyro.cli(main)
