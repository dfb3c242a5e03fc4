"""Cost of saving in the background: the same training steps with and without saves, in alternation.

    python benchmarks/save.py --size 4m

The stall is the additional time of a series of steps with one save, which a run with one save per minute loses
each minute.
"""

import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median

import tyro


def main(size: str = "4m", rounds: int = 8, steps: int = 10) -> None:
    """Measure.

    Args:
        size: Number of parameters.
        rounds: Series of each kind.
        steps: Steps per series; a save must finish within it.
    """
    from dunes import measure
    from dunes.progress import Display
    from dunes.runs.autosize import autosize_run
    from dunes.runs.corpus import gather, tokenize
    from dunes.runs.saving import Saver
    from dunes.runs.train import prepare
    from dunes.runs.train_config import TrainConfig

    measure.keep_freed_memory()
    config = TrainConfig(sources=("stdlib",), size=size, steps=10**6)
    corpus = gather(config)
    config, _ = autosize_run(config, sum(d.size for d in corpus.train))
    folder = Path(tempfile.mkdtemp())
    try:
        with Display() as show:
            run = prepare(config, folder, tokenize(config, corpus, None, show))
        stream = run.trainer.run(run.task.batches(0))
        list(islice(stream, 5))
        timings: dict[bool, list[float]] = {True: [], False: []}
        blocked = []
        with ThreadPoolExecutor(1) as pool:
            saver = Saver(pool, print, strict=True)
            for _ in range(rounds):
                for saving in (False, True):
                    start = time.perf_counter()
                    if saving:
                        saver.start(run)
                        blocked.append(time.perf_counter() - start)
                    list(islice(stream, steps))
                    timings[saving].append(time.perf_counter() - start)
                    saver.wait()
        size_mb = sum(f.stat().st_size for f in (folder / "state").rglob("*") if f.is_file()) / 1e6
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stall = median(timings[True]) - median(timings[False])
    print(
        f"{size}: {size_mb:.0f} MB in two; blocked {median(blocked) * 1e3:.0f} ms; stall {stall * 1e3:.0f} ms of "
        f"{median(timings[False]) / steps * 1e3:.0f} ms/step; {stall / 60:.2%} of a minute"
    )
    print(json.dumps({"benchmark": "save", "stall_seconds": stall, "blocked_seconds": median(blocked)}))


if __name__ == "__main__":
    tyro.cli(main)
