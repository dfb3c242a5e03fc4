"""Measure most figures of docs/performance.md, and write docs/figures/ and docs/figures.md.

    make bench                                        # more than an hour, on an idle machine
    make bench TEXT=tinyshakespeare.txt               # with the Shakespeare benchmark
    python benchmarks/figures.py --only save memory   # only these; earlier results are reused

The output of each command is saved in runs/figures/, so that an interrupted run can be resumed.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dunes import measure
from dunes.bench import plot, rows
from dunes.runs.saving import METRICS, read_metrics
from dunes.units import format_count, format_seconds, plural

import curves
import tyro

ROOT = Path(__file__).parent.parent
RESULTS, PICTURES, TABLE = ROOT / "runs" / "figures", ROOT / "docs" / "figures", ROOT / "docs" / "figures.md"

Row = dict[str, Any]
Figures = list[tuple[str, str]]
PEER_TASKS = ("decode", "prefill", "train")


@dataclass(frozen=True)
class Step:
    """A command, and functions that make table entries and plots from its last line (or model folder).

    `leaves` is the output of an interrupted command, removed before it is run again.
    """

    command: Sequence[str]
    figures: Callable[[Row], Figures]
    pictures: Callable[[Row], None] = lambda row: None
    folder: Path | None = None
    leaves: Path | None = None

    @property
    def shell_command(self) -> str:
        """The command as typed in a shell."""
        inside = (str(a).replace(f"{ROOT}/", "") for a in self.command)
        return " ".join(Path(a).name if a.startswith("/") else a for a in inside)


def script(name: str, *arguments: str) -> list[str]:
    return ["python", f"benchmarks/{name}", *arguments]


def run_figures(row: Row) -> Figures:
    card, m = row["card"], row["card"]["measured"]
    minutes = card["trained"]["minutes"]
    words = f"{m['bits_per_byte']:.3f} bits/byte on validation files after {format_seconds(row['seconds'])}, "
    words += f"{m['peak_bytes'] / 1e9:.1f} GB; {format_count(int(card['trained']['size']))} parameters chosen"
    return [(f"the standard library in {plural(minutes, 'minute')}", words)]


def train_step(minutes: int) -> Step:
    folder = RESULTS / f"stdlib-{minutes}"
    command = ["dunes", "train", "stdlib", "--minutes", str(minutes), "--out", str(folder)]
    return Step(command, run_figures, folder=folder, leaves=folder)


def rates(row: Row) -> dict[str, float]:
    """Tokens/s of each side."""
    return {side.partition(":")[0]: v for side, v in row.items() if ": tokens/s" in side}


def race_step(size: str) -> Step:
    def figures(row: Row) -> Figures:
        rate = rates(row)
        theirs = [n for n in rate if not n.startswith("ours")]
        others = ", ".join(f"{row[f'ours over {n}']:.2f} times {n} ({rate[n]:,.0f})" for n in theirs)
        share = f"{row['ours: share of it']:.0%} of the matmul rate"
        return [
            (
                f"training at {size}, tokens/s",
                f"{max(rate['ours'], rate['ours compiled']):,.0f}: {others}; {share}",
            )
        ]

    def pictures(row: Row) -> None:
        bars = [{"name": n, "rate": r, "low": r, "high": r, "unit": "tokens"} for n, r in rates(row).items()]
        title = f"training at {size} parameters, each side at its best batch"
        plot.save_plot(plot.bars(bars, title, ""), PICTURES / f"training-{size}.svg")

    return Step(script("train.py", "--sizes", size, "--rounds", "3"), figures, pictures)


def bench_step(name: str, *arguments: str) -> Step:
    out = RESULTS / f"{name}.jsonl"

    def figures(row: Row) -> Figures:
        entries = []
        for f in row["results"]:
            share = f"{f['flop_share']:.0%} of the matmul rate" if name == "train" else ""
            share = f"{f['byte_share']:.0%} of the read rate" if name == "decode" else share
            memory = f"{f['peak_bytes'] / 1e6:.0f} MB of tensors"
            what = f"`dunes bench {name}`, {f['subject']}, {f['batch']} x {f['context']}, {f['dtype']}"
            entries.append((what, ", ".join(filter(None, [f"{f['rate']:,.0f} {f['unit']}/s", share, memory]))))
        return entries

    pictures = lambda row: plot.draw_all(rows.read_rows(out), PICTURES)
    return Step(["dunes", "bench", name, *arguments, "--json", "--out", str(out)], figures, pictures, leaves=out)


def memory_figures(row: Row) -> Figures:
    return [
        (
            f"memory of a step, {f['subject']}, {f['batch']} x {f['context']}, {f['dtype']}",
            f"estimated {f['peak'] / 1e6:.0f} MB, tensors {f['tensors'] / 1e6:.0f} MB, "
            f"the process grew by {f['grown'] / 1e6:.0f} MB ({f['grown'] / f['peak'] - 1:+.1%})",
        )
        for f in row["results"]
    ]


def module_figures(row: Row) -> Figures:
    shares = {kind: sum(phases.values()) / row["wall"] for kind, phases in row["kinds"].items()}
    return [("a training step at 3.4M", ", ".join(f"{kind} {s:.0%}" for kind, s in shares.items() if s > 0.01))]


def peer_figures(row: Row) -> Figures:
    entries = []
    for task in PEER_TASKS:
        sides = row[task]
        ours = f"ours {sides['ours']['rate']:,.0f} tokens/s ({sides['ours']['setting']})"
        for name, side in sides.items():
            if name != "ours" and "rate" in side:
                agreed = side["tried"][side["setting"]]["agreement"]
                theirs = f"theirs {side['rate']:,.0f} ({side['setting']}: {agreed})"
                what = f"{task} against {name} {side['version']}, equal in float32"
                entries.append((what, f"{side['ours_over_it']:.2f} times: {ours}, {theirs}"))
    return entries


def finetune_figures(row: Row) -> Figures:
    entries = []
    for what, ratio in row["ratios"].items():
        words = f"{ratio['rate']:.2f} times the tokens/s, {ratio['grown']:.2f} of the memory that a step takes"
        words += f", {ratio['peak']:.2f} of the process"
        entries.append((f"a LoRA step, {what.replace('theirs', 'peft')}", words))
    return entries


def plot_peers(row: Row) -> None:
    for task in PEER_TASKS:
        bars = [
            {"name": n, "rate": s["rate"], "low": s["least"], "high": s["most"], "unit": "tokens"}
            for n, s in row[task].items()
            if "rate" in s
        ]
        title = f"{task}, {row['benchmark']}, each at its best settings"
        plot.save_plot(plot.bars(bars, title, "least to most"), PICTURES / f"peers-{task}.svg")


def steps(text: Path | None, problems: Path | None = None) -> dict[str, Step]:
    """All steps by name, the quick ones first."""
    shared = ["--threads", "2"] if (os.cpu_count() or 1) >= 2 else []
    every = {
        "save": Step(script("save.py"), save_figures),
        "memory": Step(
            ["dunes", "bench", "memory", "--size", "40m", "--batch", "4", "8", "--dtype", "float32", "bfloat16",
             "--json", "--check", "--picture", str(PICTURES / "memory.svg")],
            memory_figures,
        ),
        "modules": Step(
            ["dunes", "bench", "train", "--size", "3.4m", "--by-module", "--json", *shared,
             "--picture", str(PICTURES / "modules.svg")],
            module_figures,
        ),
        "train": bench_step("train", "--size", "1m", "3m", "10m", "30m", "--rounds", "8", *shared),
        "decode": bench_step("decode", "--size", "1m", "3m", "10m", "30m", "--rounds", "8", *shared),
        "three": train_step(3),
        **{f"race-{size}": race_step(size) for size in ("1m", "10m", "40m")},
        "peers": Step(script("peers.py", "--size", "10m", "--rounds", "5"), peer_figures, plot_peers),
        "large": Step(
            script("large.py", "--folder", str(RESULTS / "large")),
            lambda r: [("2 GB of text", f"tokenized and trained on within {r['peak_gigabytes']:.2f} GB")],
        ),
        "load": Step(script("load.py"), load_figures),
        "start": Step(script("start.py"), start_figures),
        "fifteen": train_step(15),
    }  # fmt: skip
    if text is not None:
        every["shakespeare"] = Step(script("shakespeare.py", str(text)), shakespeare_figures)
    if problems is not None:
        every["finetune"] = Step(
            script("finetune.py", "--data", str(problems), "--patience", "0"), finetune_figures
        )
    return every


def start_figures(row: Row) -> Figures:
    return [
        (
            f"`dunes {verb}` at 2M parameters",
            f"{row[f'{verb}, wall']:.2f} s from start to end, {row[f'{verb} after import torch, wall']:+.2f} s to "
            "`import torch` alone",
        )
        for verb in ("generate", "complete")
    ]


def load_figures(row: Row) -> Figures:
    ours, theirs, other, size = row["dunes"], row["transformers"], row["convert"], row["bytes"]
    there, answered = (row["ratio"][k] for k in ("there", "answered"))
    words = f"{there:.0f} times faster than from_pretrained ({ours['there']:.2f} s, {theirs['there']:.2f} s), "
    words += f"{answered:.1f} times until it answered; {ours['peak'] / size:.2f} times its bytes resident"
    more = (
        f"{other['convert'] / other['copy']:.1f} times the time of a copy, {other['grown'] / 1e9:.2f} GB of memory"
    )
    rates = [f"{other[k] / other['copied']:.0%}" for k in ("scanned here", "scanned")]
    scan = f"{rates[0]} of the rate of copying in memory, {rates[1]} in a mapped file"
    what = f"{size / 1e9:.1f} GB of weights"
    return [(f"loading {what}", words), (f"converting {what}, verified", more), (f"looking through {what}", scan)]


def save_figures(row: Row) -> Figures:
    return [("a save a minute", f"costs {row['stall_seconds'] / 60:.2%} of training")]


def shakespeare_figures(row: Row) -> Figures:
    words = f"{row['training ratio']:.1f} times less training time than the plain GPT "
    words += f"({row['ours: training s']:.1f} s, {row['plain: training s']:.1f} s), "
    words += f"{row['wall ratio']:.1f} times less from the start of the process"
    return [(row["benchmark"], words)]


def run_step(name: str, step: Step) -> Row:
    """The result of a step with its duration, from its file or by running it."""
    file = RESULTS / f"{name}.json"
    if file.exists():
        row: Row = json.loads(file.read_text())
        if row["said"] == step.shell_command and row["machine"] == measure.fingerprint()["machine"]:
            return row
    if step.leaves is not None and step.leaves.exists():
        shutil.rmtree(step.leaves) if step.leaves.is_dir() else step.leaves.unlink()
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(f"\n== {step.shell_command}", flush=True)
    program = Path(sys.executable).parent / step.command[0]
    start, out = time.time(), RESULTS / f"{name}.txt"
    with out.open("w") as file_out:
        process = subprocess.run([program, *step.command[1:]], cwd=ROOT, stdout=file_out, stderr=subprocess.STDOUT)
    if process.returncode:
        raise SystemExit(f"{step.shell_command}: failed; see {out}")
    row = {"said": step.shell_command, "seconds": time.time() - start, "time": time.strftime("%Y-%m-%d")}
    if step.folder is not None:
        row["card"] = json.loads((step.folder / "dunes.json").read_text())
    else:
        row |= json.loads(out.read_text().splitlines()[-1])
    row |= {"commit": rows.source_commit(), **measure.fingerprint()}
    file.write_text(json.dumps(row, indent=1))
    return row


def table(results: dict[str, tuple[Step, Row]]) -> str:
    """A Markdown table of the figures, with the commands that measured them."""
    first = next(iter(results.values()))[1]
    text = [
        "# Figures",
        "",
        f"Made by `make bench` on {first['cpu']}, {plural(first['cores'], 'core')}, torch {first['torch']}.",
    ]
    text += ["", "| what | figure | command | commit |", "|---|---|---|---|"]
    for step, row in results.values():
        made = f"{row['commit']}, {row['time']}"
        text += [f"| {what} | {figure} | `{step.shell_command}` | {made} |" for what, figure in step.figures(row)]
    shown = [f"![{p.stem}](figures/{p.name})" for p in sorted(PICTURES.glob("*.svg"))]
    return "\n".join([*text, "", *shown]) + "\n"


def main(only: tuple[str, ...] = (), text: Path | None = None, problems: Path | None = None) -> None:
    """Measure, plot, write the table.

    Args:
        only: Measure only these; the table has all figures measured so far.
        text: tinyshakespeare.txt, for its benchmark.
        problems: Instruction examples (gsm8k), for the finetuning benchmark.
    """
    available = steps(*(path.resolve() if path else None for path in (text, problems)))
    if unknown := set(only) - available.keys():
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(available)}")
    results: dict[str, tuple[Step, Row]] = {}
    for name, step in available.items():
        if not only or name in only or (RESULTS / f"{name}.json").exists():
            results[name] = step, run_step(name, step)
            step.pictures(results[name][1])
    runs = {s.folder.name: read_metrics(s.folder / METRICS) for s, _ in results.values() if s.folder is not None}
    if runs:
        plot.save_plot(curves.losses(runs), PICTURES / "learning.svg")
    TABLE.write_text(table(results))
    print(f"\n{table(results)}\nwritten: docs/figures.md and docs/figures/")


if __name__ == "__main__":
    tyro.cli(main)
