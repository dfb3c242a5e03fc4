"""Speed and memory of LoRA finetuning, dunes against PEFT with transformers' Trainer, unpacked and packed.

    python benchmarks/finetune.py --data gsm8k_train.json.gz --patience 0
    python benchmarks/finetune.py --toy --here

Both sides load the same LLaMA of 10M random weights, its tokenizer, and an adapter of rank 16 on all linear layers
of its blocks, and train on the same examples in the same order with AdamW. Losses of six steps in float32 must be
equal to 2e-5 before anything is timed (`peers.py` describes the procedure). Unpacked: one example per row, padded
to the longest of its batch; packed: as many examples per row as fit. Rates count tokens without padding. Memory is
the peak of the process, and its growth since loading.
"""

import json
import random
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tyro
from peers import SIDES, Side, Unavailable, race, random_weights, side_of
from tuning import TASKS, Tuning

SHAPES = {"toy": (64, 2), "10m": (384, 6)}  # width, layers
VOCAB, CONTEXT, RANK = 4096, 512, 16
ROWS = {"unpacked": 8, "packed": 2}  # about as many tokens each
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
        data: Instruction examples, in any supported format; by default synthetic ones.
        rounds: Rounds of each side at its best setting.
        patience: Maximum seconds until the first result of a compiled setting; 0 skips these.
        tasks: unpacked and packed, or one of them.
        toy: A tiny model and little work, nothing compiled.
        here: Use the peft of this Python instead of installing it.
    """
    if toy:
        patience, rounds = 0.0, min(rounds, 1)
    sides, left_out = [Side("ours", (sys.executable, str(SIDES / "our_tuning_side.py")))], {}
    try:
        sides.append(side_of("peft", here))
    except Unavailable as why:
        left_out["peft"] = str(why)
        print(f"peft: skipped: {why}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tuning = write_setup(folder, data or synthetic_examples(folder / "made_up.jsonl"), "toy" if toy else "10m")
        results: dict[str, Any] = {task: race(task, sides, folder, tuning, rounds, patience) for task in tasks}
    print(json.dumps({"benchmark": "finetuning", "left_out": left_out, **results, **ratios(results)}))


def synthetic_examples(path: Path) -> Path:
    """Synthetic examples: sums in words, of many lengths."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(500):
            numbers = [draw.randint(2, 99) for _ in range(draw.randint(2, 30))]
            terms = " and ".join(f"{n} apples" for n in numbers)
            file.write(
                json.dumps({"prompt": f"Ann buys {terms}. How many?", "completion": f"{sum(numbers)}"}) + "\n"
            )
    return path


def write_setup(folder: Path, data: Path, size: str) -> Tuning:
    """Write the model, the adapter and the settings into `folder`."""
    from dunes import augment, checkpoint, measure
    from dunes.data import Batches, examples
    from dunes.models import llama
    from dunes.text import Tokenizer, templates

    import torch

    records = examples.read_records(data).rows[:2000]
    tokenizer = Tokenizer.train("bpe", [turn.full_text for r in records for turn in r.turns], VOCAB)
    dim, depth = SHAPES[size]
    config = llama.Config.from_size(VOCAB, dim, depth, CONTEXT)
    kv_heads = config.heads // (3 if config.heads % 3 == 0 else 2)
    model = random_weights(llama.build(replace(config, kv_heads=kv_heads, tied=False)))
    checkpoint.save(model, folder / "model", tokenizer, CONTEXT)
    note = augment.attach(model, rank=RANK)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):  # a B of zeros would not test the scale
            with torch.no_grad():
                parameter.normal_(0, 0.01, generator=torch.Generator().manual_seed(len(name)))
    checkpoint.save_adapter(model, folder / "adapter", note.request["adapter"], str(folder / "model"))
    tokenized = list(examples.tokenize_records(records, templates.get_template("plain"), tokenizer))
    toy = size == "toy"
    tuning = Tuning(
        folder=str(folder / "model"),
        adapter=str(folder / "adapter"),
        threads=1 if toy else measure.choose_threads(),
        context=CONTEXT,
        seed=0,
        rows=ROWS,
        examples=[(e.ids.tolist(), e.loss_mask.tolist()) for e in tokenized],
        batches={
            task: batches(Batches(tokenized, CONTEXT, ROWS[task], 0, packed=task == "packed")) for task in TASKS
        },
        lr=1e-3,
        betas=(0.9, 0.999),
        clip=1.0,
        seconds=0.1 if toy else 4.0,
    )
    (folder / "work.json").write_text(json.dumps(asdict(tuning)))
    return tuning


def batches(made: Any) -> list[list[list[list[int]]]]:
    return [
        [[list(map(int, p)) for p in row] for row in zip(*made.batch(i)[:3], strict=True)] for i in range(BATCHES)
    ]


def ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Ratios of each of our tasks to each of theirs: tokens/s, and bytes."""
    by_pair: dict[str, Any] = {}
    for mine in results:
        for other in results:
            a, b = results[mine]["ours"], results[other].get("peft", {})
            if "rate" in a and "rate" in b:
                each = {key: a[key] / b[key] for key in ("rate", "grown", "peak") if b[key]}
                by_pair[f"ours {mine} over theirs {other}"] = each
    for what, each in by_pair.items():
        print(f"{what}: " + ", ".join(f"{key} {value:.2f}" for key, value in each.items()), flush=True)
    return {"ratios": by_pair}


if __name__ == "__main__":
    tyro.cli(main)
