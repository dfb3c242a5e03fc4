"""Compare a model before and after a change: loss, size, memory and speed.

Each folder is measured in its own process, so that the memory of one model is measured alone, as a user runs it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
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
from dunes.generate.packages import load_step
from dunes.units import format_bytes

SCORED = 65_536
"""Approximate number of validation tokens that are scored."""
COMPARED = 8_192
"""Approximate number of validation tokens after which the greedy predictions are compared."""
READ = 128
"""Maximum number of prompt tokens when speed is measured."""
WRITTEN = 64
"""Maximum number of tokens, after the first generated token, whose decoding is timed."""
ROUNDS = 3
"""Number of rounds of prefill and decoding; the fastest round counts."""
SLOWER = 1.05
"""A model is reported as slower if the ratio of the times is above this; smaller ratios are noise."""


@dataclass(frozen=True)
class Measurement:
    """A folder's `size` and `memory` in bytes, `prefill` and `decode` in tokens/s, and `loss` in nats/token.

    `memory` is the peak of loading, prefill and decoding. `form` names the implementation that decoded.
    """

    size: int
    memory: int
    prefill: float
    decode: float
    form: str
    loss: float | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Comparison:
    """Both measurements, and the fraction of validation tokens after which both models predict the same token."""

    before: Measurement
    after: Measurement
    agreement: float | None

    def warnings(self) -> list[str]:
        """A list with one line if decoding or prefill became slower, otherwise empty."""
        a, b = self.before, self.after
        ratios = {"decoding": a.decode / b.decode, "reading a prompt": a.prefill / b.prefill}
        slower = [f"{phase} takes {ratio:.1f} times" for phase, ratio in ratios.items() if ratio > SLOWER]
        return [f"slower: {' and '.join(slower)} as long as before"] if slower else []

    def lines(self) -> list[str]:
        """A table as lines of text."""
        a, b = self.before, self.after
        rows = [f"{'':18}{'before':>12}{'after':>12}"]
        if a.loss is None or b.loss is None:
            rows.append("validation loss not measured: no validation text is known; pass --validation FILE")
        else:
            rows += [
                f"{'validation loss':18}{a.loss:12.4f}{b.loss:12.4f}  {b.loss - a.loss:+.4f} nats/token, "
                f"{a.tokens:,} tokens",
                f"{'perplexity':18}{np.exp(a.loss):12.3f}{np.exp(b.loss):12.3f}",
                f"{'equal top-1 tokens':18}{'':12}{self.agreement:12.1%}",
            ]
        for name, x, y in (("size on disk", a.size, b.size), ("peak memory", a.memory, b.memory)):
            rows.append(f"{name:18}{format_bytes(x):>12}{format_bytes(y):>12}  {y / max(1, x):.2f} times")
        for name, old, new in (("prefill", a.prefill, b.prefill), ("decoding", a.decode, b.decode)):
            rows.append(f"{name:18}{old:12,.0f}{new:12,.0f}  tokens/s, {new / old:.2f} times")
        forms = a.form if a.form == b.form else f"before {a.form}, after {b.form}"
        rows.append(f"decoded by {forms}; dunes compile MODEL makes a compiled step")
        return rows


def compare_folders(before: Path, after: Path, ids: TokenIds | None) -> Comparison | str:
    """Measure both folders, with their loss if there are validation ids. Returns a message if a process failed."""
    try:
        with TemporaryDirectory() as scratch:
            if ids is not None:
                _write_ids(Path(scratch) / "ids.npz", ids)
            first, second = (_run_measurement(folder, Path(scratch)) for folder in (before, after))
    except (ValueError, OSError) as error:  # do not lose the work that is to be reported
        return f"not measured: {error}"
    top = [np.array(facts.pop("top")) for facts in (first, second)]
    agreement = float((top[0] == top[1]).mean()) if len(top[0]) else None
    return Comparison(Measurement(**first), Measurement(**second), agreement)


def _run_measurement(folder: Path, scratch: Path) -> dict[str, Any]:
    """The result of `measure_folder` in a new process. Raises ValueError with the last line of its stderr."""
    options = [str(torch.get_num_threads()), *["trust"] * checkpoint.cards_trusted()]
    command, environment = python_command(
        "-m", "dunes.evaluate.comparison", str(folder), str(scratch / "ids.npz"), *options
    )
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        reason = next(iter(process.stderr.strip().splitlines()[-1:]), f"exit status {process.returncode}")
        raise ValueError(f"{folder}: {reason}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def measure_folder(folder: Path, file: Path) -> Mapping[str, Any]:
    """The fields of a Measurement, and `top`: the most probable next id after each id in `file`, if it exists."""
    cpu = torch.device("cpu")
    share_cores()
    measure.keep_freed_memory()
    before = measure.reset_peak_memory(cpu)
    loaded = checkpoint.load(folder)
    step = load_step(loaded.model)
    ids = _read_ids(file) if file.is_file() else None
    prefill, decode = _speeds(loaded, step, ids)
    memory = measure.peak_memory(cpu) - before
    score = None if ids is None else evaluate(loaded, ids, limit=SCORED)
    return {
        "size": sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".dunes")),
        "memory": memory,
        "prefill": prefill,
        "decode": decode,
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


def _speeds(loaded: LoadedModel, step: Any, ids: TokenIds | None) -> tuple[float, float]:
    """Tokens/s of prefill and of decoding, the fastest of ROUNDS rounds."""
    context = loaded.context_length
    read = max(1, min(READ, context // 2))
    prompt = [1] * read if ids is None else _id_array(ids)[:read].tolist()
    prefill = decode = 0.0
    for _ in range(ROUNDS):
        cache, start = PrefixCache(loaded.model, step=step), time.perf_counter()
        limit = max(2, min(WRITTEN + 1, context - read))
        tokens = generate(loaded.model, prompt, max_tokens=limit, context_length=context, cache=cache)
        next(tokens)
        first = time.perf_counter()
        count = sum(1 for _ in tokens)
        prefill = max(prefill, len(prompt) / (first - start))
        decode = max(decode, count / (time.perf_counter() - first))
    return prefill, decode


def _most_probable(loaded: LoadedModel, ids: Any) -> list[int]:
    """The most probable next id after each of the first COMPARED ids, in windows of the context length."""
    width = loaded.context_length
    rows = torch.split(torch.from_numpy(ids[: COMPARED // width * width or width].astype(np.int64)), width)
    with torch.no_grad(), tree.mode(loaded.model, False):
        return [id for row in rows for id in loaded.model(row[None])[0].argmax(-1).tolist()]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    with checkpoint.trust_cards("trust" in sys.argv[4:]):
        print(json.dumps(measure_folder(Path(sys.argv[1]), Path(sys.argv[2]))))
