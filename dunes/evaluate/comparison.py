"""Compare a model before and after a change: loss, size, memory and speed.

Each folder is measured in its own process, so that the measured memory is the memory of one model. A further
process measures the speeds of both models in alternation, so that changes of the machine's speed affect both
models. Speed is measured in processor time on one thread, since waiting threads use processor time, too.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
import torch

from dunes import checkpoint, measure, tree
from dunes.checkpoint import LoadedModel
from dunes.cores import share_cores
from dunes.data import PackedText, TokenIds
from dunes.evaluate.text_loss import evaluate
from dunes.extra import python_command
from dunes.generate import PrefixCache, generate
from dunes.generate.decode_packages import load_step
from dunes.units import format_bytes

SCORED = 65_536
"""Approximate number of validation tokens that are scored."""
COMPARED = 8_192
"""Approximate number of validation tokens at which the models' most probable next tokens are compared."""
READ = 128
"""Maximum number of prompt tokens when speed is measured."""
WRITTEN = 16
"""Maximum number of tokens whose decoding is timed; the first generated token is not timed."""
ROUNDS = (6, 40)
"""Minimum and maximum number of rounds in which speed is measured."""
SECONDS = 5.0
"""Processor time in seconds after which no round begins, except to reach the minimum number of rounds."""
PHASES = {"prefill": "reading a prompt", "decode": "decoding"}


@dataclass(frozen=True)
class Measurement:
    """The `size` of a folder's weight files and the peak `memory` in bytes, and the `loss` in nats/token.

    `memory` covers loading, prefill and decoding. `form` says what decoded: "the modules" or "compiled code".
    """

    size: int
    memory: int
    form: str
    loss: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Speed:
    """Median tokens/s on one thread, and median of the paired ratios (after / before) with a 95 % interval.

    The interval from `low` to `high` follows from the sign test, which assumes no distribution.
    """

    before: float
    after: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float]]) -> "Speed":
        """Summarize the tokens/s (before, after) of at least six rounds."""
        ratios, count = sorted(after / before for before, after in rounds), len(rounds)
        tails = accumulate(math.comb(count, i) for i in range(count))
        cut = sum(tail <= 0.025 * 2**count for tail in tails)
        before, after = (median(side) for side in zip(*rounds, strict=True))
        return cls(before, after, median(ratios), ratios[cut - 1], ratios[-cut])

    @property
    def differs(self) -> bool:
        """True if the interval does not contain 1."""
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        effect = f"{self.ratio:.2f} times" if self.differs else "no difference seen"
        return f"{effect} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Comparison:
    """Both measurements, and the fraction of validation tokens after which both models predict the same token.

    `speeds` maps each of PHASES to its speed, or is empty if memory cannot hold both models at once.
    """

    before: Measurement
    after: Measurement
    agreement: float | None
    speeds: Mapping[str, Speed]

    def warnings(self) -> list[str]:
        """A list with one line if decoding or prefill became slower, otherwise an empty list."""
        slower = [f"{PHASES[n]} takes {1 / s.ratio:.2f} times" for n, s in self.speeds.items() if s.high < 1]
        return [f"slower: {' and '.join(slower)} as long as before"] if slower else []

    def lines(self) -> list[str]:
        """The comparison as a table, in lines of text."""
        a, b = self.before, self.after
        rows = [f"{'':18}{'before':>12}{'after':>12}"]
        if a.loss is None or b.loss is None:
            rows.append("validation loss not measured: no validation text is known; pass --validation FILE")
        else:
            rows += [
                f"{'validation loss':18}{a.loss:12.4f}{b.loss:12.4f}  {b.loss - a.loss:+.4f} nats/token, "
                f"{a.tokens:,} tokens",
                f"{'perplexity':18}{np.exp(a.loss):12.3f}{np.exp(b.loss):12.3f}",
                f"{'equal top-1 tokens':18}{'':12}{self.agreement:12.1%}  of the validation text",
            ]
        for name, x, y in (("size on disk", a.size, b.size), ("peak memory", a.memory, b.memory)):
            rows.append(f"{name:18}{format_bytes(x):>12}{format_bytes(y):>12}  {y / max(1, x):.2f} times")
        for name, speed in self.speeds.items():
            rows.append(f"{name + ', tokens/s':18}{speed.before:12,.0f}{speed.after:12,.0f}  {speed}")
        if not self.speeds:
            rows.append("speed not measured: both models at once do not fit into the free memory")
        forms = a.form if a.form == b.form else f"before {a.form}, after {b.form}"
        rows.append(f"decoded by {forms}, on one thread; dunes compile MODEL makes a compiled step")
        return rows


def compare_folders(before: Path, after: Path, ids: TokenIds | None) -> Comparison | str:
    """Measure both folders, and their loss on `ids` if given. Returns an error message instead if a process
    fails."""
    try:
        with TemporaryDirectory() as scratch:
            if ids is not None:
                _write_ids(Path(scratch) / "ids.npz", ids)
            first, second = (_run_measurement([folder], Path(scratch)) for folder in (before, after))
            free = measure.free_memory(torch.device("cpu"))
            fits = not free or first["memory"] + second["memory"] <= free
            rounds = _run_measurement([before, after], Path(scratch)) if fits else {}
    except (ValueError, OSError) as error:  # the caller still reports on the changed model
        return f"not measured: {error}"
    top = [np.array(facts.pop("top")) for facts in (first, second)]
    agreement = float((top[0] == top[1]).mean()) if len(top[0]) else None
    speeds = {phase: Speed.of(laps) for phase, laps in rounds.items()}
    return Comparison(Measurement(**first), Measurement(**second), agreement, speeds)


def _run_measurement(folders: Sequence[Path], scratch: Path) -> dict[str, Any]:
    """Run `measure_folder` or, for two folders, `measure_speeds` in a new process and return the result. Raises
    ValueError with the last line of its stderr if the process fails.
    """
    trust = "trust" if checkpoint.cards_trusted() else ""
    options = [trust, str(torch.get_num_threads()), str(scratch / "ids.npz")]
    command, environment = python_command("-m", "dunes.evaluate.comparison", *options, *map(str, folders))
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        reason = next(iter(process.stderr.strip().splitlines()[-1:]), f"exit status {process.returncode}")
        raise ValueError(f"{' and '.join(map(str, folders))}: {reason}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def measure_folder(folder: Path, file: Path) -> Mapping[str, Any]:
    """The fields of a Measurement, and `top`: the most probable next id after each id in `file` (empty without
    file)."""
    cpu = torch.device("cpu")
    share_cores()
    measure.keep_freed_memory()
    before = measure.reset_peak_memory(cpu)
    loaded = checkpoint.load(folder)
    step = load_step(loaded.model)
    ids = _read_ids(file) if file.is_file() else None
    _speeds(loaded, step, ids)
    memory = measure.peak_memory(cpu) - before
    score = None if ids is None else evaluate(loaded, ids, limit=SCORED)
    return {
        "size": sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".dunes")),
        "memory": memory,
        "form": "the modules" if step is None else "compiled code",
        "loss": None if score is None else score.loss,
        "tokens": 0 if score is None else score.tokens,
        "top": [] if ids is None else _most_probable(loaded, _id_array(ids)),
    }


def _write_ids(file: Path, ids: TokenIds) -> None:
    packed: dict[str, Any] = {"starts": ids.starts, "end": ids.end} if isinstance(ids, PackedText) else {}
    np.savez(file, ids=_id_array(ids), **packed)


def _read_ids(file: Path) -> TokenIds:
    with np.load(file) as arrays:
        ids: TokenIds = arrays["ids"]
        return PackedText(ids, arrays["starts"], int(arrays["end"])) if "starts" in arrays else ids


def _id_array(ids: TokenIds) -> Any:
    return np.asarray(ids.tokens if isinstance(ids, PackedText) else ids)


def measure_speeds(folders: Sequence[Path], file: Path) -> dict[str, list[tuple[float, ...]]]:
    """Tokens per second of processor time on one thread. Each phase has a list with one tuple per round; a tuple
    has one value per folder.

    The folders alternate in the order A B, B A. `file` is as in `measure_folder`.
    """
    torch.set_num_threads(1)
    ids = _read_ids(file) if file.is_file() else None
    models = [(loaded := checkpoint.load(folder), load_step(loaded.model)) for folder in folders]
    rounds, start = list[list[tuple[float, float]]](), process_time()
    while len(rounds) <= ROUNDS[0] or (len(rounds) <= ROUNDS[1] and process_time() - start < SECONDS):
        order = -1 if len(rounds) % 2 else 1
        rounds.append([_speeds(*model, ids) for model in models[::order]][::order])
    # The first round also loads kernels, so it is left out.
    return {phase: [tuple(lap[i] for lap in laps) for laps in rounds[1:]] for i, phase in enumerate(PHASES)}


def _speeds(loaded: LoadedModel, step: Any, ids: TokenIds | None) -> tuple[float, float]:
    """Tokens per second of processor time, in prefill and in decoding."""
    context = loaded.context_length
    read = max(1, min(READ, context // 2))
    prompt = [1] * read if ids is None else _id_array(ids)[:read].tolist()
    limit = max(2, min(WRITTEN + 1, context - read))
    cache, start = PrefixCache(loaded.model, step=step), process_time()
    tokens = generate(loaded.model, prompt, max_tokens=limit, context_length=context, cache=cache)
    next(tokens)
    first = process_time()
    count = sum(1 for _ in tokens)
    return len(prompt) / (first - start), count / (process_time() - first)


def _most_probable(loaded: LoadedModel, ids: Any) -> list[int]:
    """The most probable next id after each of the first COMPARED ids, in windows of the context length."""
    width = loaded.context_length
    rows = torch.split(torch.from_numpy(ids[: COMPARED // width * width or width].astype(np.int64)), width)
    with torch.no_grad(), tree.mode(loaded.model, False):
        return [id for row in rows for id in loaded.model(row[None])[0].argmax(-1).tolist()]


if __name__ == "__main__":
    trust, threads, ids_file, *paths = sys.argv[1:]
    torch.set_num_threads(int(threads))
    with checkpoint.trust_cards(bool(trust)):
        folders, file = [Path(path) for path in paths], Path(ids_file)
        print(json.dumps(measure_folder(folders[0], file) if len(folders) == 1 else measure_speeds(folders, file)))
