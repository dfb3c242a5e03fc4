"""Distillation from a larger model on one's own text, beside plain training in the same minutes, paired by seed.

    dunes train TEXT --no-complete --size 10m --minutes 40 --out runs/teacher
    python benchmarks/distillation.py runs/distillation.jsonl runs/teacher --minutes 3 --seeds 0 1 2

Each student trains as `dunes train --no-complete --size 1m --minutes M` does, in a process of its own, with the
teacher's text, split and tokenizer. Its loss is (1 - SHARE) times the cross entropy plus SHARE times the forward
divergence KL(p_T || p_S), where p_T are the teacher's TOP largest probabilities, divided by their sum, and p_S
all of the student's; both at temperature 1 (https://arxiv.org/abs/1503.02531). Variants:

- plain: the cross entropy alone.
- live: the teacher reads each window of the student.
- stored: the teacher reads the training text once, before the first step, in windows that overlap by half, so that
  each token is predicted from half of a context or more; the student's windows look up what is stored.
- apart: the same with windows that do not overlap, in half of the time.
- given: as stored, but read from the file that the last stored run wrote: what distillation brings at no cost.

The minutes include all of the teacher's work but the pass of `given`. Finished runs are appended to the file and
not repeated. The last line is JSON: the mean difference to plain in validation bits/byte, and half of the width of
Student's 95 % interval over the seeds.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

from dunes import measure
from dunes.bench.rows import Row
from dunes.checkpoint import load_with_tokenizer
from dunes.checkpoint.card import read_card
from dunes.data import TokenIds, Windows
from dunes.extra import python_command
from dunes.files import json_file
from dunes.ops.cross_entropy import CHUNK, LARGE_CHUNK
from dunes.ops.operation import autocast_dtype
from dunes.parts import Decoder
from dunes.parts.decoder import LossSums
from dunes.progress import Display, print_table
from dunes.runs import train as training
from dunes.runs.train_config import TrainConfig
from dunes.text import Tokenizer

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from parts import interval
from torch import Tensor

TOP, SHARE = 32, 0.5
BATCH = 16
Variant = Literal["plain", "live", "stored", "apart", "given"]
Guess = tuple[Tensor, Tensor]
"""The TOP most probable ids (..., TOP), int64, and their log-probabilities, whose exponentials sum to 1."""


# The loss. Its gradient needs no more than the probabilities that cross entropy needs: it is p_S minus the target.


def soft_cross_entropy(
    x: Tensor, weight: Tensor, ids: Tensor, shares: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross entropy (float32) of the logits x @ weight.T for targets `ids` (N, K) in `shares` (N, K).

    The shares of a row sum to 1; an id may occur twice. Also the gradients of x (N, D) and weight (V, D), float32.
    """
    loss, matrix = x.new_zeros((), dtype=torch.float32), weight.to(dtype)
    dx, dw = (torch.empty_like(x, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32))
    size = max(256, CHUNK.get(x.device.type, LARGE_CHUNK) // len(weight))
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            part = x[rows].to(dtype)
            logits = (part @ matrix.T).float()
            probs = logits.softmax(-1)
            logsumexp = logits.amax(-1) - probs.amax(-1).log()
            loss += logsumexp.sum() - (logits.gather(1, ids[rows]) * shares[rows]).sum()
            grad = probs.scatter_add_(1, ids[rows], -shares[rows]).to(dtype)
            dx[rows] = grad @ matrix
            dw += grad.T @ part
    return loss, dx, dw


operator = torch.library.custom_op("benchmarks::soft_cross_entropy", soft_cross_entropy, mutates_args=())


@operator.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, shares: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return x.new_empty((), dtype=torch.float32), *(t.new_empty(t.shape, dtype=torch.float32) for t in (x, weight))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    return (
        *((g * grad).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)),
        None,
        None,
        None,
    )


operator.register_autograd(_backward, setup_context=_keep)


class Eager(torch.autograd.Function):
    """The same without the dispatch of an operator."""

    forward = staticmethod(soft_cross_entropy)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_backward)


def distilled_loss(model: Decoder, batch: Sequence[Tensor], share: float = SHARE) -> LossSums:
    """The summed loss for ids, targets (B, T) and the teacher's guess (B, T, K), and the number of targets."""
    ids, targets, top, logprobs = batch
    x, weight = model.hidden(ids).flatten(0, 1), model._head_weight()
    probs = share * logprobs.exp()
    hard = torch.full_like(targets, 1 - share, dtype=torch.float32)
    wanted, shares = torch.cat([top, targets[..., None]], -1), torch.cat([probs, hard[..., None]], -1)
    apply: Any = operator if torch.compiler.is_compiling() else Eager.apply
    total = apply(x, weight, wanted.flatten(0, 1), shares.flatten(0, 1), autocast_dtype(x))[0]
    loss = total + (probs * logprobs).sum()  # minus the entropy of the teacher, so that it is a divergence
    return loss, torch.tensor(targets.numel(), device=loss.device), {}


# The teacher.


@dataclass(frozen=True)
class Teacher:
    """A model and the dtype of its products."""

    model: Decoder
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, ids: Tensor, first: int = 0) -> Guess:
        """The guesses (B, T - first, TOP) of what follows ids (B, T), from position `first` on."""
        with torch.autocast(ids.device.type, self.dtype, self.dtype != torch.float32):
            logits = self.model.logits(self.model.hidden(ids)[:, first:])
        top, best = logits.topk(TOP, sorted=False)
        return best, top.float().log_softmax(-1)


@dataclass(frozen=True)
class Stored:
    """What a teacher guesses for each token of a text: ids (N, TOP), uint16, and log-probabilities, float16."""

    ids: NDArray[np.uint16]
    logprobs: NDArray[np.float16]

    @classmethod
    def of(cls, teacher: Teacher, tokens: TokenIds, context: int, before: int) -> "Stored":
        """Each token but those of the first window is predicted from more than `before` tokens."""
        stored = cls(np.zeros((len(tokens), TOP), np.uint16), np.zeros((len(tokens), TOP), np.float16))
        last = len(tokens) - 1 - context
        starts = np.minimum(np.arange(0, last + context - before, context - before), last)
        stored._fill(teacher, tokens, starts[:1], context, 0)
        for i in range(0, len(starts), BATCH):
            stored._fill(teacher, tokens, starts[i : i + BATCH], context, before)
        return stored

    def _fill(
        self, teacher: Teacher, tokens: TokenIds, starts: NDArray[np.int64], context: int, first: int
    ) -> None:
        index = starts[:, None] + np.arange(context)
        guess = teacher(torch.from_numpy(tokens[index].astype(np.int64)), first)
        for array, part in zip((self.ids, self.logprobs), guess, strict=True):
            array[index[:, first:] + 1] = part.numpy()

    def at(self, index: NDArray[np.int64]) -> Guess:
        """The guesses for the tokens at these indices."""
        ids = torch.from_numpy(self.ids[index].astype(np.int64))
        return ids, torch.from_numpy(self.logprobs[index]).float().log_softmax(-1)  # what float16 rounds away


@dataclass(frozen=True)
class Distilled(training.TrainTask):
    """The task of `dunes train`, with the guesses of a teacher in its batches."""

    guesses: Teacher | Stored | None = None

    def batches(self, start: int) -> Iterator[tuple[Tensor, ...]]:
        length, size = self.config.context_length, self.config.batch
        windows = Windows(self.text.train, length, size, self.config.seed)
        for number in count(start):
            window = windows.batch(number)
            assert isinstance(window, Tensor), "of plain text"
            ids, targets = window[:, :-1], window[:, 1:]
            if isinstance(self.guesses, Teacher):
                yield ids, targets, *self.guesses(ids)
            elif self.guesses is not None:
                starts = windows.starts(np.arange(number * size, (number + 1) * size))
                yield ids, targets, *self.guesses.at(starts[:, None] + np.arange(1, length + 1))


def train(teacher: Path, variant: Variant, config: TrainConfig, folder: Path, kept: Path) -> None:
    """Train a student in the folder. The seconds of the teacher's pass are written to `teacher.json` there."""
    tokenize, prepare, tokenizer = training.tokenize, training.prepare, Tokenizer.load(teacher)

    def prepare_distilled(config: TrainConfig, *arguments: Any) -> Any:
        run, start = prepare(config, *arguments), perf_counter()
        teaches = Teacher(load_with_tokenizer(teacher).model, getattr(torch, config.dtype or "float32"))
        guesses: Teacher | Stored = teaches
        if variant == "given":
            guesses = Stored(*np.load(kept).values())
        elif variant != "live":
            before = config.context_length // 2 if variant == "stored" else 0
            guesses = Stored.of(teaches, run.task.text.train, config.context_length, before)
            if variant == "stored":
                np.savez(kept, ids=guesses.ids, logprobs=guesses.logprobs)
        run.task, run.trainer.loss = Distilled(**vars(run.task), guesses=guesses), distilled_loss
        (folder / "teacher.json").write_text(json.dumps(perf_counter() - start))
        return run

    training.tokenize = lambda config, corpus, known, display: tokenize(config, corpus, tokenizer, display)
    training.prepare = prepare if variant == "plain" else prepare_distilled
    training.train(config, folder, Display())


def run_row(out: Path, teacher: Path, variant: Variant, minutes: float, seed: int, size: str) -> Row:
    """Train one student in a process of its own, and read what was measured. Raises ValueError if it fails."""
    folder = out.with_suffix(".running")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    options = ("--minutes", f"{minutes}", "--seeds", f"{seed}", "--variants", variant, "--size", size)
    command, environment = python_command(__file__, f"{out}", f"{teacher}", *options, "--folder", f"{folder}")
    with out.with_suffix(".log").open("a") as log, TemporaryDirectory() as cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache  # else only the first of long runs would pay for compiling
        if subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode:
            raise ValueError(f"{variant}, seed {seed}: failed; {log.name} has its lines")
    card = read_card(folder)
    trained, timings = card["trained"], card["timings"]
    seconds = json.loads((folder / "teacher.json").read_text()) if variant != "plain" else 0.0
    row = {
        "variant": variant, "seed": seed, "minutes": minutes, "size": size,
        "steps": trained["steps"], "tokens": trained["steps"] * trained["batch"] * trained["context_length"],
        "bits_per_byte": card["measured"]["bits_per_byte"], "best_step": trained["best_step"],
        "seconds": trained["seconds"], "teacher_seconds": seconds, "timings": timings,
        "peak_bytes": card["measured"]["peak_bytes"], "teacher": card_of(teacher), **measure.fingerprint(),
    }  # fmt: skip
    shutil.rmtree(folder)
    return row


def card_of(teacher: Path) -> Row:
    card = read_card(teacher)
    return {"bits_per_byte": card["measured"]["bits_per_byte"], "steps": card["trained"]["steps"]}


def differences(rows: Sequence[Row]) -> list[Row]:
    """For each variant and minutes: mean bits/byte and tokens, and the difference to plain with its interval."""
    plain = {(r["minutes"], r["seed"]): r["bits_per_byte"] for r in rows if r["variant"] == "plain"}
    results = []
    for minutes, variant in dict.fromkeys((r["minutes"], r["variant"]) for r in rows):
        same = [r for r in rows if (r["minutes"], r["variant"]) == (minutes, variant)]
        pairs = [r["bits_per_byte"] - plain[minutes, r["seed"]] for r in same if (minutes, r["seed"]) in plain]
        means = {name: mean(r[name] for r in same) for name in ("bits_per_byte", "tokens", "teacher_seconds")}
        middle, half = interval(pairs) if pairs else (None, None)
        pair = {"pairs": len(pairs), "difference": middle, "half": half}
        results.append({"minutes": minutes, "variant": variant, **means, **pair})
    return results


def main(
    out: Path,
    teacher: Path,
    minutes: float = 3.0,
    seeds: tuple[int, ...] = (0, 1, 2),
    variants: tuple[Variant, ...] = ("plain", "stored"),
    size: str = "1m",
    folder: Path | None = None,
) -> None:
    """Measure what is missing in a file of results.

    Args:
        out: File of results, JSON lines.
        teacher: Folder of a model that `dunes train --no-complete` trained.
        minutes: Length of each run.
        seeds: Seeds; all variants of a seed are trained before the next seed.
        variants: What to compare.
        size: Size of the students.
        folder: Train one student in this folder (used internally).
    """
    card = read_card(teacher)["trained"]
    if folder is not None:
        text = {name: card[name] for name in ("split", "follow_links")} | {"sources": tuple(card["sources"])}
        text["text_field"] = tuple(card["text_field"])
        config = TrainConfig(size=size, minutes=minutes, seed=seeds[0], complete=False, threads=1, **text)
        folder.mkdir()
        train(teacher, variants[0], config, folder, out.with_suffix(".npz"))
        return
    read = lambda: json_file.read_records(out, "a run of distillation.py", lambda row: "variant" in row)
    known = {(r["variant"], r["minutes"], r["seed"], r["size"]) for r in read()}
    for seed in seeds:
        for variant in variants:
            if (variant, minutes, seed, size) not in known:
                row = run_row(out, teacher, variant, minutes, seed, size)
                json_file.append_record(out, row)
                print(f"{variant}, {minutes:g} minutes, seed {seed}: {row['bits_per_byte']:.4f}", flush=True)
    results = differences([r for r in read() if r["size"] == size])
    columns = {
        "minutes": "g", "variant": "", "bits_per_byte": ".4f", "tokens": ",.0f", "teacher_seconds": ".0f",
        "difference": "+.4f", "half": ".4f", "pairs": "",
    }  # fmt: skip
    lines = [["" if r[n] is None else f"{r[n]:{form}}" for n, form in columns.items()] for r in results]
    title = f"students of {size}; the teacher has {card_of(teacher)['bits_per_byte']:.4f} bits/byte"
    print_table(title, [name.replace("_", " ") for name in columns], lines)
    print(json.dumps({"benchmark": "distillation", "results": results}))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
