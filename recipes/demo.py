"""Demo: learn Python's standard library in at most three minutes, then complete lines of files left out.

python recipes/demo.py [MINUTES]

Lines are completed with a published model, copies and a gate, if it can be downloaded (93 MB); otherwise a new
model is trained. The published one has probably read the standard library, so that its share of right lines is
higher here than in a project that it has not seen.
"""

import math
import random
import time
from pathlib import Path

from dunes import checkpoint
from dunes.cli.process import run_recipe
from dunes.completion import LineCompleter
from dunes.completion.completer import CopyNearest, FolderCompleter, find_completer
from dunes.completion.keystrokes import CutPoint, cut_points
from dunes.data.document import document_texts
from dunes.evaluate.completion import Point, ScoredFile, scored_files
from dunes.progress import Display, each, phase, shown_by
from dunes.runs.train import train
from dunes.runs.train_config import TrainConfig
from dunes.text.lines import split_lines

RUNS = Path(__file__).parent.parent / "runs"
SHOWN, SCORED = 10, 100
"""Cursors that are shown, and that are counted."""
OPEN = "smollm2"

Place = tuple[ScoredFile, CutPoint]


def unseen_places(completer: FolderCompleter, count: int, seed: int) -> list[Place]:
    """Random cursors inside lines of the files that the training left for a test."""
    texts = [*document_texts(completer.test_documents())]
    files = scored_files(texts, completer.training_files, all_lines=True).files
    each = math.ceil(2 * count / len(files))
    places = [(file, cut) for file in files for cut in cut_points(file.name, file.text, file.lines, seed, each)]
    inside = [place for place in places if place[1].kind == "character"]
    return random.Random(seed).sample(inside, min(count, len(inside)))


def answers(completer: LineCompleter, places: list[Place]) -> list[str]:
    """Suggested text at each place, from the text above it."""
    return [completer.complete(file.text[: cut.offset], "", file.name).text for file, cut in each(places)]


def find_base() -> str:
    """The name of the published model; empty if it cannot be had, which is printed."""
    try:
        checkpoint.locate_model(OPEN)
    except (ValueError, OSError) as error:
        print(f"trains a new model, without a published one: {error}")
        return ""
    return OPEN


def main(minutes: float = 3.0) -> int:
    run, base = RUNS / f"demo-{time.strftime('%Y%m%d-%H%M%S')}", find_base()
    status = train(TrainConfig(sources=("stdlib",), base=base, minutes=minutes), run, Display())
    completer = find_completer(run, print)
    assert isinstance(completer, FolderCompleter), "the run has ended"
    places = unseen_places(completer, SCORED, seed=time.time_ns())
    with Display() as display, shown_by(display.time_left):
        with phase(f"completing {len(places)} lines", end=0.8):
            said = answers(completer, places)
        with phase("indexing the training files", 0.8, 0.95):
            copier = CopyNearest.of_files(completer.training_files)
        with phase(f"completing {len(places)} lines by copying alone", 0.95):
            copied = answers(copier, places)
    print(f"\nThe rest of {SHOWN} random lines of files left out of the training (✓ right):")
    for (file, cut), text in list(zip(places, said, strict=True))[:SHOWN]:
        right = Point(0, cut, text).exact
        number, line = file.text.count("\n", 0, cut.offset) + 1, split_lines(file.text[: cut.offset])[-1]
        print(f"\n  {file.name}:{number}\n  {'✓' if right else ' '} {line.strip()}▏{text}")
        if not right:
            print(f"    was: {' ' * max(0, len(line.strip()) - 4)}{cut.rest}")
    shares = [
        sum(Point(0, cut, text).exact for text, (_, cut) in zip(texts, places, strict=True)) / len(places)
        for texts in (said, copied)
    ]
    print(f"\nof {len(places)} such lines {shares[0]:.0%} are right, and by copying alone {shares[1]:.0%}")
    if not base:
        print(f"loss curve: {run}/loss.png   samples: {run}/samples.md\nmodel (Hugging Face format): {run}")
    print("\nNext, train on your own code, and complete its lines:")
    of_base = f" --from {base}" if base else ""
    print(f"  .venv/bin/dunes train ~/code/project{of_base} --out runs/project --minutes 15")
    print("  .venv/bin/dunes complete runs/project ~/code/project/main.py:12:9")
    print("and in your editor (docs/editors.md):")
    print("  .venv/bin/pip install -e '.[serve,lsp]' && .venv/bin/dunes serve runs/project")
    return status


if __name__ == "__main__":
    run_recipe(__doc__, lambda *minutes: main(*map(float, minutes)))
