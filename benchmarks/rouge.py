"""Time of checking an instruction for similarity to earlier ones, against the package rouge_score.

    python benchmarks/rouge.py seed_tasks.jsonl [--earlier 2000 52000]

New instructions combine halves of two seeds. Both sides must return the same maximum F score; rouge_score gets
tokens, as in Alpaca's loop, and runs in one process.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import tyro


def timed(work: Callable[..., float], *arguments: object) -> tuple[float, float]:
    start = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - start


def main(seeds: tyro.conf.Positional[str], earlier: Sequence[int] = (2_000, 52_000), new: int = 3) -> None:
    """Measure.

    Args:
        seeds: File of seed tasks.
        earlier: Numbers of earlier instructions.
        new: Number of new instructions.
    """
    sys.path.append(str(Path(__file__).parents[1] / "recipes"))
    from teacher.tasks import MAX_SIMILARITY, InstructionIndex, read_seed_tasks

    from rouge_score import rouge_scorer, tokenize

    texts = [task.instruction.split() for task in read_seed_tasks(seeds)]
    rng = random.Random(0)

    def make_text() -> str:
        a, b = rng.sample(texts, 2)
        return " ".join(a[: len(a) // 2] + b[len(b) // 2 :])

    def nearest(text: list[str], past: list[list[str]]) -> float:
        return max(rouge_scorer._score_lcs(text, tokens).fmeasure for tokens in past)

    result = {}
    for count in earlier:
        past, queries = [make_text() for _ in range(count)], [make_text() for _ in range(new)]
        tokens, index = [tokenize.tokenize(text, None) for text in past], InstructionIndex(past)
        index.nearest("")  # imports
        rows = []
        for text in queries:
            ours, fast = timed(lambda i, t: (i.nearest(t, MAX_SIMILARITY) or (0.0, ""))[0], index, text)
            theirs, slow = timed(nearest, tokenize.tokenize(text, None), tokens)
            assert ours == (theirs if theirs > MAX_SIMILARITY else 0.0), text
            rows.append((fast, slow))
        fast, slow = (median(side) for side in zip(*rows, strict=True))
        print(f"{count} earlier: {fast * 1e3:.2f} ms, rouge_score {slow * 1e3:.0f} ms, {slow / fast:.0f} times")
        result[count] = {"ms": fast * 1e3, "theirs": slow * 1e3, "factor": slow / fast}
    print(json.dumps(result))


if __name__ == "__main__":
    tyro.cli(main)
