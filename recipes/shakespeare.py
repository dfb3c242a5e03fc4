"""A character model of Shakespeare with an explicit training loop; the last tenth is the validation split.

python recipes/shakespeare.py tinyshakespeare.txt [STEPS]
"""

from pathlib import Path

from dunes import checkpoint, tree
from dunes.checkpoint import LoadedModel
from dunes.cli.process import run_recipe
from dunes.data import Windows
from dunes.evaluate.text_loss import evaluate
from dunes.inference.text_generator import sample_text
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.text import Tokenizer
from dunes.train import Schedule, Trainer, muon
from dunes.train.loss import next_token_loss

import numpy as np


def main(file: str, steps: int = 400, out: str = "runs/shakespeare") -> float:
    text = Path(file).read_text()
    tokenizer = Tokenizer.train("chars", [text])
    ids = np.array(tokenizer.encode(text))
    cut = int(0.9 * len(ids))
    model = initialise(llama.build(llama.Config.from_size(tokenizer.vocab, dim=128, depth=4, context_length=64)))
    print(f"{tree.count(model):,} parameters")
    loaded = LoadedModel(model, tokenizer, 64)
    schedule = Schedule.steps(steps, warmup=10)
    trainer = Trainer(model, muon(model), next_token_loss, lr_scale=schedule.lr_scale)
    for step in trainer.run(Windows(ids[:cut], length=64, batch_size=32).batches()):
        if step.number % 100 == 0:
            score = evaluate(loaded, ids[cut:], limit=20_000)
            print(f"step {step.number}: loss {step.loss:.3f}, validation loss {score.loss:.3f}")
            print(sample_text(loaded), "\n")
        if schedule.is_over(step.number):
            break
    checkpoint.save(model, out, tokenizer, 64)
    return evaluate(loaded, ids[cut:]).loss


if __name__ == "__main__":
    report = lambda file, *steps: print(f"validation loss: {main(file, *map(int, steps)):.3f} nats/character")
    run_recipe(__doc__, report)
