"""Our library against others: decoding, prefill and training, from the same model folder.

    python benchmarks/peers.py --size 10m --rounds 5
    python benchmarks/peers.py --peers transformers litgpt==0.5.12 ~/mine_side.py --tasks decode
    python benchmarks/peers.py --toy --here --peers transformers     # a minute, nothing installed

`dunes.checkpoint.save` saves a LLaMA with random weights; every side loads that folder in its own environment
(`environments.py`) with its own script (`peers/`), which documents why its settings are the peer's best. For each
task:

1. Each setting of each side runs once. In float32 it must reproduce our output: the same ids, or losses that
   differ by at most TOLERANCE over six steps. Other settings are excluded, with a line about the difference, and
   a peer without a matching float32 setting gets no ratio. Other precisions are compared and reported only.
2. Each side's fastest setting, and those near it, run again, each time in a new process, in alternation with the
   other sides; the highest median counts. A compiled setting counts if its first result comes within --patience
   seconds; this time is reported, and is not part of the rate.

All sides use the same torch, threads and malloc settings (those of our library: freed memory is kept), so that
ratios compare the code.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import environments
import tyro
from environments import Unavailable
from sides import Row, in_turn, run

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from tuning import Tuning
from work import COMPARED, Work

from dunes.units import plural

SIDES = Path(__file__).parent / "peers"

# In nats. Another order of sums gives 1e-6, one untrained embedding among 2,048 tokens 1e-4 to 2e-4.
TOLERANCE = {"train": 1e-4}
STRICT = 1e-5
MEMORY = ("peak", "grown")  # bytes, if a side reports them
NEAR = 0.8  # of the rate of a side's fastest setting: these run again, too
TASKS = ("decode", "prefill", "train")
SHAPES = {
    "toy": (64, 2, 64),
    "1m": (128, 2, 512),
    "10m": (384, 6, 512),
    "40m": (768, 5, 512),
}  # width, layers, context
VOCAB = 4096


@dataclass(frozen=True)
class Peer:
    """A release to compare with, and further requirements."""

    release: str
    requirements: tuple[str, ...]


PEERS = {
    "transformers": Peer("5.23.0", ("torch", "accelerate==1.15.0")),
    "litgpt": Peer("0.5.13", ("torch",)),
    "llama-cpp-python": Peer("0.3.36", ("gguf==0.19.0", "safetensors==0.8.0")),
}
TUNERS = {"peft": Peer("0.21.2", ("torch", "transformers==5.23.0", "accelerate==1.15.0"))}
"""Used by `finetune.py`."""


@dataclass
class Side:
    """A side: its command, its results by setting, and notes to report."""

    name: str
    command: tuple[str, ...]
    version: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def main(
    peers: tuple[str, ...] = tuple(PEERS),
    rounds: int = 5,
    size: str = "10m",
    tasks: tuple[str, ...] = TASKS,
    patience: float = 120.0,
    toy: bool = False,
    here: bool = False,
) -> None:
    """Race.

    Args:
        peers: Names, NAME==RELEASE, or files of your own sides, which run in this Python.
        rounds: Rounds of each side at its best setting.
        size: 1m, 10m or 40m.
        tasks: decode, prefill and train, or some of them.
        patience: Maximum seconds until the first result of a compiled setting; 0 skips these.
        toy: A tiny model and little work, nothing compiled.
        here: Use the peers of this Python instead of installing them.
    """
    if toy:
        size, patience, rounds = "toy", 0.0, min(rounds, 1)
    sides, left_out = [Side("ours", (sys.executable, str(SIDES / "our_side.py")))], {}
    for peer in peers:
        try:
            sides.append(side_of(peer, here))
        except Unavailable as why:
            left_out[peer] = str(why)
            print(f"{peer}: skipped: {why}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = write_work(Path(folder), size)
        results = {task: race(task, sides, Path(folder), work, rounds, patience) for task in tasks}
    print(json.dumps({"benchmark": f"peers at {size}", "threads": work.threads, "left_out": left_out, **results}))


def side_of(peer: str, here: bool) -> Side:
    """The side of a peer. Raises Unavailable."""
    if peer.endswith(".py"):
        return Side(Path(peer).stem, (sys.executable, peer))
    name, _, release = peer.partition("==")
    everyone = PEERS | TUNERS
    if name not in everyone:
        raise Unavailable(f"unknown peer; known are {', '.join(everyone)}")
    known = everyone[name]
    if here:
        python, release = sys.executable, environments.installed_release(name, release)
    else:
        release = release or known.release
        python = environments.python_of(name, release, known.requirements)
    script = SIDES / f"{name.replace('-', '_')}_side.py"
    return Side(name, (str(python), str(script)), release)


def write_work(folder: Path, size: str) -> Work:
    """Write the model folder and the work into `folder`."""
    import torch

    from dunes import checkpoint, measure
    from dunes.models import llama
    from dunes.text import Tokenizer

    dim, depth, context = SHAPES[size]
    config = llama.Config.from_size(VOCAB, dim, depth, context)
    kv_heads = config.heads // (3 if config.heads % 3 == 0 else 2)
    config = replace(config, kv_heads=kv_heads, tied=False)
    checkpoint.save(random_weights(llama.build(config)), folder / "model", Tokenizer.train("bytes", []), context)
    ids = torch.Generator().manual_seed(1)
    # Without the special ids: transformers does not train the embedding of the padding id, ours does.
    draw = lambda *shape: torch.randint(300, VOCAB, shape, generator=ids).tolist()
    few = size == "toy"
    work = Work(
        folder=str(folder / "model"),
        threads=1 if few else measure.choose_threads(),  # a toy may run beside other tests
        prompt=draw(16),
        new=32 if few else 128,
        prompts=draw(8, context // 2),
        batches=draw(4, 2 if few else 8, context // 2 + 1),
        lr=3e-4,
        betas=(0.9, 0.95),
        decay=0.1,
        clip=1.0,
        seconds=0.1 if few else 4.0,
    )
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    return work


def random_weights(model: Any) -> Any:
    """Random weights, none of them zero or one, so that swapped weights are detected."""
    import torch

    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            deviation = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.1
            p.copy_(torch.randn(p.shape, generator=noise) * deviation + (p.dim() < 2))
    return model


def race(
    task: str, sides: list[Side], folder: Path, work: Work | Tuning, rounds: int, patience: float
) -> dict[str, Any]:
    """Run, compare and time all sides on one task."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(work.threads),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_MMAP_MAX_": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SIDES), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # empty
    }

    def once(side: Side, *arguments: str) -> Row:
        return run((*side.command, *arguments), env=environment, timeout=300 + 2 * patience)

    print(f"\n{task}", flush=True)
    ask = lambda side, setting: once(side, str(folder / "work.json"), task, setting)
    entrants = [replace(side, rows={}, notes=[]) for side in sides]
    for side in entrants:
        try_settings(side, task, once, ask, patience)
    if "float32" not in entrants[0].rows:
        raise SystemExit(f"ours does not run: {'; '.join(entrants[0].notes)}")
    reference = entrants[0].rows["float32"]["output"]
    assert len(set(reference)) > len(reference) // 8, "the compared output must not be trivial"
    for side in entrants:
        exclude_mismatches(side, task, reference)
    racing = {
        (side.name, setting): lambda side=side, setting=setting: rerun(side, task, setting, ask)
        for side in entrants
        for setting in near_best(side)
    }
    return report_results(entrants, in_turn(racing, rounds))


def near_best(side: Side) -> list[str]:
    """The settings to run again: those not much slower than the fastest."""
    best = max((row["rate"] for row in side.rows.values()), default=0.0)
    return [setting for setting, row in side.rows.items() if row["rate"] >= NEAR * best]


def rerun(side: Side, task: str, setting: str, ask: Callable[..., Row]) -> Row:
    """Run a setting again; another output than the first one's excludes the side."""
    if not side.rows:
        return {}
    try:
        row = ask(side, setting)
        words, equal = compare_outputs(task, row["output"], side.rows[setting]["output"])
        if equal or "float32" not in setting:
            return row
        why = f"another output than before: {words}"
    except RuntimeError as error:
        why = last_line(error)
    side.notes.append(f"no ratio: {setting}, run again: {why}")
    side.rows = {}
    return {}


def try_settings(
    side: Side, task: str, once: Callable[..., Row], ask: Callable[..., Row], patience: float
) -> None:
    """Run each setting once, and add the results of those that work to the side's rows."""
    try:
        settings = once(side).get(task, [])
    except RuntimeError as error:
        side.notes.append(f"does not start: {last_line(error)}")
        return
    if not settings:
        side.notes.append("does not support this task")
    for setting in settings:
        if "compiled" in setting and not patience:
            continue
        try:
            row = ask(side, setting)
        except RuntimeError as error:
            side.notes.append(f"{setting}: failed: {last_line(error)}")
            continue
        if "compiled" in setting and row["warmup"] > patience:
            side.notes.append(f"{setting}: its first result took {row['warmup']:.0f} s, excluded")
            continue
        side.rows[setting] = row
        print(f"  tried {side.name}, {setting}: {row['rate']:.4g} tokens/s", flush=True)


def last_line(error: RuntimeError) -> str:
    """The line that names the exception, or the last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:300]


def exclude_mismatches(side: Side, task: str, reference: list[float]) -> None:
    """Remove float32 settings whose output differs from the reference, and all settings if none is left."""
    for setting, row in list(side.rows.items()):
        row["agreement"], equal = compare_outputs(task, row["output"], reference)
        if "float32" in setting and not equal:
            side.notes.append(f"{setting}: excluded: {row['agreement']}")
            del side.rows[setting]
    if side.rows and not any("float32" in setting for setting in side.rows):
        side.notes.append("no ratio: no float32 setting reproduces our output")
        side.rows = {}


def compare_outputs(task: str, output: list[float], reference: list[float]) -> tuple[str, bool]:
    """A description of the agreement, and whether it counts as equal."""
    if len(output) != len(reference):
        return f"{plural(len(output), 'value')} instead of {len(reference)}", False
    if isinstance(reference[0], float):
        apart = max(abs(a - b) for a, b in zip(output, reference, strict=True))
        return f"losses of {COMPARED} steps within {apart:.1e}", apart <= TOLERANCE.get(task, STRICT)
    differ = [i for i, (a, b) in enumerate(zip(output, reference, strict=True)) if a != b]
    words = f"{len(reference) - len(differ)} of {len(reference)} ids equal"
    if differ:
        words += f", first differs at {differ[0]}: {output[differ[0]]} for {reference[differ[0]]}"
    return words, not differ


def report_results(sides: list[Side], rows: dict[tuple[str, str], list[Row]]) -> dict[str, Any]:
    """Print the table, and return it as a dictionary."""
    rates = {side.name: best_of(side, rows) for side in sides if side.rows}
    table: dict[str, Any] = {}
    print("\ntokens/s: median (least..most)")
    for side in sides:
        table[side.name] = entry = {"version": side.version, "said": side.notes}
        if side.name in rates:
            setting, mine = rates[side.name]
            entry |= {"setting": setting, "rate": median(mine), "least": min(mine), "most": max(mine)}
            entry |= {"warmup": side.rows[setting]["warmup"]}
            entry |= {k: median(r[k] for r in rows[side.name, setting]) for k in MEMORY if k in side.rows[setting]}
            kept = ("rate", "warmup", "agreement", *MEMORY)
            entry["tried"] = {name: {k: row[k] for k in kept if k in row} for name, row in side.rows.items()}
            if side.name != "ours" and "ours" in rates:
                each = [a / b for a, b in zip(rates["ours"][1], mine, strict=True)]
                entry |= {"ours_over_it": median(each), "ours_over_it_from_to": [min(each), max(each)]}
        print_side(side, entry)
    return table


def best_of(side: Side, rows: dict[tuple[str, str], list[Row]]) -> tuple[str, list[float]]:
    """The setting with the highest median rate, and its rates."""
    rates = {setting: [r["rate"] for r in found] for (name, setting), found in rows.items() if name == side.name}
    best = max(rates, key=lambda setting: median(rates[setting]))
    return best, rates[best]


def print_side(side: Side, entry: dict[str, Any]) -> None:
    name = f"{side.name} {side.version}".strip()
    if "rate" in entry:
        ratio = f"; ours {entry['ours_over_it']:.2f} times that" if "ours_over_it" in entry else ""
        low, high, agreement = entry["least"], entry["most"], side.rows[entry["setting"]]["agreement"]
        how = f"{entry['setting']}, first result after {entry['warmup']:.2g} s; {agreement}"
        print(f"  {name:24} {entry['rate']:9.4g} ({low:.4g}..{high:.4g}) {how}{ratio}")
        if "float32" not in entry["setting"]:
            first = next(s for s in side.rows if "float32" in s)
            print(f"  {'':24} in {first}: {side.rows[first]['agreement']}")
    for line in side.notes:
        print(f"  {name:24} {line}")


if __name__ == "__main__":
    tyro.cli(main)
