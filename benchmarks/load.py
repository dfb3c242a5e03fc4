"""Loading a 2.2 GB folder: ours and transformers' `from_pretrained`, each in a process of its own, interleaved.

    python benchmarks/load.py

The folder has TinyLlama's shape (1.1 billion parameters, bfloat16, made-up numbers) and no card, as a
download has none. A process imports its library first; then the clock runs until the model is there, and
until it has answered one token, when every weight was read. Memory is what the process grew by.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import tyro

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SIDE = """
import json, sys, time, torch
from dunes import measure
side, folder = sys.argv[1:]
if side == "dunes":
    from pathlib import Path
    from dunes.checkpoint.folder import filled
    from dunes.checkpoint.source import opened
else:
    from transformers import AutoModelForCausalLM
ids = torch.arange(8)[None]
before = measure.resident()
measure.forget_peak(torch.device("cpu"))
start = time.perf_counter()
if side == "dunes":
    model = filled(opened(Path(folder))).eval()
else:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
there = time.perf_counter() - start
with torch.no_grad():
    model(ids)
answered = time.perf_counter() - start
numbers = {"there": there, "answered": answered, "resident": measure.resident() - before}
print(json.dumps(numbers | {"peak": measure.peak_memory(torch.device("cpu")) - before}))
"""


def make(folder: Path) -> int:
    """The folder; returns the bytes of its weights."""
    from dunes.checkpoint import stream
    from dunes.checkpoint.stored import Stored, moved
    from dunes.models import FAMILIES
    from dunes.models.names import to_theirs

    llama = FAMILIES["llama"]
    with torch.device("meta"):
        state = llama.build(llama.from_hf(SHAPE)).state_dict()

    def made(key: str, shape: torch.Size) -> Stored:
        return Stored(tuple(shape), torch.bfloat16, key, lambda: torch.randn(shape).mul_(0.02).bfloat16())

    ours = {key: made(key, t.shape) for key, t in state.items()}
    folder.mkdir(parents=True)
    stream.write(folder, moved(to_theirs(llama.NAMES, ours)[0], ours))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return sum(w.nbytes for w in ours.values())


def main(rounds: int = 5, folder: Path | None = None) -> None:
    """Measure.

    Args:
        rounds: Loads of each side.
        folder: Keep the made folder there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        where = folder or Path(scratch) / "model"
        size = (where / "model.safetensors").stat().st_size if where.exists() else make(where)
        sides: dict[str, list[dict[str, float]]] = {"dunes": [], "transformers": []}
        for i in range(rounds + 1):  # the first round brings the file into the system's cache
            for side in sorted(sides, reverse=bool(i % 2)):
                command = [sys.executable, "-c", SIDE, side, str(where)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                if i:
                    sides[side].append(json.loads(done.stdout.splitlines()[-1]))
    middle = {s: {k: median(r[k] for r in runs) for k in runs[0]} for s, runs in sides.items()}
    for side, m in middle.items():
        print(
            f"{side:13} there after {m['there']:.2f} s, answered after {m['answered']:.2f} s, "
            f"resident {m['resident'] / size:.2f} and peak {m['peak'] / size:.2f} times the {size / 1e9:.2f} GB"
        )
    ratio = {k: middle["transformers"][k] / middle["dunes"][k] for k in ("there", "answered")}
    print(f"transformers takes {ratio['there']:.1f} times as long to load, {ratio['answered']:.1f} to answer")
    print(json.dumps({"benchmark": "load", "bytes": size, **middle}))


if __name__ == "__main__":
    tyro.cli(main)
