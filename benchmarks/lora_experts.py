"""Mixtures of LoRA experts against plain LoRA with as many trainable parameters, on two domains at once.

    python benchmarks/lora_experts.py BASE.txt tinyshakespeare.txt CODE.txt

A character model is trained on BASE; then each method is trained on the other two texts with the same batches, at
several learning rates. Losses are nats per character on the last tenth of each text; the lowest mean selects the
rate. LoRA has the smallest rank with at least as many trainable parameters as every mixture.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dunes import tree
from dunes.augment import apply_change
from dunes.checkpoint import LoadedModel
from dunes.evaluate.text_loss import evaluate
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.runs.task import set_trainable
from dunes.text import Tokenizer
from expand import CONTEXT, SCORED, Ids, Row, learn

import numpy as np
import torch
import tyro

EXPERTS, RANK = 4, 4
MIXTURES: dict[str, Row] = {
    "linear": {},
    "shared": {},
    "mlp": {"ranks": {"blocks.*.attn.*": EXPERTS * RANK}},  # plain LoRA there, with as many weights
}
"""Requests by router."""


@dataclass(frozen=True)
class Settings:
    """Settings of all runs.

    Args:
        base: Text that the model learns first.
        first: One text of the mixture.
        second: The other one.
        base_steps: Steps on the base's text.
        steps: Steps on the mixture.
        rates: Learning rates of each method.
        seeds: Random seeds of weights and of the order of the data.
    """

    base: tyro.conf.Positional[str]
    first: tyro.conf.Positional[str]
    second: tyro.conf.Positional[str]
    base_steps: int = 300
    steps: int = 150
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)


def read(settings: Settings) -> tuple[Tokenizer, list[tuple[Ids, Ids]]]:
    """The tokenizer of all texts, and training and validation ids of each, cut to the length of the shortest."""
    paths = (settings.base, settings.first, settings.second)
    texts = [Path(path).read_text(errors="replace") for path in paths]
    tokenizer, shortest = Tokenizer.train("chars", texts), min(map(len, texts))
    ids = [np.array(tokenizer.encode(text[:shortest])) for text in texts]
    return tokenizer, [(each[: (cut := int(0.9 * len(each)))], each[cut:]) for each in ids]


def requests(base: LoadedModel) -> dict[str, tuple[str, Row]]:
    """The changes by method, LoRA's with its rank."""

    def trained(name: str, request: Mapping[str, Any]) -> int:
        model = deepcopy(base.model)
        set_trainable(model, apply_change(model, name, **request).new)
        return tree.count(model, trainable=True)

    mixtures = {r: {"router": r, "experts": EXPERTS, "rank": RANK} | more for r, more in MIXTURES.items()}
    most = max(trained("lora-experts", request) for request in mixtures.values())
    rank = -(-most // trained("lora", {"rank": 1}))
    return {"LoRA": ("lora", {"rank": rank})} | {r: ("lora-experts", each) for r, each in mixtures.items()}


def losses(loaded: LoadedModel, sides: Sequence[tuple[Ids, Ids]]) -> Row:
    """The validation losses on the two texts of the mixture, and their mean."""
    first, second = (evaluate(loaded, valid, limit=SCORED).loss for _, valid in sides[1:])
    return {"first": first, "second": second, "loss": (first + second) / 2}


def rows_of_seed(settings: Settings, seed: int) -> list[Row]:
    """Rows of the base, then of all methods and learning rates on it."""
    tokenizer, sides = read(settings)
    config = llama.Config.from_size(tokenizer.vocab, dim=128, depth=4, context_length=CONTEXT)
    base = LoadedModel(initialise(llama.build(config), seed), tokenizer, CONTEXT)
    learn(base, sides[0][0], settings.base_steps, seed)
    rows = [{"method": "before", "rate": 0.0, "seed": seed, "trained": 0, **losses(base, sides)}]
    mixture = np.concatenate([train for train, _ in sides[1:]])
    for method, (name, request) in requests(base).items():
        for rate in settings.rates:
            loaded = LoadedModel(deepcopy(base.model), tokenizer, CONTEXT)
            set_trainable(loaded.model, apply_change(loaded.model, name, **request).new)
            trained = tree.count(loaded.model, trainable=True)
            learn(loaded, mixture, settings.steps, seed, rate)
            row = {"method": method, "rate": rate, "seed": seed, "trained": trained, **losses(loaded, sides)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def best_rates(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method, one for each seed, at the rate with the least mean loss."""
    groups: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["method"], {}).setdefault(row["rate"], []).append(row)
    return {m: min(rates.values(), key=lambda r: mean(x["loss"] for x in r)) for m, rates in groups.items()}


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Mean and spread over the seeds, and the verdict against LoRA: a tie unless all seeds agree."""
    best = best_rates(rows)
    result = []
    for method, chosen in best.items():
        gains = [row["loss"] - lora["loss"] for row, lora in zip(chosen, best["LoRA"], strict=True)]
        verdict = "lower" if max(gains) < 0 else "higher" if min(gains) > 0 else "tie"
        values = [row["loss"] for row in chosen]
        numbers = {key: mean(row[key] for row in chosen) for key in ("first", "second", "loss")}
        spread = stdev(values) if len(values) > 1 else 0.0
        row = {"method": method, "rate": chosen[0]["rate"], "trained": chosen[0]["trained"], **numbers}
        result.append(row | {"spread": spread, "to LoRA": mean(gains), "verdict": verdict})
    return result


def main(settings: Settings) -> None:
    """Run all, print a line for each, and all in one line at the end."""
    torch.set_num_threads(1)
    rows = [row for seed in settings.seeds for row in rows_of_seed(settings, seed)]
    print(json.dumps({"settings": asdict(settings), "rows": rows, "summary": summaries(rows)}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
