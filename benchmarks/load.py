"""Time and memory of loading, converting and inspecting a 2.2 GB folder, each in a new process.

    python benchmarks/load.py

The folder has TinyLlama's shape (1.1 billion parameters, bfloat16, random weights) and no card, like a download.
Loading alternates with transformers' `from_pretrained`; times are from after the import until the model is loaded,
and until a forward pass on eight tokens has read every weight. Converting is compared with copying the file,
`inspect --values` with copying as many bytes in memory. Memory is the growth of the process.
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
    from dunes.checkpoint.open import load_decoder
    from dunes.checkpoint.open import open_model
else:
    from transformers import AutoModelForCausalLM
ids = torch.arange(8)[None]
before = measure.resident_memory()
measure.reset_peak_memory(torch.device("cpu"))
start = time.perf_counter()
if side == "dunes":
    model = load_decoder(open_model(Path(folder))).eval()
else:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
there = time.perf_counter() - start
with torch.no_grad():
    model(ids)
answered = time.perf_counter() - start
numbers = {"there": there, "answered": answered, "resident": measure.resident_memory() - before}
print(json.dumps(numbers | {"peak": measure.peak_memory(torch.device("cpu")) - before}))
"""

CONVERT = """
import json, shutil, sys, time, torch
from pathlib import Path
from dunes import measure
from dunes.files import atomic
from dunes.checkpoint.convert import convert
from dunes.checkpoint.inspect import odd_values
from dunes.checkpoint.open import open_model
from dunes.checkpoint.weights.lazy_tensor import in_memory
folder, scratch = map(Path, sys.argv[1:])
cpu = torch.device("cpu")

def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

def copied():
    shutil.copyfile(folder / "model.safetensors", scratch / "copy")
    atomic.fsync_path(scratch / "copy")

source = open_model(folder)
size = sum(w.nbytes for w in source.files.values())
found = {"copy": timed(copied)}
(scratch / "copy").unlink()
before = measure.reset_peak_memory(cpu)
found["convert"] = timed(lambda: convert(source, scratch / "out"))
found["grown"] = measure.peak_memory(cpu) - before
found["largest"] = max(w.nbytes for w in source.files.values())
one, two = torch.ones(size // 8), torch.empty(size // 8)
found["copied"] = max(one.nbytes / timed(lambda: two.copy_(one)) for _ in range(3))
found["scanned"] = max(size / timed(lambda: list(odd_values(source.files))) for _ in range(3))
here = in_memory({k: w.read().clone() for k, w in list(source.files.items())[:40]})
size = sum(w.nbytes for w in here.values())
found["scanned here"] = max(size / timed(lambda: list(odd_values(here))) for _ in range(3))
print(json.dumps(found))
"""


def make(folder: Path, layers: int) -> int:
    """Write the folder, and return the bytes of its weights."""
    from dunes.checkpoint.weights import safetensors_file
    from dunes.checkpoint.weights.lazy_tensor import LazyTensor, renamed
    from dunes.models import FAMILIES
    from dunes.models.names import to_theirs

    llama = FAMILIES["llama"]
    with torch.device("meta"):
        state = llama.build(llama.from_hf(SHAPE | {"num_hidden_layers": layers})).state_dict()

    def made(key: str, shape: torch.Size) -> LazyTensor:
        return LazyTensor(tuple(shape), torch.bfloat16, key, lambda: torch.randn(shape).mul_(0.02).bfloat16())

    ours = {key: made(key, t.shape) for key, t in state.items()}
    folder.mkdir(parents=True)
    safetensors_file.write_tensors(folder, renamed(to_theirs(llama.NAMES, ours)[0], ours))
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    return sum(w.nbytes for w in ours.values())


def run_program(program: str, *arguments: str) -> dict[str, float]:
    """Run a program in a new process, and parse its last line."""
    command = [sys.executable, "-c", program, *arguments]
    result: dict[str, float] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    return result


def main(rounds: int = 5, layers: int = 22, folder: Path | None = None) -> None:
    """Measure.

    Args:
        rounds: Rounds of each side.
        layers: Number of layers; fewer make a smaller folder.
        folder: Keep the model folder there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model_folder = folder or Path(scratch) / "model"
        size = (
            (model_folder / "model.safetensors").stat().st_size
            if model_folder.exists()
            else make(model_folder, layers)
        )
        sides: dict[str, list[dict[str, float]]] = {"dunes": [], "transformers": []}
        for i in range(rounds + 1):  # the first round fills the page cache
            for side in sorted(sides, reverse=bool(i % 2)):
                row = run_program(SIDE, side, str(model_folder))
                if i:
                    sides[side].append(row)
        other = run_program(CONVERT, str(model_folder), scratch)
    middle = {s: {k: median(r[k] for r in runs) for k in runs[0]} for s, runs in sides.items()}
    for side, m in middle.items():
        print(
            f"{side:13} loaded after {m['there']:.2f} s, first forward pass after {m['answered']:.2f} s, "
            f"resident {m['resident'] / size:.2f} and peak {m['peak'] / size:.2f} times the {size / 1e9:.2f} GB"
        )
    ratio = {k: middle["transformers"][k] / middle["dunes"][k] for k in ("there", "answered")}
    there, answered = ratio["there"], ratio["answered"]
    print(f"transformers takes {there:.1f} times as long to load, {answered:.1f} until the first forward pass")
    print(
        f"converting takes {other['convert']:.1f} s and copying the file {other['copy']:.1f} s; it grows by "
        f"{other['grown'] / 1e9:.2f} GB for a largest tensor of {other['largest'] / 1e9:.2f} GB"
    )
    rates = [f"{other[k] / other['copied']:.0%}" for k in ("scanned here", "scanned")]
    print(f"values are checked at {rates[0]} of the rate of copying in memory, {rates[1]} in a mapped file")
    print(json.dumps({"benchmark": "load", "bytes": size, **middle, "ratio": ratio, "convert": other}))


if __name__ == "__main__":
    tyro.cli(main)
