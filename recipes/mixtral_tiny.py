"""A tiny character-level Mixtral with a shared expert, loss-free balancing and a z-loss; plots the experts' load.

python recipes/mixtral_tiny.py tinyshakespeare.txt [STEPS]
"""

from dataclasses import replace
from pathlib import Path

from dunes import checkpoint
from dunes.augment import apply_change
from dunes.checkpoint import Architecture, LoadedModel
from dunes.cli.process import run_recipe
from dunes.data import Windows
from dunes.evaluate.text_loss import evaluate
from dunes.models import mixtral
from dunes.models.initialise import initialise
from dunes.runs.picture import max_violation
from dunes.text import Tokenizer
from dunes.train import Schedule, Trainer, muon
from dunes.train.loss import next_token_loss

import numpy as np


def main(file: str, steps: int = 400, out: str = "runs/mixtral-tiny") -> float:
    text = Path(file).read_text()
    tokenizer = Tokenizer.train("chars", [text])
    ids = np.array(tokenizer.encode(text))
    cut = int(0.9 * len(ids))
    config = replace(mixtral.Config.from_size(tokenizer.vocab, 128, 4, 64), experts=8, top_k=2, balance=0.0)
    model = mixtral.build(config)
    change = apply_change(model, "routing", shared=1, bias_rate=0.001, z_loss=0.001)
    loaded = LoadedModel(initialise(model), tokenizer, 64)
    trainer = Trainer(model, muon(model), next_token_loss, lr_scale=Schedule.steps(steps, warmup=10).lr_scale)
    for step in trainer.run(Windows(ids[:cut], length=64, batch_size=32).batches()):
        if step.number % 100 == 0 or step.number == steps:
            worst = max(map(max_violation, step.metrics["expert_load"]))
            print(f"step {step.number}: loss {step.loss:.3f}, MaxVio of the least even layer {worst:.2f}")
        if step.number == steps:
            break
    checkpoint.save(model, out, tokenizer, 64, architecture=Architecture("mixtral", config, (change,)))
    return evaluate(loaded, ids[cut:]).loss


if __name__ == "__main__":
    report = lambda file, *steps: print(f"validation loss: {main(file, *map(int, steps)):.3f} nats/character")
    run_recipe(__doc__, report)
