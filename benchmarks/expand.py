"""Learning and forgetting of block expansion, LoRA and full finetuning on a new text, at equal steps.

    python benchmarks/expand.py tinyshakespeare.txt NEW.txt --picture docs/figures/expansion.svg

A character model is trained on OLD, then with each method on NEW, with the same batches at several learning rates.
Losses are nats per character on the last tenths of both texts. Removing new blocks must restore the old weights.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dunes import tree
from dunes.augment import apply_change, undo_change
from dunes.checkpoint import LoadedModel
from dunes.data import Windows
from dunes.evaluate.text_loss import evaluate
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.runs.task import set_trainable
from dunes.text import Tokenizer
from dunes.train import Schedule, Trainer, adamw, muon
from dunes.train.loss import next_token_loss

import matplotlib
import numpy as np
import torch
import tyro
from matplotlib import pyplot

Row = dict[str, Any]
Ids = np.ndarray[Any, Any]
CHANGES: dict[str, tuple[str, Row]] = {"new blocks": ("expand", {"blocks": 2}), "LoRA": ("lora", {"rank": 16})}
RATES = {"new blocks": (1e-3, 3e-3), "LoRA": (3e-3, 1e-2), "full": (3e-4, 1e-3)}
CONTEXT, ROWS, SCORED = 64, 16, 20_000


@dataclass(frozen=True)
class Settings:
    """Settings of all runs.

    Args:
        old: Text that the model learns first.
        new: Text that is learned afterwards.
        base_steps: Steps on the old text.
        steps: Steps on the new text.
        seeds: Random seeds of weights and of the order of the data.
        picture: Where to draw.
    """

    old: tyro.conf.Positional[str]
    new: tyro.conf.Positional[str]
    base_steps: int = 400
    steps: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    picture: Path | None = None


def read(settings: Settings) -> tuple[Tokenizer, list[tuple[Ids, Ids]]]:
    """The tokenizer of both texts, and training and validation ids of each."""
    texts = [Path(path).read_text(errors="replace") for path in (settings.old, settings.new)]
    tokenizer = Tokenizer.train("chars", texts)
    sides = [np.array(tokenizer.encode(text)) for text in texts]
    return tokenizer, [(ids[: (cut := int(0.9 * len(ids)))], ids[cut:]) for ids in sides]


def learn(loaded: LoadedModel, ids: Ids, steps: int, seed: int, rate: float | None = None) -> None:
    """Train what is trainable: from scratch with Muon, afterwards with AdamW at this rate."""
    optimizer = muon(loaded.model) if rate is None else adamw(loaded.model, rate, decay=0.0)
    schedule = Schedule.steps(steps, warmup=min(20, steps // 5))
    trainer = Trainer(loaded.model, optimizer, next_token_loss, lr_scale=schedule.lr_scale, seed=seed)
    batches = Windows(ids, length=CONTEXT, batch_size=ROWS, seed=seed).batches()
    for step in trainer.run(batches):
        if schedule.is_over(step.number):
            break


def adapt(
    base: LoadedModel, method: str, rate: float, steps: int, seed: int, sides: Sequence[tuple[Ids, Ids]]
) -> Row:
    """The losses on both texts after this method has learned the new one."""
    (_, old), (train, new) = sides
    loaded = LoadedModel(deepcopy(base.model), base.tokenizer, CONTEXT)
    change = apply_change(loaded.model, CHANGES[method][0], **CHANGES[method][1]) if method in CHANGES else None
    set_trainable(loaded.model, change.new if change else ("**",))
    trainable = tree.count(loaded.model, trainable=True)
    learn(loaded, train, steps, seed, rate)
    row = {"new": evaluate(loaded, new, limit=SCORED).loss, "old": evaluate(loaded, old, limit=SCORED).loss}
    if change:
        undo_change(loaded.model, change)
    before = base.model.state_dict()
    restored = all(torch.equal(before[name], t) for name, t in loaded.model.state_dict().items())
    return {"method": method, "rate": rate, "seed": seed, "trainable": trainable, "restored": restored, **row}


def rows_of_seed(settings: Settings, seed: int) -> list[Row]:
    """Rows of the base, then of all methods and learning rates on it."""
    tokenizer, sides = read(settings)
    config = llama.Config.from_size(tokenizer.vocab, dim=128, depth=4, context_length=CONTEXT)
    base = LoadedModel(initialise(llama.build(config), seed), tokenizer, CONTEXT)
    learn(base, sides[0][0], settings.base_steps, seed)
    losses = {
        name: evaluate(base, valid, limit=SCORED).loss
        for name, (_, valid) in zip(("old", "new"), sides, strict=True)
    }
    rows = [{"method": "before", "rate": 0.0, "seed": seed, "restored": True, **losses}]
    for method, rates in RATES.items():
        for rate in rates:
            rows.append(adapt(base, method, rate, settings.steps, seed, sides))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Mean and spread over the seeds, of each method at each rate."""
    groups = dict.fromkeys((row["method"], row["rate"]) for row in rows)
    result = []
    for method, rate in groups:
        chosen = [row for row in rows if (row["method"], row["rate"]) == (method, rate)]
        values = {side: [row[side] for row in chosen] for side in ("new", "old")}
        spread = {f"{side}_spread": stdev(v) if len(v) > 1 else 0.0 for side, v in values.items()}
        means = {side: mean(v) for side, v in values.items()}
        restored = all(row["restored"] for row in chosen)
        result.append({"method": method, "rate": rate, **means, **spread, "restored": restored})
    return result


def draw(result: Sequence[Row], path: Path) -> None:
    """The loss on the old text over that on the new one."""
    matplotlib.use("svg")
    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for method in dict.fromkeys(row["method"] for row in result):
        points = [row for row in result if row["method"] == method]
        x, y = ([row[side] for row in points] for side in ("new", "old"))
        errors = {"xerr": [row["new_spread"] for row in points], "yerr": [row["old_spread"] for row in points]}
        axes.errorbar(x, y, marker="o", capsize=3, label=method, **errors)
        for row in points:
            axes.annotate(f"{row['rate']:g}" if row["rate"] else "", (row["new"], row["old"]), fontsize=8)
    axes.set_xlabel("loss on the new text, nats/character")
    axes.set_ylabel("loss on the old text, nats/character")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(settings: Settings) -> None:
    """Run all, print a line for each, and all in one line at the end."""
    torch.set_num_threads(1)
    rows = [row for seed in settings.seeds for row in rows_of_seed(settings, seed)]
    result = summaries(rows)
    if settings.picture is not None:
        draw(result, settings.picture)
    stored = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()}
    print(json.dumps({"settings": stored, "rows": rows, "summary": result}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
