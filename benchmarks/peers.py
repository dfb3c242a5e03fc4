"""dunes against other libraries in decoding, prefill, start and training, from the same model folder.

    python benchmarks/peers.py --size 10m
    python benchmarks/peers.py --size 124m --threads 2 --tasks decode prefill decode16 decode64 first
    python benchmarks/peers.py --peers transformers litgpt==0.5.12 ~/mine_side.py --tasks decode
    python benchmarks/peers.py --toy --here --peers transformers     # a minute, nothing installed

`dunes.checkpoint.save` saves a LLaMA with random weights; every side loads that folder in its own environment
(`environments.py`) with its own script (`peers/`), which documents why its settings are the peer's best. For each
task:

1. Each setting of each side runs once. In float32 it must reproduce the output of dunes: the same ids, or losses
   that differ by at most TOLERANCE over six steps. Other settings are excluded, with a line on the difference; a
   peer without a matching float32 setting gets no ratio. In other precisions the difference is only reported.
2. Each side's fastest setting in float32 and in 16 bits, and settings nearly as fast, run again, each in a new
   process, in alternation with the other sides; the highest median counts. A compiled setting counts if its first
   result comes within --patience seconds; this time is reported, and is not part of the rate. Ratios are of the
   fastest settings, and at equal bits: float32 against float32, and 16 bits against 16 bits.

Shapes are realistic, weights random: 1.7m, 10m and 40m have a vocabulary of 4,096; 124m has GPT-2's width and
depth and tied weights, and 1.1b is TinyLlama's shape, both with a vocabulary of 32,000. `first` is the time from
the start of a process to the first token that it prints, for dunes by `dunes generate`, with and without a package
from `dunes compile`, including a tokenizer, which the other sides do not read.

With two cores, decode and prefill take about 10 minutes each at 1.7m and 10m, longer at 124m, and 20 at 1.1b, most
of it for compiling; decode16, decode64 and first 3 to 5 minutes. 1.1b needs 10 GB of memory and 20 GB of disk.

All sides use the same torch, threads and malloc settings (those of dunes, which keep freed memory), so that ratios
compare the code.
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
from typing import Any, Literal

import environments
import tyro
from environments import Unavailable
from sides import Row, in_turn, run

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from dunes import measure
from dunes.units import plural

from tuning import Tuning
from work import BATCHES, COMPARED, Work

SIDES = Path(__file__).parent / "peers"

TEXT = "def main(arguments):\n    for path in"

# In nats. Another order of sums gives 1e-6, one untrained embedding among 2,048 tokens 1e-4 to 2e-4. Six steps of
# an adapter in float32 are up to 5e-6 from the same steps in float64, on either side (docs/log/finetuning.md).
TOLERANCE = {"train": 1e-4, "unpacked": 2e-5, "packed": 2e-5}
STRICT = 1e-5
MORE = ("peak", "grown", "seconds", "with_prompt")
"""Bytes, the time of a whole process, and the rate of decoding with its prompt, if a side reports them."""
NEAR = 0.9  # of the rate of a side's fastest setting: these run again, too
TASKS = ("decode", "prefill", "train")
ALL_TASKS = (*TASKS, *BATCHES, "first")


@dataclass(frozen=True)
class Shape:
    """A LLaMA, and how much work with it is enough."""

    dim: int
    depth: int
    context: int = 512
    vocab: int = 4096
    tied: bool = False
    kv_groups: int = 1  # heads that share keys and values
    hidden: int | None = None
    new: int = 128
    row_new: int = 32
    prompts: int = 8
    rounds: int = 3
    seconds: float = 2.0
    patience: float = 120.0


SHAPES = {
    "toy": Shape(64, 2, 64, kv_groups=2, new=32, row_new=4, rounds=1, seconds=0.1, patience=0.0),
    "1.7m": Shape(128, 3),
    "10m": Shape(384, 6, kv_groups=3),
    "40m": Shape(768, 5, kv_groups=3),
    "124m": Shape(768, 12, vocab=32_000, tied=True, new=64, row_new=16, prompts=4),
    "1.1b": Shape(
        2048,
        22,
        vocab=32_000,
        kv_groups=8,
        hidden=5632,
        new=32,
        row_new=8,
        prompts=2,
        rounds=2,
        seconds=1.0,
        patience=300.0,
    ),
}


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
    rounds: int | None = None,
    size: Literal["1.7m", "10m", "40m", "124m", "1.1b"] = "10m",
    tasks: tuple[Literal[ALL_TASKS], ...] = TASKS,
    threads: int | None = None,
    row_new: int | None = None,
    patience: float | None = None,
    toy: bool = False,
    here: bool = False,
) -> None:
    """Race.

    Args:
        peers: Names, NAME==RELEASE, or files of your own sides, which run in this Python.
        rounds: Rounds of each side at its best settings; by default 3, at 1.1b 2.
        size: The shape, whose weights are random.
        tasks: decode (one text), decode16 and decode64 (so many texts at once), prefill, first (seconds from the
            start of a process to the first token), train.
        threads: Threads of each side; by default as many as are fastest.
        row_new: New tokens of each text in decode16 and decode64, by default 32, and at 124m and 1.1b fewer.
        patience: Maximum seconds until the first result of a compiled setting; 0 skips these. By default 120,
            and at 1.1b 300.
        toy: A tiny model and little work, and nothing compiled without --patience.
        here: Use the peers of this Python instead of installing them.
    """
    shape = SHAPES["toy" if toy else size]
    shape = replace(shape, row_new=row_new or shape.row_new)
    patience = shape.patience if patience is None else patience
    sides, left_out = [Side("ours", (sys.executable, str(SIDES / "our_side.py")))], {}
    for peer in peers:
        try:
            sides.append(side_of(peer, here))
        except Unavailable as why:
            left_out[peer] = str(why)
            print(f"{peer}: skipped: {why}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = write_work(Path(folder), shape, threads or (1 if toy else measure.choose_threads()))
        laps = rounds or shape.rounds
        results = {task: race(task, sides, Path(folder), work, laps, patience) for task in tasks}
    figures = {"benchmark": f"peers at {'toy' if toy else size}", "threads": work.threads, "left_out": left_out}
    print(json.dumps({**figures, **measure.fingerprint(), **results}))


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


def write_work(folder: Path, shape: Shape, threads: int) -> Work:
    """Write the model folder and the work into `folder`."""
    from dunes import checkpoint
    from dunes.models import llama
    from dunes.text import Tokenizer

    import torch

    config = llama.Config.from_size(shape.vocab, shape.dim, shape.depth, shape.context)
    config = replace(
        config, kv_heads=config.heads // shape.kv_groups, tied=shape.tied, hidden=shape.hidden or config.hidden
    )
    modules = [path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer.train("bpe", modules, shape.vocab)
    checkpoint.save(random_weights(llama.build(config)), folder / "model", tokenizer, shape.context)
    ids = torch.Generator().manual_seed(1)
    # Without the special ids: transformers does not train the embedding of the padding id, ours does.
    draw = lambda *dims: torch.randint(300, shape.vocab - 64, dims, generator=ids).tolist()
    work = Work(
        folder=str(folder / "model"),
        threads=threads,
        prompt=draw(16),
        new=shape.new,
        prompts=draw(shape.prompts, shape.context // 2),
        rows=draw(max(BATCHES.values()), 16),
        row_new=shape.row_new,
        text=TEXT,
        text_ids=tokenizer.prompt(TEXT),
        batches=draw(4, 2 if shape.dim == 64 else 8, shape.context // 2 + 1),
        lr=3e-4,
        betas=(0.9, 0.95),
        decay=0.1,
        clip=1.0,
        seconds=shape.seconds,
    )
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    return work


def random_weights(model: Any) -> Any:
    """Random weights, none of them zero or one, so that swapped weights are detected.

    Queries are three times as large, so that attention selects: an average over all tokens is nearly the same
    after each, and a deep model then repeats one id.
    """
    import torch

    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            deviation = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.1
            deviation *= 3 if name.endswith("attn.q.weight") else 1
            p.copy_(torch.randn(p.shape, generator=noise) * deviation + (p.dim() < 2))
    return model


def race(
    task: str, sides: list[Side], folder: Path, work: Work | Tuning, rounds: int, patience: float
) -> dict[str, Any]:
    """Run, compare and time all sides on one task."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(work.threads),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SIDES), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # empty
        "DUNES_HOME": str(folder / "dunes"),  # the same
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
    if len(set(reference)) <= len(reference) // 8:
        entrants[0].notes.append(f"the compared output repeats itself: {plural(len(set(reference)), 'value')}")
    for side in entrants:
        exclude_mismatches(side, task, reference)
    racing = {
        (side.name, setting): lambda side=side, setting=setting: rerun(side, task, setting, ask)
        for side in entrants
        for setting in near_best(side)
    }
    return report_results(entrants, in_turn(racing, rounds))


def bits(setting: str) -> int:
    """Of the numbers that a setting computes with or reads."""
    return 32 if "float32" in setting else 16


def near_best(side: Side) -> list[str]:
    """The settings to run again: those not much slower than the fastest with as many bits."""
    best = {bits(s): max(r["rate"] for t, r in side.rows.items() if bits(t) == bits(s)) for s in side.rows}
    return [setting for setting, row in side.rows.items() if row["rate"] >= NEAR * best[bits(setting)]]


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
        print(f"  tried {side.name}, {setting}: {row['rate']:.4g} tokens/s in {row['wall']:.0f} s", flush=True)


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
    ours, table = sides[0], {}
    print("\ntokens/s: median (least..most)")
    for side in sides:
        table[side.name] = entry = {"version": side.version, "said": side.notes}
        if side.rows:
            setting, rates = best_of(side, rows)
            entry |= {"setting": setting, "rate": median(rates), "least": min(rates), "most": max(rates)}
            entry |= {k: side.rows[setting][k] for k in ("warmup", "versions") if k in side.rows[setting]}
            entry |= {k: median(r[k] for r in rows[side.name, setting]) for k in MORE if k in side.rows[setting]}
            kept = ("rate", "warmup", "agreement", *MORE)
            entry["tried"] = {name: {k: row[k] for k in kept if k in row} for name, row in side.rows.items()}
            for name in near_best(side):
                entry["tried"][name]["rates"] = [r["rate"] for r in rows[side.name, name]]
            if side is not ours and ours.rows:
                ratio = compare_rates(ours, side, rows)
                entry |= {"ours_over_it": ratio["ratio"], "ours_over_it_from_to": ratio["from_to"]}
                entry["equal_bits"] = {
                    f"{n}": compare_rates(ours, side, rows, n)
                    for n in (32, 16)
                    if all(any(bits(s) == n for s in x.rows) for x in (ours, side))
                }
        print_side(side, entry)
    return table


def best_of(side: Side, rows: dict[tuple[str, str], list[Row]], only: int = 0) -> tuple[str, list[float]]:
    """The setting with the highest median rate, and its rates; of those with so many bits, if given."""
    rates = {
        setting: [r["rate"] for r in laps]
        for (name, setting), laps in rows.items()
        if name == side.name and only in (0, bits(setting))
    }
    best = max(rates, key=lambda setting: median(rates[setting]))
    return best, rates[best]


def compare_rates(ours: Side, side: Side, rows: dict[tuple[str, str], list[Row]], only: int = 0) -> dict[str, Any]:
    """Our rate over the side's, each at its best setting, with so many bits, if given."""
    (mine, a), (setting, b) = best_of(ours, rows, only), best_of(side, rows, only)
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    rates = {"ours": mine, "our_rate": median(a), "setting": setting, "rate": median(b)}
    return rates | {"ratio": median(ratios), "from_to": [min(ratios), max(ratios)]}


def print_side(side: Side, entry: dict[str, Any]) -> None:
    name = f"{side.name} {side.version}".strip()
    if "rate" in entry:
        ratio = f"; ours {entry['ours_over_it']:.2f} times that" if "ours_over_it" in entry else ""
        low, high, agreement = entry["least"], entry["most"], side.rows[entry["setting"]]["agreement"]
        start = entry.get("seconds", entry["warmup"])
        how = f"{entry['setting']}, first result after {start:.2g} s; {agreement}"
        if "with_prompt" in entry:
            how = f"with its prompt {entry['with_prompt']:.4g}; {how}"
        print(f"  {name:24} {entry['rate']:9.4g} ({low:.4g}..{high:.4g}) {how}{ratio}")
        if "float32" not in entry["setting"]:
            first = next(s for s in side.rows if "float32" in s)
            print(f"  {'':24} in {first}: {side.rows[first]['agreement']}")
        for n, each in entry.get("equal_bits", {}).items():
            pair = f"ours ({each['ours']}) {each['our_rate']:.4g}, theirs ({each['setting']}) {each['rate']:.4g}"
            print(f"  {'':24} at {n} bits: {pair}: {each['ratio']:.2f} times")
    for line in side.notes:
        print(f"  {name:24} {line}")


if __name__ == "__main__":
    tyro.cli(main)
