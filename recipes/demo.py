"""The demo: three minutes on the running Python's standard library, then three lines it has not seen.

python recipes/demo.py [MINUTES]
"""

import random
import time
from pathlib import Path

from dunes import checkpoint
from dunes.cli.recipe import run_recipe
from dunes.data import collect_corpus
from dunes.runs.progress import Display
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.runs.write import complete_line
from dunes.text.lines import split_lines

RUNS = Path(__file__).parent.parent / "runs"


def unseen_lines(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(file, text before, true ending) for lines cut at a random place, from files held out of training."""
    chance, found = random.Random(seed), []
    programs = [d for d in collect_corpus(["stdlib"]).valid if d.name.endswith(".py") and d.size > 2_000]
    for document in chance.sample(programs, count):
        lines = split_lines("".join(document.text()))
        number = chance.choice([i for i, line in enumerate(lines) if i > 5 and 25 < len(line.strip()) < 75])
        line = lines[number].rstrip("\r\n")
        cut = chance.randrange(len(line) - len(line.lstrip()) + 6, len(line) - 3)
        found.append((f"{document.name}:{number + 1}", "".join(lines[:number]) + line[:cut], line[cut:]))
    return found


def main(minutes: float = 3.0) -> int:
    run = RUNS / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    status = train(TrainConfig(sources=("stdlib",), minutes=minutes), run, Display())
    loaded = checkpoint.load(run)
    print("\nThree lines from files it has not seen, cut at a random place:")
    for place, before, truth in unseen_lines(3, seed=time.time_ns()):
        guess = complete_line(loaded.model, loaded.tokenizer, loaded.context_length, before)
        print(f"\n  {place}\n    {split_lines(before)[-1].strip()}▏\n    it says:  {guess}\n    it was:   {truth}")
    print(f"\nThe picture of its learning: {run}/loss.png\nWhat it wrote on the way:    {run}/samples.md")
    print(f"The model, which Hugging Face's tools open too: {run}\n\nTry your own code next:")
    print("  .venv/bin/dunes train ~/code/project --out runs/project --minutes 15")
    print(f'  .venv/bin/dunes generate {run} "class "')
    return status


if __name__ == "__main__":
    run_recipe(__doc__, lambda *minutes: main(*map(float, minutes)))
