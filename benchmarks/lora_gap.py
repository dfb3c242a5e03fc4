"""Validation loss of LoRA against full finetuning on real data, at several learning rates, with the same batches.

    dunes train stdlib --out runs/base --size 3m --context-length 512 --steps 560
    python benchmarks/lora_gap.py runs/lora-gap.jsonl runs/base gsm8k_train.json.gz --examples 2000 \\
        --picture docs/figures/lora-rates.svg

Finished runs are appended to the file and not repeated, so that a sweep can be resumed, and several processes may
share it. The validation loss is of answers, in nats/token, after the last step; "own text" is the base's
validation split and measures forgetting. The same for a base that was trained on the language of the problems:

    python benchmarks/lora_gap.py runs/lora-gap.jsonl runs/base gsm8k_train.json.gz --examples 2000 \\
        --ranks 0 --full-rates 1e-2 --tuned runs/tuned
    python benchmarks/lora_gap.py runs/lora-gap-tuned.jsonl runs/tuned gsm8k_train.json.gz --examples 2000 \\
        --skip 2000 --epochs 1
"""

import json
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from dunes import augment, checkpoint, measure, tree
from dunes.bench import plot
from dunes.checkpoint import LoadedModel
from dunes.data import Batches, examples
from dunes.evaluate.text_loss import evaluate, evaluation_tokens
from dunes.extra import extra
from dunes.files.json_file import append_record, read_records
from dunes.parts import Decoder
from dunes.text.templates import get_template
from dunes.train import Schedule, Trainer, adamw
from dunes.train.loss import next_token_loss

import curves
import torch
import tyro

Row = dict[str, Any]
OWN = 1 << 16
"""Tokens of the base's own text that are scored."""
CHECKS = 4
EMBEDDING = "embed.token.weight"


@dataclass(frozen=True)
class Sweep:
    """Settings of all runs.

    Args:
        base: Model folder, by `dunes train`.
        data: Instruction examples.
        epochs: Number of epochs.
        examples: Number of training examples; 0 is all.
        skip: Number of examples to skip.
        batch: Packed rows per step.
        alpha: LoRA's alpha.
        seed: Random seed of data order and LoRA's initialisation.
    """

    base: str
    data: str
    epochs: int = 3
    examples: int = 0
    skip: int = 0
    batch: int = 8
    alpha: float = 32.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One run: LoRA at a rank, or full finetuning (0). `other_embedding`: frozen at rank 0, trained with LoRA."""

    sweep: Sweep
    rank: int
    rate: float
    other_embedding: bool = False

    @property
    def method(self) -> str:
        words = f"LoRA, rank {self.rank}" if self.rank else "full"
        alpha = "" if self.sweep.alpha == Sweep.alpha or not self.rank else f", alpha {self.sweep.alpha:g}"
        return words + alpha + (", embedding " + ("learns" if self.rank else "frozen")) * self.other_embedding

    @property
    def key(self) -> Row:
        shared = asdict(self.sweep) | {"base": Path(self.sweep.base).name, "data": Path(self.sweep.data).name}
        return {"method": self.method, "rank": self.rank, "rate": self.rate, **shared}


def prepare_model(run: Run, model: Decoder) -> None:
    """Attach the adapter, and freeze all weights that are not trained."""
    learns = ["**"]
    if run.rank:
        learns = augment.attach(model, rank=run.rank, alpha=run.sweep.alpha, seed=run.sweep.seed).new
    chosen = [*learns, *([EMBEDDING if run.rank else f"!{EMBEDDING}"] if run.other_embedding else [])]
    for name, p in model.named_parameters():
        p.requires_grad_(tree.matches(chosen, name))


def batches(sweep: Sweep, loaded: LoadedModel) -> tuple[Batches, Batches]:
    """Training and validation batches."""
    sides = examples.split_records(examples.read_records(sweep.data).rows)
    rows = (sides[0][sweep.skip :][: sweep.examples or None], sides[1])
    train, valid = (list(examples.tokenize_records(r, get_template("plain"), loaded.tokenizer)) for r in rows)
    return (
        Batches(train, loaded.context_length, sweep.batch, sweep.seed),
        Batches(valid, loaded.context_length, 16, sweep.seed),
    )


@torch.no_grad()
def validation_loss(model: Decoder, data: Batches, dtype: torch.dtype) -> float:
    """The loss of all validation answers in nats/token."""
    with tree.mode(model, False), torch.autocast("cpu", dtype, dtype != torch.float32):
        sums = (
            torch.tensor([[float(v) for v in next_token_loss(model, batch)[:2]] for batch in data.one_epoch()])
            .double()
            .sum(0)
        )
    return float(sums[0] / sums[1])


def own_text_bits(loaded: LoadedModel, dtype: torch.dtype) -> float:
    """Bits/byte on the base's validation split, in windows spread over it."""
    return evaluate(loaded, evaluation_tokens(loaded)[0], dtype, OWN).bits_per_byte


@torch.no_grad()
def truncate_update(tuned: Decoder, base: Decoder, rank: int, embedding: bool = True) -> Decoder:
    """The finetuned model with the update of each matrix in the blocks truncated to that rank by SVD.

    Without `embedding` the base's embedding is restored, too.
    """
    truncated = deepcopy(tuned)
    for name, p in truncated.named_parameters():
        before = base.get_parameter(name)
        if name == EMBEDDING:
            p.copy_(p if embedding else before)
        elif p.dim() == 2:
            u, s, v = torch.linalg.svd(p - before, full_matrices=False)
            p.copy_(before + (u[:, :rank] * s[:rank]) @ v[:rank])
    return truncated


def truncated_losses(tuned: Decoder, base: Decoder, valid: Batches, dtype: torch.dtype) -> dict[str, float]:
    """Validation losses of the fully finetuned model with truncated updates."""
    ranks = (4, 16, 64, 10**6)
    variants = {
        f"rank {r}, embedding {'changed' if e else 'as it was'}": (r, e) for e in (True, False) for r in ranks
    }
    return {
        words: validation_loss(truncate_update(tuned, base, *variant), valid, dtype)
        for words, variant in variants.items()
    }


@cache
def base_losses(base: str, data: str, dtype: torch.dtype) -> tuple[float, float]:
    """The base's loss on validation answers, and bits/byte on its own text."""
    loaded = checkpoint.load(base)
    valid = batches(Sweep(base, data, examples=1), loaded)[1]
    return validation_loss(loaded.model, valid, dtype), own_text_bits(loaded, dtype)


def train(run: Run, dtype: torch.dtype, tuned: Path | None) -> Row:
    loaded = checkpoint.load(run.sweep.base)
    model, (learn, valid) = loaded.model, batches(run.sweep, loaded)
    size, before = tree.count(model), base_losses(run.sweep.base, run.sweep.data, dtype)
    prepare_model(run, model)
    total = run.sweep.epochs * learn.rows_per_epoch // run.sweep.batch
    checks, seconds, start = list[float](), 0.0, time.perf_counter()
    rate = Schedule.steps(total, warmup=total // 20, decay=1.0).lr_scale
    optimizer = adamw(model, run.rate, decay=0.0)
    trainer = Trainer(model, optimizer, next_token_loss, lr_scale=rate, dtype=dtype, seed=run.sweep.seed)
    for step in trainer.run(learn.batches()):
        seconds += step.seconds
        if step.number % max(1, total // CHECKS) == 0 or step.number == total:
            checks.append(validation_loss(model, valid, dtype))
            print(f"{run.method} {run.rate:g}: step {step.number}/{total} {checks[-1]:.4f}", flush=True)
        if step.number == total:
            break
    if tuned is not None and not run.rank:
        checkpoint.save(model, tuned, loaded.tokenizer, loaded.context_length, {"trained": loaded.card["trained"]})
    return run.key | {
        "trainable": tree.count(model, trainable=True),
        "parameters": size,
        "before": before[0],
        "checks": checks,
        "loss": checks[-1],
        "least": min(checks),
        "own_before": before[1],
        "own": own_text_bits(loaded, dtype),
        "cuts": {} if run.rank else truncated_losses(model, checkpoint.load(run.sweep.base).model, valid, dtype),
        "steps": total,
        "seconds_a_step": seconds / total,
        "seconds": time.perf_counter() - start,
        "dtype": str(dtype).removeprefix("torch."),
    }


def read_results(out: Path) -> list[Row]:
    return read_records(out, "a run")


def table(rows: list[Row]) -> str:
    """The best rate of each method, and the gap to full finetuning."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: -r["loss"]):
        best[row["method"]] = row
    full_loss = best["full"]["loss"] if "full" in best else float("nan")
    lines = [
        "| method | trainable | share | best rate | validation loss | gap to full | own text, bits/byte |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(best.values(), key=lambda r: (r["rank"], r["method"])):
        share = row["trainable"] / row["parameters"]
        lines.append(
            f"| {row['method']} | {row['trainable']:,} | {share:.1%} | {row['rate']:g} | {row['loss']:.4f} | "
            f"{row['loss'] - full_loss:+.4f} | {row['own']:.3f} |"
        )
    first = rows[0]
    words = f"before: {first['before']:.4f} nats/token, {first['own_before']:.3f} bits/byte on its own text"
    return "\n".join([*lines, "", words])


def main(
    out: Path,
    sweep: Annotated[Sweep, tyro.conf.OmitArgPrefixes],
    ranks: tuple[int, ...] = (0, 4, 16, 64),
    full_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2),
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2),
    other_embedding: bool = False,
    threads: int = 1,
    tuned: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Measure.

    Args:
        out: Output file, one line per run.
        ranks: Ranks of LoRA; 0 is full finetuning.
        full_rates: Learning rates of full finetuning.
        rates: Learning rates of LoRA.
        other_embedding: Freeze the embedding in full finetuning, and train it with LoRA.
        threads: Number of threads.
        tuned: Output folder for the fully finetuned model.
        picture: Output file for a plot of loss over rate.
    """
    torch.set_num_threads(threads)
    measure.keep_freed_memory()
    measure.flush_denormals()
    dtype = measure.choose_dtype(torch.device("cpu"))
    for run in [Run(sweep, k, rate, other_embedding) for k in ranks for rate in (rates if k else full_rates)]:
        if not any(all(row[k] == v for k, v in run.key.items()) for row in read_results(out)):
            row = train(run, dtype, tuned)
            append_record(out, row)
    shared = {k: v for k, v in Run(sweep, 0, 0).key.items() if k not in ("method", "rank", "rate", "alpha")}
    rows = [r for r in read_results(out) if all(r[k] == v for k, v in shared.items())]
    print(table(rows))
    if picture is not None:
        usual = [r for r in rows if r["method"].count(",") < 2 and r["loss"] < r["before"]]
        title = "finetuning at several learning rates"
        plot.save_plot(loss_over_lr(usual, title, "validation loss, nats/token"), picture)
    print(json.dumps({"benchmark": "lora_gap", "rows": rows}))


def loss_over_lr(results: list[dict[str, Any]], title: str, of: str) -> Any:
    """A loss over the learning rate, a line for each `method`; records have `method`, `rate` and `loss`."""
    records = [{"method": str(f["method"]), "x": float(f["rate"]), "y": float(f["loss"])} for f in results]
    return (
        curves.line_plot(records, "method", title, "learning rate", of) + extra("plotnine", "plot").scale_x_log10()
    )


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
