"""Compare variants of a model's parts on a text: all are trained equally long, and results are paired by seed.

    python benchmarks/parts.py ~/code/project --vary mlp=gated,gelu norm=layer position=alibi+kv=one

Each variant trains as `dunes train --parts` does, in a process of its own, with the size and settings that were
chosen for the default model: once for the same time, and once for the steps that the default model made in it.
The difference in validation bits/byte is paired by the seed, which also orders the data; its interval is Student's
at 95 %. With `budget`, all train by the clock alone, the worse half leaves after each rung, and the rest
trains twice as long: successive halving (https://arxiv.org/abs/1502.07943). The same command goes on after an
interruption. The last line is JSON.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from time import process_time
from typing import Annotated, Any

from dunes import measure
from dunes.bench.benchmarks import BENCHMARKS
from dunes.bench.plot import save_plot
from dunes.bench.rows import Row
from dunes.bench.runner import race
from dunes.bench.subject import Setting, of_folder
from dunes.checkpoint.card import read_card
from dunes.completion.fit import STUDENT
from dunes.extra import extra, python_command
from dunes.files import json_file
from dunes.files.atomic import folder_lock
from dunes.files.model_file import trust_cards
from dunes.flags import PARTS, REQUIRED, flag, is_path, option
from dunes.progress import Display, print_table, report, shown_by
from dunes.runs.autosize import architecture_for, vocabulary
from dunes.runs.train_config import Tokenization, TrainConfig
from dunes.units import format_seconds, plural

import torch
import tyro

DEFAULT = "default"
CLOCK, TOKENS = "minutes", "tokens"
ROWS, SETTINGS, PICTURE = "runs.jsonl", "settings.json", "parts.svg"
DECODED = 128
"""Length of the texts whose second half is decoded to measure the speed."""


@dataclass(frozen=True)
class Plan:
    """The arguments of `main`."""

    sources: tuple[str, ...]
    variants: tuple[str, ...]
    minutes: float
    seeds: int
    size: str
    tokenizer: str
    budget: float | None

    def __post_init__(self) -> None:
        """Raises ValueError, before any run, for invalid values and for variants that cannot be built."""
        for name, value, least in (("minutes", self.minutes, 0.05), ("seeds", self.seeds, 1)):
            if not least <= value < 1e6:
                raise ValueError(f"--{name} is {value}; expected at least {least}")
        if self.budget is not None and not 0 < self.budget < 1e6:
            raise ValueError(f"--budget is {self.budget}; expected hours, more than 0")
        if missing := [s for s in self.sources if is_path(s) and not Path(s).exists()]:
            raise ValueError(f"{missing[0]}: no such file or folder")
        if len(self.variants) < 2:
            raise ValueError("nothing to compare; name variants, for example --vary mlp=gated,gelu norm=layer")
        for variant in self.variants[1:]:
            fixed: dict[str, Any] = {
                "size": self.size or "2x64",
                "tokenizer": self.tokenizer,
                "context_length": 256,
            }
            config = TrainConfig(sources=("-",), parts=_parts(variant), **fixed)
            architecture_for(config, vocabulary(config))

    @property
    def rungs(self) -> list[tuple[float, int]]:
        """(minutes, number of variants without the default) of each rung; one rung without a budget."""
        others = len(self.variants) - 1
        if self.budget is None:
            return [(self.minutes, others)]
        counts = [math.ceil(others / 2**i) for i in range(math.ceil(math.log2(others)) + 1)]
        runs = sum((count + 1) * 2**i for i, count in enumerate(counts))
        shortest = 60 * self.budget / self.seeds / runs
        if shortest < 0.05:
            raise ValueError(
                f"--budget is {self.budget:g} hours, {60 * shortest:.1f} s for the first runs; allow more"
            )
        return [(shortest * 2**i, count) for i, count in enumerate(counts)]


def read_variants(texts: Sequence[str]) -> tuple[str, ...]:
    """The default and the variants in values of --vary; "," separates variants, "+" joins parts of one variant.

    "mlp=gated,gelu" are two variants, "mlp=gated+norm=layer" is one, and so is "FILE.py:FUNCTION".
    """
    variants, name = [DEFAULT], ""
    for text in texts:
        for item in text.split(","):
            complete = item if "=" in item or ":" in item else f"{name}={item}"
            name = complete.partition("=")[0] if "=" in complete else ""
            variant = "+".join(sorted(part for part in complete.split("+") if not _is_default(part)))
            if variant and variant not in variants:
                variants.append(variant)
    return tuple(variants)


def _is_default(part: str) -> bool:
    name, _, choice = part.partition("=")
    return choice == PARTS.get(name, ("another",))[0]


def _parts(variant: str) -> tuple[str, ...]:
    """The parts of a variant; the default has those of `flags.PARTS`, whatever the default family is."""
    default = [f"{name}={choices[0]}" for name, choices in PARTS.items()]
    return tuple(default if variant == DEFAULT else variant.split("+"))


@dataclass(frozen=True)
class Job:
    """One training run; `steps` is None if `minutes` limits the run."""

    variant: str
    seed: int
    minutes: float
    steps: int | None = None

    @property
    def by(self) -> str:
        return CLOCK if self.steps is None else TOKENS


SETTINGS_KEPT = ("size", "tokenizer", "batch", "context_length", "dtype", "threads")
"""Settings chosen for the default model's run and reused in all runs with the same seed."""


def bench_parts(plan: Plan, out: Path) -> tuple[list[list[Row]], dict[str, str]]:
    """Train the runs that the folder `out` lacks; returns the summary of each rung, and errors by failed variant.

    Raises ValueError if the folder is in use or has other sources, size or tokenizer, and if the default model's
    run fails.
    """
    rungs, stored = plan.rungs, {n: v for n, v in asdict(plan).items() if n in ("sources", "size", "tokenizer")}
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out, wait=False):
            _begin(out, json.loads(json.dumps(stored)))
            return _rungs(plan, rungs, out)
    except BlockingIOError:
        raise ValueError(f"{out}: in use by another process; wait for it, or choose another --out") from None


def _begin(out: Path, stored: Row) -> None:
    if (settings := out / SETTINGS).exists():
        if json_file.read(settings) != stored:
            raise ValueError(f"{out}: was started with other settings ({settings}); choose another --out")
    elif any(out.iterdir()):
        raise ValueError(f"{out}: contains other files; choose another --out")
    else:
        settings.write_text(json.dumps(stored, indent=1))


def _rungs(plan: Plan, rungs: Sequence[tuple[float, int]], out: Path) -> tuple[list[list[Row]], dict[str, str]]:
    variants, summaries, failed = plan.variants, list[list[Row]](), dict[str, str]()
    for number, (minutes, _) in enumerate(rungs):
        words = f"rung {number + 1} of {len(rungs)}, " * (len(rungs) > 1)
        rows = [*_rung(plan, variants, minutes, out, words, failed)]
        summaries.append(summary(rows, variants := tuple(v for v in variants if v not in failed)))
        best = sorted(summaries[-1][1:], key=lambda row: row["difference"][CLOCK][0])
        if number + 1 < len(rungs):
            variants = (DEFAULT, *[row["variant"] for row in best[: rungs[number + 1][1]]])
    if find_spec("plotnine") and len(summaries[-1]) > 1:  # plotnine is optional
        save_plot(differences(summaries[-1]), out / PICTURE)
    return summaries, failed


def _rung(
    plan: Plan, variants: Sequence[str], minutes: float, out: Path, words: str, failed: dict[str, str]
) -> Iterator[Row]:
    """Yield the rows of these variants. Runs that the file lacks are trained and appended."""
    known = {Job(*[r[f] for f in ("variant", "seed", "minutes", "steps")]): r for r in _read(out / ROWS)}
    by_tokens = plan.budget is None
    total, done, spent = plan.seeds * ((1 + by_tokens) * (len(variants) - 1) + 1), 0, list[float]()
    for seed in range(plan.seeds):
        first: Row = {}
        for job in _jobs(variants, seed, minutes, first, by_tokens):
            if job.variant in failed:
                continue
            if (row := known.get(job)) is None:
                left = format_seconds(60 * minutes * (total - done) * (mean(spent) if spent else 1.2))
                report(f"{words}{job.variant}, equal {job.by}, seed {seed}; about {left} left", done / total)
                try:
                    row = _train(plan, job, out, first)
                except ValueError as error:
                    if job.variant == DEFAULT:
                        raise
                    failed[job.variant] = str(error)
                    continue
                spent.append(row["elapsed"] / (60 * minutes))
                json_file.append_record(out / ROWS, row)
            first.update(row if job.variant == DEFAULT else {})
            done += 1
            yield row


def _jobs(variants: Sequence[str], seed: int, minutes: float, first: Row, by_tokens: bool) -> Iterator[Job]:
    """Yield the default's run, whose row the caller puts in `first`, then the others in alternating order."""
    yield Job(DEFAULT, seed, minutes)
    others = list(variants[1:])
    for variant in others if seed % 2 == 0 else reversed(others):
        yield Job(variant, seed, minutes)
        if by_tokens:
            yield Job(variant, seed, minutes, first["made_steps"])


def _read(path: Path) -> list[Row]:
    return json_file.read_records(path, "a run of benchmarks/parts.py", lambda row: "variant" in row)


def _train(plan: Plan, job: Job, out: Path, first: Row) -> Row:
    """Train one variant in its own process, measure the saved model, and remove its folder.

    `first` is the default model's row for this seed; its settings are used. Raises ValueError if the run fails.
    """
    if (folder := out / "running").is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
    length = ["--minutes", f"{job.minutes}"] if job.steps is None else ["--steps", f"{job.steps}"]
    chosen = {"size": plan.size, "tokenizer": plan.tokenizer} | dict(first.get("settings", {}))
    chosen = {name: chosen[name] for name in SETTINGS_KEPT if chosen.get(name)}
    options = [word for name, value in chosen.items() for word in (f"--{option(name)}", f"{value}")]
    parts = ["--parts", *_parts(job.variant)]
    fixed = ["--out", f"{folder}", "--seed", f"{job.seed}", "--no-complete", "--quiet", *length, *parts]
    command, environment = python_command("-m", "dunes", "train", *plan.sources, *options, *fixed)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ValueError(f"{job.variant}, seed {job.seed}: {line[0]}; what was measured is kept in {out}")
    row = _row(job, folder)
    shutil.rmtree(folder)
    return row


def _row(job: Job, folder: Path) -> Row:
    card = read_card(folder)
    trained, timings = card["trained"], card["timings"]
    tokens = trained["steps"] * trained["batch"] * trained["context_length"]
    return {
        **asdict(job),
        "made_steps": trained["steps"],
        "elapsed": trained["seconds"],
        "bits_per_byte": card["measured"]["bits_per_byte"],
        "rate": tokens / (timings.get("steps", 0.0) + timings["first step"]),
        "peak_bytes": card["measured"]["peak_bytes"],
        "decode_rate": _decode_rate(folder, trust=":" in job.variant),
        "settings": {name: trained[name] for name in SETTINGS_KEPT},
        **measure.fingerprint(),
    }


def _decode_rate(folder: Path, trust: bool) -> float:
    """Tokens per second of processor time on one thread, the median of five laps.

    Variants are decoded minutes apart; processor time is robust to other programs that run meanwhile. `trust`
    allows the import of the function that the variant names.
    """
    with trust_cards(trust):
        subject = of_folder(folder)
        work = BENCHMARKS["decode"].make(subject, Setting(1, min(DECODED, subject.context), "float32", 1))
    torch.set_num_threads(1)
    return work.amount / median(lap.seconds for lap in race({"": work}, 5, clock=process_time))


def summary(rows: Sequence[Row], variants: Sequence[str]) -> list[Row]:
    """Gains and costs of each variant relative to the default.

    `difference` maps "minutes" and, if measured, "tokens" to the mean difference in bits/byte and half the width
    of its interval (None for a single seed). `rate`, `decode_rate` and `peak_bytes` are such pairs of ratios.
    """
    results = []
    for variant in variants:
        pairs = {by: _pairs(rows, variant, by) for by in (CLOCK, TOKENS)}
        ratios = {
            name: interval([a[name] / b[name] for a, b in pairs[CLOCK]])
            for name in ("rate", "decode_rate", "peak_bytes")
        }
        bits = mean(a["bits_per_byte"] for a, _ in pairs[CLOCK])
        differences = {
            by: interval([a["bits_per_byte"] - b["bits_per_byte"] for a, b in each])
            for by, each in pairs.items()
            if each
        }
        results.append({"variant": variant, "bits_per_byte": bits, "difference": differences, **ratios})
    return results


def _pairs(rows: Sequence[Row], variant: str, by: str) -> list[tuple[Row, Row]]:
    """Pairs of a variant's row and the default's row with the same seed, for equal minutes or tokens (`by`)."""
    default = {row["seed"]: row for row in rows if row["variant"] == DEFAULT}
    same = [row for row in rows if row["variant"] == variant]
    if variant == DEFAULT and any((r["steps"] is None) == (by == CLOCK) for r in rows):
        return [(r, r) for r in same]
    return [(r, default[r["seed"]]) for r in same if (r["steps"] is None) == (by == CLOCK)]


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and half the width of Student's 95 % interval (None for a single value)."""
    if len(values) < 2:
        return mean(values), None
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return mean(values), quantile * stdev(values) / math.sqrt(len(values))


def print_summary(results: Sequence[Row], title: str) -> None:
    """Print one line per variant, sorted by the difference in equal time; the default has zeros."""

    def cell(value: tuple[float, float | None] | None, form: str = "+.4f") -> str:
        if value is None:
            return ""
        middle, half = value
        return f"{middle:{form}}" + (f" ± {half:{form.lstrip('+')}}" if half else "")

    lines = []
    for row in sorted(results, key=lambda row: row["difference"][CLOCK][0]):
        costs = [cell(row[name], ".2f") for name in ("rate", "peak_bytes", "decode_rate")]
        both = [cell(row["difference"].get(by)) for by in (CLOCK, TOKENS)]
        lines.append([row["variant"], f"{row['bits_per_byte']:.4f}", both[0], verdict(row), both[1], *costs])
    columns = ["", "bits/byte", "equal minutes", "", "equal tokens", "tokens/s", "memory", "decoding"]
    print_table(title, columns, lines)


def verdict(row: Row) -> str:
    """ "helps" or "harms" if the interval in equal time excludes 0; empty for the default or a single seed."""
    middle, half = row["difference"][CLOCK]
    if row["variant"] == DEFAULT or half is None:
        return ""
    return "no difference seen" if abs(middle) <= half else "helps" if middle < 0 else "harms"


def differences(results: Sequence[Row]) -> Any:
    """The plot of each variant's difference in bits/byte, with its interval."""
    p, records = extra("plotnine", "plot"), []
    for row in results[1:]:
        for by, (middle, half) in row["difference"].items():
            low, high = middle - (half or 0.0), middle + (half or 0.0)
            records.append({"variant": row["variant"], "equal": by, "bits": middle, "low": low, "high": high})
    frame = extra("polars", "plot").DataFrame(records)
    plot = p.ggplot(frame, p.aes(x="variant", y="bits", ymin="low", ymax="high", color="equal"))
    plot += p.theme_minimal() + p.theme(figure_size=(7, 1.5 + 0.4 * len(results)), legend_position="bottom")
    plot += p.geom_hline(yintercept=0, linetype="dashed")
    plot += p.geom_pointrange(position=p.position_dodge(width=0.4))
    return plot + p.coord_flip() + p.labs(x="", y="bits/byte beside the default; left is better", color="equal")


def main(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    vary: Annotated[tuple[str, ...], flag("PART=CHOICE,...|FILE.py:FUNCTION", REQUIRED)] = (),
    minutes: float = 3.0,
    seeds: int = 3,
    size: Annotated[str, flag("SIZE", "chosen from --minutes")] = "",
    tokenizer: Tokenization = "bpe",
    budget: Annotated[float | None, flag("HOURS", "none")] = None,
    out: Path = Path("runs/parts"),
) -> int:
    """Show which parts of a model help on your text.

    Args:
        sources: Files and folders of text, as for dunes train.
        vary: Choices for parts of the default model; "+" joins several in one variant.
        minutes: Duration of each run.
        seeds: Number of runs of each variant; pairs with the default have the same seed and order of the text.
        size: Number of parameters, or LAYERSxWIDTH, of the default model.
        tokenizer: Tokenizer to train.
        budget: Hours for successive halving: the worse half leaves, the rest trains twice as long.
        out: Folder for the results and the plot.
    """
    from rich.console import Console

    plan = Plan(sources, read_variants(vary), minutes, seeds, size, tokenizer, budget)
    with Display(Console(stderr=True, highlight=False)) as display, shown_by(display.state):
        rungs, failed = bench_parts(plan, out)
    for (length, _), results in zip(plan.rungs, rungs, strict=True):
        title = f"bits/byte of validation text, less is better: {length:.3g} minutes, {plural(seeds, 'seed')}"
        print_summary(results, title)
    picture = out / PICTURE
    plot = f"plot: {picture}" if picture.exists() else "a plot needs: pip install -e '.[plot]'"
    print(f"runs: {out / ROWS}   {plot}")
    best = min(rungs[-1], key=lambda row: row["difference"][CLOCK][0])
    if verdict(best) == "helps":
        parts = best["variant"].replace("+", " ")
        options = f"--size {size} " * bool(size) + f"--tokenizer {tokenizer} " * (tokenizer != "bpe")
        print(f"train with the best: dunes train {shlex.join(sources)} --parts {parts} {options}--out RUN")
    for reason in failed.values():
        print(f"failed: {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "parts", "rungs": rungs, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
