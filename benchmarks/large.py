"""Peak memory of tokenizing and training on 2 GB of synthetic text, more than fits into memory.

    python benchmarks/large.py --gigabytes 2 --folder /tmp/large

The text has the standard library's lines in random order with random names, so that all files differ. A second run
reuses the tokens and starts immediately.
"""

import json
import random
import re
import time
from multiprocessing import Process
from pathlib import Path

import tyro


def make(folder: Path, gigabytes: float) -> None:
    """Files of 10 MB."""
    from dunes.data import collect_corpus

    lines = [
        line
        for d in collect_corpus(["stdlib"]).train
        for block in d.text()
        for line in block.splitlines(keepends=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(round(gigabytes * 100)):
        path, rng = folder / f"part_{i}.py", random.Random(i)
        if path.exists():
            continue
        text, size = [], 0
        while size < 10_000_000:
            first = rng.randrange(len(lines))
            text += (re.sub(r"self|name", f"v{rng.randrange(1000)}", line) for line in lines[first : first + 50])
            size += sum(map(len, text[-50:]))
        path.write_text("".join(text))


def main(gigabytes: float = 2.0, folder: Path = Path("large"), steps: int = 50) -> None:
    """Train on synthetic text.

    Args:
        gigabytes: Size of the text.
        folder: Folder for the text, the tokens and the run.
        steps: Training steps.
    """
    import os

    from dunes import measure
    from dunes.progress import Display
    from dunes.runs.train import train
    from dunes.runs.train_config import TrainConfig

    os.environ["DUNES_HOME"] = str(folder / "home")
    maker = Process(target=make, args=(folder / "text", gigabytes))  # its memory is not the run's
    maker.start()
    maker.join()
    start = time.time()
    config = TrainConfig(sources=(str(folder / "text"),), steps=steps, size="2m")
    status = train(config, folder / f"run-{time.time_ns()}", Display())
    peak = measure.peak_memory(measure.device()) / 1e9
    print(json.dumps({"status": status, "seconds": time.time() - start, "peak_gigabytes": peak}))


if __name__ == "__main__":
    tyro.cli(main)
