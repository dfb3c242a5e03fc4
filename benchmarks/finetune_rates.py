"""Finetuning at several learning rates and lengths: the validation loss of each, and which ones diverge.

    dunes train stdlib --out runs/base --size 1m --context-length 256 --steps 1000
    python benchmarks/finetune_rates.py runs/rates.jsonl runs/base gsm8k_train.json.gz --methods lora full \\
        --steps 100 500 2000 --rates 3e-4 1e-3 3e-3 1e-2 3e-2

Each run trains like `dunes finetune`, and is validated eight times. Finished runs are appended to the file and not
repeated, so that a sweep can be resumed.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dunes import measure
from dunes.progress import Display
from dunes.runs.finetune import (
    FinetuneTask,
    apply_method,
    cast_frozen_weights,
    choose_options,
    load_base,
    optimizer,
)
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.finetune_data import FinetuneData
from dunes.runs.run import build_schedule
from dunes.train import Diverged, Trainer
from dunes.train.loss import next_token_loss

import torch
import tyro

Row = dict[str, Any]
CHECKS = 8
CHECK_TOKENS = 2048


@dataclass(frozen=True)
class Setting:
    """Settings of all runs.

    Args:
        context_length: Tokens per row.
        batch: Rows per step.
        rank: Rank of adapters.
        alpha: Alpha of adapters.
        beta2: Adam's beta2; 0 is the default of `dunes finetune`.
        template: Template of the examples.
        val_fraction: Fraction of the examples for validation.
        seed: Random seed of data order and adapter initialisation.
    """

    context_length: int = 256
    batch: int = 2
    rank: int = 16
    alpha: float = 32.0
    beta2: float = 0.0
    template: str = ""
    val_fraction: float = 0.05
    seed: int = 0


def base_config(base: str, data: str, setting: Setting) -> FinetuneConfig:
    options = {k: v for k, v in asdict(setting).items() if k != "beta2" and v != ""}
    return FinetuneConfig(model=base, data=data, max_truncated=1.0, threads=1, steps=1, **options)


def losses(data: FinetuneData, method: str, steps: int, rate: float | None, beta2: float) -> Row:
    """One run: its learning rate, the loss before it, and after each eighth of its steps."""
    config = replace(data.config, method=method, steps=steps, lr=rate, dtype=None)
    data = choose_options(replace(data, config=config, base=load_base(config)), QUIET)
    config, dtype = data.config, getattr(torch, data.config.dtype or "float32")
    task = FinetuneTask(data, None, dtype)
    before = task.score(CHECK_TOKENS).loss
    model = data.base.model
    apply_method(model, config)
    cast_frozen_weights(model, config)
    schedule, adam = build_schedule(config), optimizer(config, model)
    for group in adam.param_groups:
        group["betas"] = (group["betas"][0], beta2 or group["betas"][1])
    trainer = Trainer(model, adam, next_token_loss, lr_scale=schedule.lr_scale, dtype=dtype, seed=config.seed)
    checks, start = list[float](), time.perf_counter()
    try:
        for step in trainer.run(task.batches(0)):
            if step.number % max(1, steps // CHECKS) == 0 or step.number == steps:
                checks.append(task.score(CHECK_TOKENS).loss)
            if step.number == steps:
                break
    except Diverged:
        checks.append(float("inf"))
    seconds = time.perf_counter() - start
    return {"lr": config.lr, "before": before, "checks": checks, "seconds": seconds, "dtype": config.dtype}


QUIET = Display()
QUIET.line = lambda text="": None  # type: ignore[method-assign]


def read(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[Row]) -> str:
    """The final loss by method, length and rate; in parentheses the highest of all validations."""
    rates = sorted({r["lr"] for r in rows})
    lines = [f"| | {' | '.join(f'{rate:.2g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for method, steps in sorted({(r["method"], r["steps"]) for r in rows}):
        cells = {r["lr"]: r["checks"] for r in rows if (r["method"], r["steps"]) == (method, steps)}
        words = [f"{cells[x][-1]:.3f} ({max(cells[x]):.2f})" if x in cells else "" for x in rates]
        lines.append(f"| {method}, {steps} steps | {' | '.join(words)} |")
    return "\n".join(lines)


def main(
    out: Path,
    base: str,
    data: str,
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes],
    methods: tuple[str, ...] = ("lora",),
    steps: tuple[int, ...] = (100, 500, 2000),
    rates: tuple[float, ...] = (),
) -> None:
    """Measure.

    Args:
        out: Output file, one line per run.
        base: Model folder.
        data: Instruction examples.
        methods: Finetuning methods.
        steps: Numbers of steps.
        rates: Learning rates; without any, the default of each method.
    """
    measure.keep_freed_memory()
    measure.flush_denormals()
    shared = asdict(setting) | {"base": Path(base).name, "data": Path(data).name}
    config = base_config(base, data, setting)
    data = FinetuneData.read(config, load_base(config), QUIET)
    for method, length, rate in [(m, n, r) for n in steps for m in methods for r in rates or (None,)]:
        key = shared | {"method": method, "steps": length, "asked": rate}
        if not any(all(row[k] == v for k, v in key.items()) for row in read(out)):
            row = key | losses(data, method, length, rate, setting.beta2)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = " ".join(f"{loss:.3f}" for loss in row["checks"])
            print(
                f"{method} {length} {row['lr']:.2g}: {row['before']:.3f} -> {shown}  {row['seconds']:.0f} s",
                flush=True,
            )
    rows = [r for r in read(out) if all(r[k] == v for k, v in shared.items())]
    print(table(rows))
    print(json.dumps({"benchmark": "finetune_rates", "rows": rows}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
