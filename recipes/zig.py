"""Train on Zig's standard library, then generate and complete Zig code.

    python recipes/zig.py path/to/zig/lib/std [MINUTES]

Without Zig: `pip download --no-deps ziglang==0.17.0` fetches a wheel (a zip file) that contains it.
"""

from pathlib import Path

from dunes.cli.process import run_recipe
from dunes.completion.completer import FolderCompleter
from dunes.generate import sampler
from dunes.inference.text_generator import TextGenerator
from dunes.progress import Display
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig


def main(folder: str, minutes: float = 15.0, out: str = "runs/zig") -> int:
    if status := train(TrainConfig(sources=(folder,), minutes=minutes), Path(out), Display()):
        return status
    completer = FolderCompleter(Path(out))
    print(TextGenerator(completer.loaded).text("pub fn ", 200, sampler(0.7, top_k=50)))
    for prefix in ("const std = @im", "    for (items) |", "pub fn deinit(self: *S"):
        print(f"{prefix}▏{completer.complete(prefix).text}")
    return 0


if __name__ == "__main__":
    run_recipe(__doc__, lambda folder, *minutes: main(folder, *map(float, minutes)))
