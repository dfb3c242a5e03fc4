"""The demo: train three minutes on Python's standard library, then complete three lines of validation files.

python recipes/demo.py [MINUTES]
"""

import random
import time
from pathlib import Path

from dunes import checkpoint
from dunes.cli.recipe import run_recipe
from dunes.data import collect_corpus
from dunes.runs.progress import Display
from dunes.runs.text_generator import TextGenerator
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.runs.write import complete_line
from dunes.text.lines import split_lines

RUNS = Path(__file__).parent.parent / "runs"


def unseen_lines(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(file, text before, true ending) for lines of validation files, cut at a random column."""
    rng, examples = random.Random(seed), []
    programs = [d for d in collect_corpus(["stdlib"]).valid if d.name.endswith(".py") and d.size > 2_000]
    for document in rng.sample(programs, count):
        lines = split_lines("".join(document.text()))
        number = rng.choice([i for i, line in enumerate(lines) if i > 5 and 25 < len(line.strip()) < 75])
        line = lines[number].rstrip("\r\n")
        cut = rng.randrange(len(line) - len(line.lstrip()) + 6, len(line) - 3)
        examples.append((f"{document.name}:{number + 1}", "".join(lines[:number]) + line[:cut], line[cut:]))
    return examples


def main(minutes: float = 3.0) -> int:
    run = RUNS / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    status = train(TrainConfig(sources=("stdlib",), minutes=minutes), run, Display())
    loaded = checkpoint.load(run)
    generator = TextGenerator(loaded)
    print("\nCompletions of three lines from validation files, cut at a random column:")
    for place, before, ending in unseen_lines(3, seed=time.time_ns()):
        completion = complete_line(generator, before)
        print(f"\n  {place}\n    {split_lines(before)[-1].strip()}▏")
        print(f"    model:    {completion}\n    original: {ending}")
    print(f"\nloss curve: {run}/loss.png   samples: {run}/samples.md")
    print(f"model (Hugging Face format): {run}\n\nNext, train on your own code:")
    print("  .venv/bin/dunes train ~/code/project --out runs/project --minutes 15")
    print(f'  .venv/bin/dunes generate {run} "class "')
    return status


if __name__ == "__main__":
    run_recipe(__doc__, lambda *minutes: main(*map(float, minutes)))
